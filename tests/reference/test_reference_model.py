"""The reference decoder against transformers' Qwen3, each sequence alone, in all its ways of running."""

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from radixmlp.reference import RaggedBatch
from radixmlp.reference.model import Qwen3
from radixmlp.verify.lift import lift_float32

WAYS = [("dense", "trie"), ("scatter", "trie"), ("scatter", "input"), ("trie", "trie"), ("trie", "input")]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SEQUENCES = [
    [*PROMPT, 5, 3, 5],
    [*PROMPT, 8, 9, 7, 9],
    [],
    [*PROMPT, 5, 3, 2, 3],
    [7],
    PROMPT,
    [*PROMPT, 5, 3, 5],
]
OPTIONS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "bias": {"attention_bias": True},
    "windows": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "all": {
        "tie_word_embeddings": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "rms_norm_eps": 1e-3,
    },
}


def hugging_face(dtype=torch.float64, attention="eager", **options):
    """A small random Qwen3 with weights large enough that every part of it matters, biases included."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"intermediate_size": 40, "vocab_size": 30, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **options, attn_implementation=attention)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.to(dtype)


def alone(model, batch):
    """Logits [N, V] with each sequence run alone. The mask of ones keeps transformers from taking positions
    that do not count up for several packed sequences."""
    logits = []
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        if end > start:
            ids, positions = batch.input_ids[None, start:end], batch.position_ids[None, start:end]
            mask = torch.ones_like(ids)
            logits.append(model(input_ids=ids, position_ids=positions, attention_mask=mask).logits[0])
    return torch.cat(logits)


def error(got, truth):
    """Largest difference relative to max|truth|."""
    return ((got - truth).abs().max() / truth.abs().max()).item()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_transformers_in_float64_and_only_with_the_casts_lifted(options, attention):
    batch = RaggedBatch.from_sequences(SEQUENCES)
    model = hugging_face(attention=attention, **options)
    decoder = Qwen3(model.config).load(model.state_dict())
    with torch.no_grad(), lift_float32():
        truth = alone(model, batch)
    with torch.no_grad():
        for mode, order in WAYS:
            out = decoder(batch, mode=mode, order=order)
            assert out.logits.dtype == torch.float64
            assert error(out.logits, truth) < 1e-10
        assert 1e-9 < error(alone(model, batch), truth) < 1e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_equals_transformers_in_float32(options, attention):
    batch = RaggedBatch.from_sequences(SEQUENCES)
    model = hugging_face(torch.float32, attention, **options)
    decoder = Qwen3(model.config).load(model.state_dict())
    with torch.no_grad():
        truth = alone(model, batch)
        for mode, order in WAYS:
            out = decoder(batch, mode=mode, order=order)
            assert out.logits.dtype == out.hidden.dtype == torch.float32
            assert error(out.logits, truth) < 1e-5


def test_hidden_states_equal_transformers():
    batch = RaggedBatch.from_sequences(SEQUENCES)
    model = hugging_face()
    decoder = Qwen3(model.config).load(model.state_dict())
    with torch.no_grad(), lift_float32():
        truth = torch.cat([model.model(torch.tensor([s])).last_hidden_state[0] for s in SEQUENCES if s])
    for mode, order in WAYS:
        assert error(decoder(batch, mode=mode, order=order).hidden, truth) < 1e-10


@pytest.mark.parametrize("mode", ["dense", "scatter", "trie"])
def test_positions_matter_and_matter_alike(mode):
    counted = RaggedBatch.from_sequences(SEQUENCES)
    doubled = [[2 * p + (p > 4) for p in range(len(s))] for s in SEQUENCES]
    stretched = RaggedBatch.from_sequences(SEQUENCES, position_ids=doubled)
    model = hugging_face()
    decoder = Qwen3(model.config).load(model.state_dict())
    with torch.no_grad(), lift_float32():
        truth = alone(model, stretched)
    with torch.no_grad():
        assert error(decoder(stretched, mode=mode).logits, truth) < 1e-10
        assert error(decoder(counted, mode=mode).logits, truth) > 1e-2


def test_equal_ids_at_unequal_positions_keep_their_own_results():
    positions = [[0, 1, 2, 3], [0, 2, 4, 6], [0, 1, 2, 7]]
    batch = RaggedBatch.from_sequences([[1, 2, 3, 4]] * 3, position_ids=positions)
    model = hugging_face()
    decoder = Qwen3(model.config).load(model.state_dict())
    with torch.no_grad(), lift_float32():
        truth = alone(model, batch)
    logits = decoder(batch, mode="trie").logits.view(3, 4, -1)
    assert error(logits.flatten(0, 1), truth) < 1e-10
    assert error(logits[1, -1], logits[0, -1]) > 1e-3


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("lift", [True, False])
def test_gradients_equal_transformers(options, lift):
    batch = RaggedBatch.from_sequences(SEQUENCES)
    model = hugging_face(**options)
    weight = torch.randn(batch.num_tokens, model.config.vocab_size, dtype=torch.float64)
    with lift_float32() if lift else nullcontext():
        (alone(model, batch) * weight).sum().backward()
    truth = {name: parameter.grad for name, parameter in model.named_parameters()}
    worst = 0.0
    for mode, order in WAYS:
        decoder = Qwen3(model.config).load(model.state_dict())
        (decoder(batch, mode=mode, order=order).logits * weight).sum().backward()
        gradients = {name: parameter.grad for name, parameter in decoder.named_parameters()}
        assert gradients.keys() == truth.keys()
        worst = max(worst, *(error(gradients[name], truth[name]) for name in truth))
    assert worst < 1e-10 if lift else 1e-9 < worst < 1e-5


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=6))
@settings(max_examples=40, deadline=None)
def test_all_ways_of_running_agree(sequences):
    batch = RaggedBatch.from_sequences(sequences)
    with torch.no_grad():
        dense = DECODER(batch)
        assert dense.hidden.shape == (batch.num_tokens, 24)
        for mode, order in WAYS[1:]:
            out = DECODER(batch, mode=mode, order=order)
            torch.testing.assert_close(out.logits, dense.logits, rtol=0, atol=1e-12)
            torch.testing.assert_close(out.hidden, dense.hidden, rtol=0, atol=1e-12)


def _decoder(**options):
    model = hugging_face(**options)
    return Qwen3(model.config).load(model.state_dict())


DECODER = _decoder(**OPTIONS["windows"])


def test_frequencies_do_not_change_inside_lift():
    batch = RaggedBatch.from_sequences([[1, 2, 3]], position_ids=[[0, 10_000, 1_000_000]])
    model = hugging_face()
    decoder = Qwen3(model.config).load(model.state_dict())
    with torch.no_grad(), lift_float32():
        truth, inside = alone(model, batch), decoder(batch).logits
    assert error(inside, truth) < 1e-10
    assert torch.equal(inside, decoder(batch).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_precision_is_as_near_to_the_truth_as_transformers(dtype):
    batch = RaggedBatch.from_sequences(SEQUENCES)
    model = hugging_face(torch.float32)
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    truth = Qwen3(model.config).load({name: t.double() for name, t in weights.items()})(batch).logits
    rotary = model.model.rotary_emb.inv_freq.clone()
    model.to(dtype).model.rotary_emb.inv_freq = rotary  # as `from_pretrained` leaves them: float32
    with torch.no_grad():
        legitimate = (alone(model, batch) - truth).pow(2).mean().sqrt()
        for mode, order in WAYS:
            logits = Qwen3(model.config).load(weights)(batch, mode=mode, order=order).logits
            assert logits.dtype == dtype
            assert (logits - truth).pow(2).mean().sqrt() < 1.2 * legitimate


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_dict_and_any_object_serve_as_configuration(options):
    model = hugging_face(**options)
    expected = Qwen3(model.config).config
    assert Qwen3(model.config.to_dict()).config == expected
    assert Qwen3(SimpleNamespace(**model.config.to_dict())).config == expected


def test_a_configuration_file_from_before_version_5():
    old = {
        "model_type": "qwen3",
        "vocab_size": 30,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 2,
    }
    config = Qwen3(old).config
    assert (config.rope_theta, config.head_dim, config.num_key_value_heads) == (1e6, 8, 3)
    assert config.sliding_windows == (None, None, 16)
    assert Qwen3(old | {"use_sliding_window": False}).config.sliding_windows == (None, None, None)


BAD_CONFIGS = {
    "another model": ({"model_type": "llama"}, "model_type is 'llama'"),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "scaled rope": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'"),
    "scaled rope, old": (
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": None},
        "'linear'",
    ),
    "too few layer types": ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
    "a strange layer": ({"layer_types": ["full_attention", "mamba"]}, r"layer_types\[1\] is 'mamba'"),
    "no window": (
        {"layer_types": ["sliding_attention"] * 2},
        r"layer_types\[0\] is sliding_attention, but no",
    ),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_what_the_decoder_does_not_compute_is_refused(case):
    change, message = BAD_CONFIGS[case]
    with pytest.raises(ValueError, match=message):
        Qwen3(hugging_face().config.to_dict() | change)


def test_a_missing_attribute_is_named():
    config = hugging_face().config.to_dict()
    del config["intermediate_size"]
    with pytest.raises(ValueError, match="no intermediate_size"):
        Qwen3(config)


def test_weights_that_do_not_fit_are_refused():
    model = hugging_face()
    weights = model.state_dict()
    fewer = {name: tensor for name, tensor in weights.items() if "layers.1.mlp.up_proj" not in name}
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj\.weight"):
        Qwen3(model.config).load(fewer)
    with pytest.raises(ValueError, match=r"layers\.9\.strange"):
        Qwen3(model.config).load(weights | {"model.layers.9.strange": torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        Qwen3(model.config).load(weights | {"model.norm.weight": torch.ones(7, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"mixes torch\.float32, torch\.float64"):
        Qwen3(model.config).load(weights | {"model.norm.weight": weights["model.norm.weight"].float()})


def test_what_cannot_be_run_is_refused():
    batch = RaggedBatch.from_sequences([[1], [2, 30]])
    with pytest.raises(ValueError, match=r"input_ids row 1, offset 1 is 30: the vocabulary ends at 29"):
        DECODER(batch, mode="trie")
    with pytest.raises(ValueError, match="mode is 'tree'"):
        DECODER(RaggedBatch.from_sequences([[1]]), mode="tree")
    with pytest.raises(ValueError, match="order is 'depth'"):
        DECODER(RaggedBatch.from_sequences([[1]]), mode="trie", order="depth")
    with pytest.raises(ValueError, match=r"call load\(state_dict\) first"):
        Qwen3(hugging_face().config)(RaggedBatch.from_sequences([[1]]))
    training = _decoder(attention_dropout=0.1).train()
    with pytest.raises(ValueError, match=r"dropout is 0\.1"):
        training(RaggedBatch.from_sequences([[1, 2]]))
