"""The verdict on a model type: right ones pass, each way to be wrong is seen, and the table says what was found."""

from functools import partial

import pytest
import torch

import radixmlp
from radixmlp.verify import families, rules, support, support_page
from radixmlp.verify.families import causal_types, small_config, small_model
from radixmlp.verify.planted import FAULTS, WideMask, planted
from radixmlp.verify.support import Support, judge, main, support_table
from radixmlp.verify.support_cases import cases, truths

OUTCOMES = {"verified", "refused", "not built"}


# What judges: the calls, and the planted faults.


def test_the_calls_branch_repeat_and_reach_across_windows_and_chunks():
    config = small_config("mistral")
    longest = 0
    for call in cases():
        batch = radixmlp.RaggedBatch.from_padded(call.input_ids, call.real.long())
        plan = radixmlp.build_plan(batch)
        longest = max(longest, int(plan.depth.max()) + 1)
        children = torch.bincount(plan.parent[plan.parent >= 0].long(), minlength=plan.num_nodes)
        branches = plan.depth[children > 1].unique()
        rows = [tuple(ids[real].tolist()) for ids, real in zip(call.input_ids, call.real, strict=True)]
        assert len(set(rows)) < len(rows), call.name
        assert int(plan.depth.max()) > 2 * config.sliding_window
        assert int(call.input_ids.max()) < 256
        if call.name == "long sequences":
            assert plan.num_nodes > config.max_position_embeddings
        else:
            assert len(branches) >= 2, call.name
    assert longest > small_config("llama4_text").attention_chunk_size
    assert longest < config.max_position_embeddings


def test_padding_is_where_the_calls_say():
    right, left, none, _ = cases()
    assert bool(right.real[:, 0].all())
    assert not bool(right.real[:, -1].any())
    assert bool(left.real[:, -1].all())
    assert not bool(left.real[:, 0].any())
    assert none.attention_mask is None


def test_the_truth_is_each_sequence_alone():
    model, calls = small_model("gemma2"), cases()
    for call, truth in zip(calls, truths(model, calls), strict=True):
        assert truth.dtype == torch.float64
        assert rules.errors_against(call.logits(model), truth).largest < rules.FLOAT32


@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2", "deepseek_v3"])
def test_planted_attention_is_right_until_a_fault_is_planted(model_type):
    """Sinks, soft-capping, windows, values narrower than keys. (Older versions' sdpa leaves soft-capping out.)"""
    model, call = small_model(model_type, attn_implementation="eager"), cases()[0]
    (truth,) = truths(model, [call])
    radixmlp.enable(model, threshold=1.0)
    with planted("none") as backends:
        assert rules.errors_against(call.logits(model), truth).largest < rules.FLOAT32
    windowed = any(backend.windowed for backend in backends)
    assert windowed == (model_type != "deepseek_v3")
    for fault in FAULTS:
        with planted(fault):
            error = rules.errors_against(call.logits(model), truth).largest
        assert (error > 1e-2) == (fault != "window" or windowed)


def test_planting_leaves_the_backends_as_they_were():
    before = list(radixmlp.attention_backends().items())

    def fail():
        with planted("future"):
            assert [name for name, _ in before] == list(radixmlp.attention_backends())
            raise KeyError("within")

    with pytest.raises(KeyError, match="within"):
        fail()
    assert list(radixmlp.attention_backends().items()) == before


# The verdicts.


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3", "mixtral"])
def test_right_models_are_verified(model_type):
    result = judge(model_type)
    assert (result.outcome, result.reason) == ("verified", "")
    assert result.details["gamma"] < 0.5
    faults = {name for name in result.details if name.startswith("planted")}
    assert faults >= {"planted, future", "planted, branch"}
    assert ("planted, window" in faults) == (model_type in ("gemma3", "mixtral"))


@pytest.mark.parametrize("model_type", ["bloom", "mamba", "lfm2", "bart", "blt"])
def test_what_cannot_share_is_refused_in_one_line(model_type):
    result = judge(model_type)
    assert result.outcome == "refused"
    assert result.reason
    assert "\n" not in result.reason
    assert not result.reason.startswith(result.class_name)


def test_a_type_that_stays_large_is_not_built(monkeypatch):
    monkeypatch.setattr(families, "MAX_PARAMETERS", 1000)
    result = judge("llama")
    assert (result.outcome, result.class_name) == ("not built", "")
    assert result.reason.startswith("its small config still has")


@pytest.mark.parametrize("model_type", ["lfm2", "qwen3_next", "roberta"])
def test_a_model_that_should_have_been_refused_is_wrong(model_type, monkeypatch):
    """Mixers besides attention, or positions that are not counted from 0, taken without the probe."""
    monkeypatch.setattr(radixmlp, "enable", partial(radixmlp.enable, verify=False))
    result = judge(model_type, use_cache=False)
    assert result.outcome == "WRONG"
    assert result.reason.startswith("right padding: differs from the truth")


def test_a_wrong_backend_is_wrong(monkeypatch):
    backend = radixmlp.register_attention(WideMask("planted-future", "future"))
    monkeypatch.setattr(radixmlp, "enable", partial(radixmlp.enable, attention=backend.name, verify=False))
    try:
        result = judge("llama")
    finally:
        radixmlp.unregister_attention(backend.name)
    assert result.outcome == "WRONG"
    assert result.reason.startswith("right padding: differs from the truth")


def test_a_model_that_hides_wrong_masks_proves_nothing(monkeypatch):
    """With the output of attention at zero every path agrees with every other."""

    def deaf(model_type, **changes):
        model = small_model(model_type, **changes)
        for layer in model.model.layers:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        return model

    monkeypatch.setattr(support, "small_model", deaf)
    result = judge("llama")
    assert result.outcome == "WRONG"
    assert result.reason.startswith("a mask one too wide (future) does not show")


def test_a_model_that_never_runs_on_the_trie_is_not_verified():
    """A chunk shorter than the calls: every one of them is left to the model's own forward."""
    result = judge("llama4_text", attention_chunk_size=8)
    assert result.outcome == "WRONG"
    assert result.reason.startswith("right padding: did not run on the trie")


def test_an_unforeseen_error_is_wrong_and_not_a_crash(monkeypatch):
    def broken(model, **options):
        raise KeyError("plan")

    monkeypatch.setattr(radixmlp, "enable", broken)
    result = judge("llama")
    assert result.outcome == "WRONG"
    assert result.reason == "KeyError: 'plan'"


# Ways to configure a type that are not its default: verified, refused or run dense, never wrong.
VARIANTS = {
    "alibi": ("falcon", {"alibi": True}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "eager": ("gemma2", {"attn_implementation": "eager"}),
    "sinks, eager": ("gpt_oss", {"attn_implementation": "eager"}),
    "linear RoPE": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "encoder": ("bert", {"is_decoder": False}),
    "encoder without positions": ("roberta", {"is_decoder": False}),
    "bidirectional": ("gemma3_text", {"use_bidirectional_attention": True}),
    "experts chosen": ("mixtral", {"num_experts_per_tok": 2}),
    "experts in groups": ("deepseek_v3", {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}),
    "experts beside": ("gemma4_text", {"enable_moe_block": True, "top_k_experts": 4}),
    "keys as values": ("gemma4_text", {"attention_k_eq_v": True}),
    "scale by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "cross-attention": ("bert", {"add_cross_attention": True}),
    "clipped": ("olmo", {"clip_qkv": 1.0}),
    "no window": ("mistral", {"sliding_window": None}),
    "sparse": ("minimax_m3_vl_text", {"layer_types": ["minimax_m3_sparse"] * 2}),
    "no convolution": ("lfm2", {"layer_types": ["full_attention"] * 2}),
}
REFUSED = {"alibi", "encoder", "encoder without positions", "bidirectional", "sparse"}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_configs_of_a_type(variant):
    model_type, changes = VARIANTS[variant]
    if model_type not in causal_types():
        pytest.skip(f"this transformers has no {model_type}")
    result = judge(model_type, **changes)
    assert result.outcome == ("refused" if variant in REFUSED else "verified"), result.reason


@pytest.mark.slow
def test_every_type_is_verified_refused_or_not_built():
    results = support_table()
    assert [result.model_type for result in results] == causal_types()
    wrong = {result.model_type: result.reason for result in results if result.outcome not in OUTCOMES}
    assert wrong == {}
    verified = sum(result.outcome == "verified" for result in results)
    assert verified >= (100 if len(results) >= 190 else len(results) // 2)  # older versions know fewer types
    assert sum(result.outcome == "not built" for result in results) <= 5
    assert all(result.reason or result.outcome == "verified" for result in results)
    table = support.TABLE if support._committed_table() is None else support._committed_table()
    found = support_page.differences(table, results, whole=True)
    if not any("was made with transformers" in line for line in found):
        assert found == []


# The page and the command.

RESULTS = [
    Support("llama", "LlamaForCausalLM", "verified", ""),
    Support("bloom", "BloomForCausalLM", "refused", "takes no position_ids: a|b moves by 6.7e-01"),
    Support("gemma3n", "", "not built", "ImportError: timm"),
]


@pytest.fixture
def found(monkeypatch):
    """The command with `RESULTS` for every type, in place of judging them."""
    results = {result.model_type: result for result in RESULTS}
    monkeypatch.setattr(support, "causal_types", lambda: sorted(results))
    monkeypatch.setattr(support, "judge", lambda model_type: results[model_type])
    return results


def test_the_command_writes_the_table_and_finds_it_again(tmp_path, found, capsys):
    table = tmp_path / "table.md"
    assert main(["--out", str(table)]) == 0
    assert "1 verified" in capsys.readouterr().out
    page = table.read_text()
    assert "| `llama` | LlamaForCausalLM | verified |  |" in page
    assert r"a\|b moves by 6.7e-01" in page
    assert "**verified** (1)" in page
    assert main(["--out", str(table), "--check"]) == 0
    assert main(["--out", str(table), "--check", "--type", "bloom"]) == 0
    found["bloom"] = Support(
        "bloom", "BloomForCausalLM", "refused", "takes no position_ids: a|b moves by 1.2e-03"
    )
    assert main(["--out", str(table), "--check"]) == 0, "measured numbers are not compared"
    assert table.read_text() == page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda page: page.replace("| refused |", "| verified |"), "+ | `bloom`"),
        (lambda page: page.replace("a\\|b", "a\\|c"), "+ | `bloom`"),
        (lambda page: page.replace("| `bloom`", "| `blossom`"), "- (no row)"),
        (lambda page: page + "| `gone` | Gone | verified |  |\n", "- | `gone`"),
        (
            lambda page: page.replace("; transformers ", "; transformers 4."),
            "it was made with transformers 4.",
        ),
    ],
)
def test_check_finds_another_page(tmp_path, found, capsys, change, message):
    table = tmp_path / "table.md"
    main(["--out", str(table)])
    table.write_text(change(table.read_text()))
    capsys.readouterr()
    assert main(["--out", str(table), "--check"]) == 1
    assert message in capsys.readouterr().out


def test_check_without_a_table(tmp_path, found, capsys):
    assert main(["--out", str(tmp_path / "none.md"), "--check"]) == 1
    assert "it does not exist" in capsys.readouterr().out


def test_a_wrong_type_fails_the_command(tmp_path, found):
    found["llama"] = Support("llama", "LlamaForCausalLM", "WRONG", "left padding: differs")
    table = tmp_path / "table.md"
    assert main(["--out", str(table)]) == 1
    assert "**WRONG** (1)" in table.read_text()
    assert main(["--out", str(table), "--check"]) == 1


def test_some_types_do_not_overwrite_the_table(tmp_path, found, monkeypatch):
    table = tmp_path / "table.md"
    table.write_text("as it was")
    monkeypatch.setattr(support, "_committed_table", lambda: table)
    assert main(["--type", "llama"]) == 0
    assert table.read_text() == "as it was"


def test_bad_requests(found, monkeypatch, capsys):
    assert main(["--type", "lama"]) == 2
    assert "no causal model type lama" in capsys.readouterr().err
    monkeypatch.setattr(support, "_committed_table", lambda: None)
    assert main([]) == 2
    assert "--out FILE" in capsys.readouterr().err
