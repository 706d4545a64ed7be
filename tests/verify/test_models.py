"""Models by name: repeatable weights, one set of values for all dtypes, and clear refusals."""

import pytest
import torch

from radixmlp.verify.models import DTYPES, check_model_name, load_model, model_names

TINY = [name for name in model_names() if name.startswith("tiny-")]


@pytest.mark.parametrize("name", TINY)
def test_every_dtype_is_a_rounding_of_the_same_values(name):
    full = load_model(name).model
    state = torch.random.get_rng_state()
    for dtype_name, dtype in DTYPES.items():
        other = load_model(name, dtype_name).model
        assert not other.training
        for (key, mine), (_, expected) in zip(other.named_parameters(), full.named_parameters(), strict=True):
            assert mine.dtype == dtype, key
            assert torch.equal(mine, expected.to(dtype)), key
        for (key, mine), (_, expected) in zip(other.named_buffers(), full.named_buffers(), strict=True):
            assert torch.equal(mine, expected), key
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("name", TINY)
def test_the_last_token_depends_on_the_first_and_on_positions(name):
    """Where it does not, a wrong mask or ignored positions could not be seen."""
    loaded = load_model(name, torch.float64)
    # Two layers of a 24-token window see 47 tokens back.
    ids = torch.arange(40)[None] % loaded.vocab_size

    def last(ids, positions):
        with torch.no_grad():
            return loaded.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, -1]

    positions = torch.arange(40)[None]
    plain = last(ids, positions)
    other = ids.clone()
    other[0, 0] = 77
    for changed in (last(other, positions), last(ids, 2 * positions)):
        assert float((changed - plain).abs().max() / plain.abs().max()) > 1e-3


def test_widths_are_those_of_the_published_models():
    config = load_model("qwen3-0.6b-width:2").model.config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (1024, 3072, 2)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 8, 128)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("tiny-unknown", "unknown model 'tiny-unknown': known are tiny-qwen3"),
        ("qwen3-0.6b-width:5", "5 layers, expected 1 to 4"),
        ("qwen3-0.6b-width:0", "0 layers"),
    ],
)
def test_unknown_names_are_refused(name, complaint):
    for refuse in (check_model_name, load_model):
        with pytest.raises(ValueError, match=complaint):
            refuse(name)


def test_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="unknown dtype 'int8': known are float64"):
        load_model("tiny-qwen3", "int8")


def test_a_hub_name_that_cannot_be_reached_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot load model 'nobody/no-such-model' as a Hugging Face name"):
        check_model_name("nobody/no-such-model")


def test_a_local_folder_loads_as_it_was_saved(tmp_path):
    saved = load_model("tiny-llama").model
    saved.save_pretrained(tmp_path)
    check_model_name(str(tmp_path))
    loaded = load_model(str(tmp_path))
    assert loaded.tokenizer is None
    assert loaded.vocab_size == saved.config.vocab_size
    expected = saved.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.model.state_dict().items())
    with pytest.raises(ValueError, match="as a folder"):
        check_model_name(str(tmp_path.parent))
