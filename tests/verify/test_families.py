"""The small models that stand for every causal type: built from their configs, runnable, and able to show a fault."""

import copy

import pytest
import torch

from radixmlp.verify import families
from radixmlp.verify.families import CannotBuild, causal_types, small_config, small_model, strengthen

# Of each way a config is made small at least one: plain, aliases, latent attention, layer types, heads that
# differ by layer, experts, a composite, one made from its decoder, a state-space mixer, hints.
SOME = (
    "llama",
    "gpt2",
    "deepseek_v3",
    "gemma3",
    "gemma4_text",
    "mixtral",
    "qwen3_5",
    "lfm2",
    "bamba",
    "zaya",
)
WINDOWED = ("sliding_attention", "hybrid_sliding")
# What a plain call does not give them: another model's keys and values, four codebooks a token.
NEED_MORE_THAN_TOKENS = {
    "gemma4_assistant": "shared_kv_states",
    "gemma4_unified_assistant": "shared_kv_states",
    "musicgen": "shape",
    "musicgen_melody": "shape",
}


def text_config(model_type):
    return small_config(model_type).get_text_config(decoder=True)


def check_runs(model_type):
    """Builds small, and gives finite logits, those of the last token not blind to the tokens before it."""
    model = small_model(model_type)
    assert not model.training
    assert sum(p.numel() for p in model.parameters()) <= families.MAX_PARAMETERS
    ids = torch.tensor([[5, 6, 7, *range(100, 127)]])
    if model_type in NEED_MORE_THAN_TOKENS:
        with pytest.raises((ValueError, RuntimeError), match=NEED_MORE_THAN_TOKENS[model_type]):
            model(input_ids=ids[:, :3])
        return
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        assert torch.isfinite(logits).all()
        other = ids.clone()
        other[0, [0, -9, -2]] = 201
        assert not torch.equal(model(input_ids=other).logits[0, -1], logits[0, -1])


@pytest.mark.parametrize("model_type", SOME)
def test_some_types_build_and_run(model_type):
    check_runs(model_type)


@pytest.mark.slow
def test_every_type_builds_and_runs_but_a_few_that_say_why():
    refused = {}
    for model_type in causal_types():
        try:
            check_runs(model_type)
        except CannotBuild as error:
            refused[model_type] = str(error)
    assert len(refused) <= 5, refused
    assert all("\n" not in reason and reason.startswith(f"{name}: ") for name, reason in refused.items())


def test_the_types_are_those_of_the_causal_mapping():
    types = causal_types()
    assert types == sorted(set(types))
    assert set(SOME) <= set(types)


def test_a_type_is_built_the_same_every_time_and_leaves_the_random_state_alone():
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second = small_model("gemma2"), small_model("gemma2")
    assert torch.equal(torch.get_rng_state(), before)
    for mine, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_the_dtype_is_the_one_asked_for():
    assert small_model("llama", torch.float64).dtype == torch.float64


def test_changes_reach_the_model():
    assert small_model("llama", num_hidden_layers=3).model.layers[2] is not None
    with pytest.raises(CannotBuild, match=r"^llama: \w+Error: .*hidden_size"):
        small_model("llama", hidden_size=None)


def test_a_model_that_stays_large_is_refused(monkeypatch):
    monkeypatch.setattr(families, "MAX_PARAMETERS", 1000)
    with pytest.raises(CannotBuild, match=r"llama: its small config still has [\d,]+ parameters"):
        small_model("llama")


def test_one_layer_of_each_kind():
    """Also of those that the code knows and the default config does not use."""
    assert text_config("gemma3").layer_types == ["sliding_attention", "full_attention"]
    assert set(text_config("qwen3").layer_types) == {"sliding_attention", "full_attention"}
    assert set(text_config("lfm2").layer_types) == {"full_attention", "conv"}
    mixed = text_config("exaone_moe")
    assert set(zip(mixed.layer_types, mixed.mlp_layer_types, strict=True)) == {
        ("sliding_attention", "dense"),
        ("sliding_attention", "sparse"),
        ("full_attention", "sparse"),
    }


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash"])
def test_latent_attention_fits_together(model_type):
    if model_type not in causal_types():
        pytest.skip(f"this transformers has no {model_type}")
    config = small_config(model_type)
    assert config.qk_head_dim == config.qk_nope_head_dim + config.qk_rope_head_dim
    assert config.head_dim == config.qk_rope_head_dim
    assert config.num_key_value_heads == config.num_attention_heads


def first_of(config, *names):
    return next((value for name in names if (value := getattr(config, name, None))), None)


@pytest.mark.slow
def test_windows_are_short_and_no_expert_is_left_out():
    """So that a batch of 30 tokens crosses every window, and no rounding can choose another expert."""
    seen = {"window": 0, "experts": 0}
    for model_type in causal_types():
        try:
            config = text_config(model_type)
        except Exception:  # its own test says which may
            continue
        kinds = getattr(config, "layer_types", None) or ()
        if any(kind in WINDOWED for kind in kinds):
            window = getattr(config, "sliding_window", None) or config.sliding_window_size
            assert 1 < window <= 9, model_type
            seen["window"] += 1
        experts = first_of(config, "num_experts", "num_local_experts", "n_routed_experts")
        chosen = first_of(config, "num_experts_per_tok", "num_experts_per_token")
        if experts and chosen:
            assert chosen == experts + (getattr(config, "zero_expert_num", None) or 0), model_type
            seen["experts"] += 1
    assert seen["window"] >= 20
    assert seen["experts"] >= 40


@pytest.mark.parametrize("model_type", ["bloom", "gpt2", "bert"])
def test_scaled_matrices_make_a_wrong_mask_show(model_type):
    """The reason for `strengthen`: with weights as initialised, the oldest token hardly changes the last one."""

    def effect(model):
        ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
        other = ids.clone()
        other[0, 0] = 100
        with torch.no_grad():
            one, two = (model(input_ids=given).logits[0, -1] for given in (ids, other))
        return float((one - two).norm() / one.norm())

    scaled = small_model(model_type)
    weak = copy.deepcopy(scaled)
    strengthen(weak, 1 / 4)
    assert effect(scaled) > max(0.05, 3 * effect(weak))


def test_only_matrices_are_scaled():
    model = small_model("qwen2")
    norms = [p.clone() for name, p in model.named_parameters() if "norm" in name]
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    strengthen(model, 2.0)
    after = [p for name, p in model.named_parameters() if "norm" in name]
    assert all(torch.equal(one, two) for one, two in zip(norms, after, strict=True))
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, 2 * before)
