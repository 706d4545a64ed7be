"""The rules of parity: what counts as an error, what is judged against what, and what a record says."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify import oracle, rules
from radixmlp.verify.gradients import check_gradients
from radixmlp.verify.models import load_model
from radixmlp.verify.parity import check_parity
from radixmlp.verify.subject import fast_path
from radixmlp.verify.unchanged import Fingerprint
from radixmlp.verify.workloads import make_workload

FAMILIES = ["tiny-qwen3", "tiny-llama", "tiny-mistral", "tiny-gemma2", "tiny-gpt-oss"]
BACKENDS = ["dense-sdpa", "scatter-sdpa", "trie-sdpa", "auto"]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_and_dtype_is_green_on_the_edges(family, dtype):
    loaded = load_model(family, dtype)
    records = check_parity(loaded, make_workload("edges", None, loaded.vocab_size), BACKENDS, fast_path())
    assert [r for r in records if not r.passed] == []
    assert {r.attention for r in records} == {*BACKENDS, "none"}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_green_and_not_left_behind(family):
    loaded = load_model(family, "float64")
    records = check_gradients(
        loaded, make_workload("edges", None, loaded.vocab_size), BACKENDS[:3], fast_path()
    )
    assert [(r.attention, r.passed) for r in records] == [(name, True) for name in BACKENDS[:3]]
    assert all(parameter.grad is None for parameter in loaded.model.parameters())


def test_a_batch_equals_its_sequences_alone_for_the_untouched_model():
    """The two dense baselines agree: what the harness calls legitimate error is rounding, not a mistake of ours."""
    loaded = load_model("tiny-qwen3", "float64")
    batch = make_workload("edges", None, loaded.vocab_size).batch
    with oracle.lifted(loaded.model):
        alone = oracle.each_alone(loaded.model, batch)
    padded = oracle.together_padded(loaded.model, batch)
    assert rules.errors_against(padded.last_hidden_state, alone.last_hidden_state).largest < 1e-12
    assert rules.errors_against(padded.logits, alone.logits).largest < 1e-12


def test_last_token_logits_of_both_baselines_are_those_of_all_tokens():
    loaded = load_model("tiny-llama", "float64")
    batch = RaggedBatch.from_sequences([[5, 6, 7], [5, 6], [8, 9, 10, 11]])
    ends = batch.cu_seqlens[1:].long() - 1
    for run in (oracle.each_alone, oracle.together_padded):
        assert torch.allclose(run(loaded.model, batch, 1).logits, run(loaded.model, batch, 0).logits[ends])


def test_truth_is_fp64_of_the_same_rounded_weights():
    model = load_model("tiny-qwen3", "bfloat16").model
    truth = oracle.truth_model(model)
    assert truth.dtype == torch.float64
    assert all(
        torch.equal(a.double(), b) for a, b in zip(model.parameters(), truth.parameters(), strict=True)
    )


def test_a_headless_model_is_judged_by_its_hidden_state_alone(tmp_path):
    full = load_model("tiny-qwen3").model
    full.model.config.architectures = ["Qwen3Model"]
    full.model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    records = check_parity(loaded, make_workload("tree", None, loaded.vocab_size), ["trie-sdpa"], fast_path())
    assert all(record.passed for record in records)
    assert not any("logits" in record.metric for record in records)


def test_a_raising_backend_fails_alone_and_a_refusing_one_may():
    loaded = load_model("tiny-qwen3")
    workload = make_workload("one-sequence", None, loaded.vocab_size)
    records = check_parity(loaded, workload, ["no-such", "trie-sdpa"], fast_path())
    (error,) = (record for record in records if not record.passed)
    assert (error.attention, error.metric) == ("no-such", "error")
    assert "no-such" in error.details["error"]
    assert any(record.attention == "trie-sdpa" for record in records)
    allowed = check_parity(loaded, workload, ["no-such"], fast_path(), may_refuse=["no-such"])
    assert [(r.metric, r.limit) for r in allowed if r.attention == "no-such"] == [("refused", None)]


@given(st.integers(0, 5), st.integers(0, 3), st.floats(0.1, 10), st.booleans())
def test_the_worst_element_is_named(row, column, size, broken):
    truth = torch.full((6, 4), 2.0, dtype=torch.float64)
    got = truth.clone()
    got[row, column] += torch.nan if broken else size
    errors = rules.errors_against(got, truth)
    assert errors.worst == (row, column)
    assert errors.largest == math.inf if broken else errors.largest == pytest.approx(size / 2)
    assert errors.rms <= errors.largest


@pytest.mark.parametrize("hole", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_infinitely_wrong_even_where_the_truth_is_not_finite_either(hole):
    truth = torch.tensor([[1.0, hole]], dtype=torch.float64)
    assert rules.errors_against(truth.clone(), truth).largest == math.inf


def test_a_truth_of_zeros_proves_nothing():
    zeros = torch.zeros(2, 3, dtype=torch.float64)
    assert rules.errors_against(zeros, zeros).largest == math.inf


@pytest.mark.parametrize(
    ("dtype", "scale", "ulp"), [(torch.float16, 3.0, 2**-9), (torch.bfloat16, 100.0, 0.5)]
)
def test_the_floor_is_two_ulps_of_the_largest_truth(dtype, scale, ulp):
    x = torch.tensor(scale, dtype=dtype)
    assert float(torch.nextafter(x, torch.tensor(torch.inf, dtype=dtype)) - x) == ulp
    assert rules.floor_of(dtype, scale) == pytest.approx(2 * ulp / scale)


@pytest.mark.parametrize("swap", [False, True])
def test_a_changed_weight_shows_in_the_fingerprint(swap):
    loaded = load_model("tiny-gpt-oss", "bfloat16")
    batch = make_workload("edges", None, loaded.vocab_size).batch
    before = Fingerprint.of(loaded.model, batch)
    assert before.changed(loaded.model, batch) == []
    weight = loaded.model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        if swap:  # the sum of the bits stays the same
            weight[0, :2] = weight[0, :2].flip(0).clone()
        else:
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(torch.inf, dtype=torch.bfloat16))
    assert before.changed(loaded.model, batch) == ["model.layers.0.self_attn.q_proj.weight"]


def test_the_subject_is_what_users_call():
    assert fast_path().forward is radixmlp.forward
    assert fast_path().build_plan is radixmlp.build_plan
