"""The FLOP ratio: the published headline shape, brute-force counts, and bounds that always hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, LlamaConfig, Qwen3Config

from radixmlp.reference import RaggedBatch
from radixmlp.reference.trie import build_plan
from radixmlp.verify.ideal import DecoderShape, ideal_speedup, path_of, visible_pairs

QWEN3_8B = DecoderShape(4096, 32, 8, 128, 12288, 151_936, (None,))
TINY = DecoderShape(64, 4, 2, 16, 128, 512, (None, 8))


def headline_batch() -> RaggedBatch:
    """Qwen3-8B's headline shape (arXiv 2601.15013): 2,048 shared and 256 own tokens, 32 sequences."""
    prefix = torch.arange(2048)
    return RaggedBatch.from_sequences(
        [torch.cat([prefix, torch.arange(256) + 3000 * (b + 1)]) for b in range(32)]
    )


def test_headline_shape_has_the_known_ideals() -> None:
    batch = headline_batch()
    plan = build_plan(batch)
    flops = ideal_speedup(QWEN3_8B, batch, plan)
    assert plan.compression_ratio == pytest.approx(7.2)
    assert flops.speedup("scatter") == pytest.approx(5.58, abs=0.01)
    assert flops.speedup("trie") == pytest.approx(6.98, abs=0.01)
    assert flops.speedup("dense") == 1.0


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(rows=sequences, window=st.sampled_from([None, 1, 3]))
def test_pairs_equal_a_brute_force_count(rows: list[list[int]], window: int | None) -> None:
    plan = build_plan(RaggedBatch.from_sequences(rows))
    prefixes = {tuple(row[: i + 1]) for row in rows for i in range(len(row))}
    expected = sum(min(len(p), window or len(p)) for p in prefixes)
    assert visible_pairs(plan.depth, window) == expected


@settings(max_examples=60, deadline=None)
@given(rows=sequences, order=st.sampled_from(["trie", "input"]), logits_rows=st.integers(0, 8))
def test_trie_never_costs_more_than_scatter_nor_scatter_than_dense(
    rows: list[list[int]], order: str, logits_rows: int
) -> None:
    batch = RaggedBatch.from_sequences(rows)
    plan = build_plan(batch, order=order)  # type: ignore[arg-type]
    flops = ideal_speedup(TINY, batch, plan, logits_rows)
    assert flops.trie <= flops.scatter <= flops.dense
    assert 1 <= flops.speedup("trie") <= batch.num_sequences  # a node serves each sequence once at most


def test_counts_match_the_matrices_of_a_real_layer() -> None:
    """Position-wise FLOPs are twice the weights of the layer's matrices."""
    from transformers import Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=160, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    weights = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    shape = DecoderShape.from_config(config)
    assert shape.flops_per_row == 2 * weights
    assert shape.flops_per_pair == 2 * 2 * 4 * 24
    assert shape.flops_per_logits_row == 2 * model.lm_head.weight.numel()


def test_config_defaults_and_windows() -> None:
    llama = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=3, intermediate_size=96)
    shape = DecoderShape.from_config(llama)
    assert (shape.head_dim, shape.num_key_value_heads, shape.layer_windows) == (16, 4, (None,) * 3)
    gemma = Gemma2Config(hidden_size=64, num_attention_heads=4, num_hidden_layers=4, sliding_window=24)
    windows = DecoderShape.from_config(gemma).layer_windows
    assert set(windows) == {24, None}


def test_a_config_without_the_fields_is_refused() -> None:
    class Empty:
        num_attention_heads = 4

    with pytest.raises(ValueError, match="Empty has no hidden_size"):
        DecoderShape.from_config(Empty())


def test_paths_by_name() -> None:
    assert [path_of(n) for n in ("dense-sdpa", "scatter-flash", "trie-sdpa", "my-experiment")] == [
        "dense", "scatter", "trie", "trie",
    ]  # fmt: skip
