"""All alternatives compute the same last-token results, and padding says what it should."""

import inspect
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from radixmlp.reference import RaggedBatch
from radixmlp.verify import variants
from radixmlp.verify.variants import (
    DENSE_PADDED,
    DENSE_RAGGED,
    PREFIX_KV,
    build_variants,
    cache_argument,
    common_prefix_length,
    output_head,
    pad_rows,
)

ALL = [DENSE_PADDED, DENSE_RAGGED, "scatter-sdpa", "trie-sdpa", PREFIX_KV]
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=5),
}


def random_model(config: Any, head: bool = True, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = (
        (AutoModelForCausalLM if head else AutoModel)
        .from_config(config, dtype=torch.float32, **kwargs)
        .eval()
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # strong enough for a wrong mask to show
    return model


def shared_batch(prefix: int, suffixes: list[int], vocab: int = 97) -> RaggedBatch:
    random = torch.Generator().manual_seed(prefix + sum(suffixes))
    stem = torch.randint(3, vocab, (prefix,), generator=random)
    tails = [torch.randint(3, vocab, (n,), generator=random) for n in suffixes]
    for b, tail in enumerate(tails):
        tail[0] = 3 + b
    return RaggedBatch.from_sequences([torch.cat([stem, tail]) for tail in tails])


def assert_all_agree(model: Any, batch: RaggedBatch, names: list[str]) -> None:
    outputs = {name: call() for name, call in build_variants(model, batch, names).items()}
    assert list(outputs) == names
    dense = outputs[DENSE_PADDED]
    scale = float(dense.abs().max())
    assert scale > 0.1
    for name, output in outputs.items():
        assert output.shape == dense.shape
        assert float((output - dense).abs().max()) < 2e-5 * scale, name


@pytest.mark.parametrize("suffixes", [[6, 6, 6], [3, 9, 1, 5]], ids=["equal", "ragged"])
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("head", [True, False], ids=["logits", "hidden"])
def test_variants_agree(family: str, head: bool, suffixes: list[int]) -> None:
    model = random_model(CONFIGS[family], head)
    batch = shared_batch(11, suffixes)
    assert_all_agree(model, batch, ALL)
    width = model.config.vocab_size if head else model.config.hidden_size
    call = build_variants(model, batch, ["trie-sdpa"])["trie-sdpa"]
    assert call().shape == (len(suffixes), width)


def test_variants_agree_on_moved_positions() -> None:
    model = random_model(CONFIGS["qwen3"])
    plain = shared_batch(7, [4, 2, 6])
    moved = RaggedBatch(plain.input_ids, 3 * plain.position_ids + 5, plain.cu_seqlens)
    assert_all_agree(model, moved, ALL)
    dense = [build_variants(model, b, [DENSE_PADDED])[DENSE_PADDED]() for b in (plain, moved)]
    assert float((dense[0] - dense[1]).abs().max()) > 1e-2


def test_a_models_own_scaling_of_logits_still_runs() -> None:
    """Gemma 2 soft-caps its logits after the head."""
    config = Gemma2Config(
        **SIZES, final_logit_softcapping=0.5, attn_logit_softcapping=None, sliding_window=64
    )
    model = random_model(config)
    batch = shared_batch(5, [4, 2])
    assert_all_agree(model, batch, [DENSE_PADDED, PREFIX_KV, "trie-sdpa"])
    assert float(build_variants(model, batch, [DENSE_PADDED])[DENSE_PADDED]().abs().max()) <= 0.5


def test_nothing_in_common_has_no_prefix_to_reuse() -> None:
    model = random_model(CONFIGS["qwen3"])
    batch = RaggedBatch.from_sequences([[5, 6, 7], [8, 6, 7]])
    assert list(build_variants(model, batch, ALL)) == ALL[:-1]


def test_the_hook_leaves_the_model_as_it_was() -> None:
    model = random_model(CONFIGS["qwen3"])
    build_variants(model, shared_batch(4, [2, 3]), [DENSE_PADDED])[DENSE_PADDED]()
    assert not output_head(model)._forward_pre_hooks  # type: ignore[union-attr]
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 97)


rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None)
@given(rows=rows)
def test_common_prefix_by_brute_force(rows: list[list[int]]) -> None:
    expected = 0
    while expected < min(map(len, rows)) - 1 and len({row[expected] for row in rows}) == 1:
        expected += 1
    assert common_prefix_length(RaggedBatch.from_sequences(rows)) == expected


@settings(max_examples=100, deadline=None)
@given(rows=rows, data=st.data())
def test_padding_keeps_every_token_in_its_column(rows: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, min(map(len, rows)) - 1))
    padded = pad_rows(RaggedBatch.from_sequences(rows), start)
    longest = max(map(len, rows))
    equal = len(set(map(len, rows))) == 1
    assert padded.input_ids.shape == (len(rows), longest - start)
    assert (padded.attention_mask is None) == equal
    assert padded.counted
    for b, row in enumerate(rows):
        assert padded.input_ids[b, : len(row) - start].tolist() == row[start:]
        assert int(padded.last[b]) == len(row) - start - 1
        if padded.attention_mask is not None:
            assert padded.attention_mask[b].tolist() == [1] * len(row) + [0] * (longest - len(row))


def test_positions_that_do_not_count_from_zero_are_passed_on() -> None:
    padded = pad_rows(RaggedBatch.from_sequences([[5, 6], [7]], [[2, 3], [0]]))
    assert not padded.counted
    assert padded.position_ids.tolist() == [[2, 3], [0, 0]]


def test_cache_argument_goes_by_the_signature() -> None:
    class Named(torch.nn.Module):
        def forward(self, past_key_values: Any = None) -> None: ...

    class Renamed(torch.nn.Module):
        def forward(self, cache: Any = None, past_key_values: Any = None) -> None: ...

    class Cacheless(torch.nn.Module):
        def forward(self, x: Any) -> None: ...

    assert cache_argument(Named()) == "past_key_values"
    assert cache_argument(Renamed()) == "cache"
    model = random_model(CONFIGS["qwen3"])
    assert cache_argument(model) in inspect.signature(model.forward).parameters
    with pytest.raises(ValueError, match="takes no KV cache"):
        cache_argument(Cacheless())


def test_bad_requests_are_named() -> None:
    model = random_model(CONFIGS["qwen3"])
    with pytest.raises(ValueError, match="row 1 is empty"):
        build_variants(model, RaggedBatch.from_sequences([[5], [], [6]]), [DENSE_PADDED])
    with pytest.raises(ValueError, match="no sequence"):
        build_variants(model, RaggedBatch.from_sequences([]), [DENSE_PADDED])
    with pytest.raises(ValueError, match=r"unknown variant 'fast'.*trie-sdpa"):
        build_variants(model, shared_batch(3, [1, 2]), ["fast"])


def test_the_dense_names_are_registered() -> None:
    import radixmlp

    assert variants.DENSE == (DENSE_PADDED, DENSE_RAGGED)
    assert DENSE_RAGGED in radixmlp.attention_backends()
