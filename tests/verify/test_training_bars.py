"""Training's bars: ideals counted by hand and by PyTorch, checks that can fail, and the group end to end, tiny."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import radixmlp
from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify import training_bars as bars_module
from radixmlp.verify import training_checks as checks
from radixmlp.verify import training_variants as variants
from radixmlp.verify.bars import TRIE
from radixmlp.verify.ideal import DecoderShape
from radixmlp.verify.planted import planted
from radixmlp.verify.training_bars import TrainingSetting, training_bars
from radixmlp.verify.training_ideal import STEP, step_flops
from radixmlp.verify.training_memory import HeadStep, Step, peak_megabytes_of
from radixmlp.verify.training_variants import DENSE_LOSSES, build_losses, load_trainee, mask_prompts, step
from radixmlp.verify.workloads import make_workload

BAR_SHAPE = DecoderShape(1024, 16, 8, 128, 3072, 32_000, (None,) * 4)
UNEVEN = [[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 7, 8, 11, 12, 13, 14], [20], [5, 6]]
TINY = TrainingSetting(
    model="tiny-qwen3",
    vocabulary=512,
    dtype="float32",
    title="tiny",
    prompt=24,
    completion=6,
    group=4,
    rounds=1,
    curve_workload="synthetic:12+4x3",
    curve_masked=12,
    curve_steps=3,
    head=(20_000, 1024, 16),
)


@pytest.fixture(scope="module")
def model() -> Any:
    return load_trainee("tiny-qwen3", 512, "float32")


@pytest.fixture(scope="module")
def batch() -> RaggedBatch:
    return make_workload(TINY.workload, None, 512).batch


@pytest.mark.parametrize(("masked", "ideal", "heads"), [(0, 5.9, (9200, 1520)), (512, 4.7, (1024, 1009))])
def test_the_bars_ideals(masked: int, ideal: float, heads: tuple[int, int]) -> None:
    batch = make_workload("synthetic:512+64x16", None, 32_000).batch
    plan = radixmlp.build_plan(batch)
    flops = step_flops(BAR_SHAPE, batch, plan, mask_prompts(batch, masked))
    assert flops.speedup == pytest.approx(ideal, abs=0.05)
    assert (flops.dense_logits, flops.trie_logits) == heads
    assert (flops.dense_rows, flops.trie_rows) == (9216, 1536)


def test_the_count_is_that_of_pytorch(model: Any, batch: RaggedBatch) -> None:
    """Dense projections, MLPs and head, forward and backward: every product of a step but attention's."""
    labels = mask_prompts(batch, 24)
    plan = TriePlan.identity(batch)
    with FlopCounterMode(display=False) as counter:
        step(model, build_losses(model, batch, labels, ["dense-padded-rows"])["dense-padded-rows"])
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    shape = DecoderShape.from_config(model.config)
    flops = step_flops(shape, batch, plan, labels)
    pairs = int((plan.depth.long() + 1).sum())
    assert counted == flops.dense - STEP * len(shape.layer_windows) * pairs * shape.flops_per_pair


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=6), st.integers(0, 4)
)
def test_head_rows_equal_a_brute_force_count(rows: list[list[int]], masked: int) -> None:
    batch = RaggedBatch.from_sequences(rows)
    flops = step_flops(BAR_SHAPE, batch, radixmlp.build_plan(batch), mask_prompts(batch, masked))
    sources = [tuple(row[:end]) for row in rows for end in range(max(masked, 1), len(row))]
    assert (flops.dense_logits, flops.trie_logits) == (len(sources), len(set(sources)))


@pytest.mark.parametrize("masked", [0, 2])
def test_every_way_to_the_loss_agrees(masked: int) -> None:
    model = load_trainee("tiny-qwen3", 512, "float64")
    batch = RaggedBatch.from_sequences(UNEVEN)
    labels = mask_prompts(batch, masked)
    names = [*DENSE_LOSSES, "scatter-sdpa", TRIE]
    values, gradients = {}, {}
    for name, loss in build_losses(model, batch, labels, names).items():
        values[name] = step(model, loss)
        gradients[name] = checks.gradients_of(model)
    truth = gradients["dense-padded"]
    for name in names:
        # transformers' own loss and norms are fp32 inside an fp64 model.
        assert values[name] == pytest.approx(values["dense-padded"], rel=1e-6)
        for weight, gradient in truth.items():
            assert (gradients[name][weight] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), weight


def test_what_no_loss_can_be_built_of(model: Any) -> None:
    batch = RaggedBatch.from_sequences([[1, 2], [3]])
    with pytest.raises(ValueError, match=r"unknown loss 'fast'.*dense-padded-rows"):
        build_losses(model, batch, None, ["fast"])
    with pytest.raises(ValueError, match="row 1 is empty"):
        build_losses(model, RaggedBatch.from_sequences([[1], []]), None, [TRIE])
    shifted = RaggedBatch.from_sequences([[1, 2]], position_ids=[[3, 4]])
    with pytest.raises(ValueError, match="count from 0"):
        build_losses(model, shifted, None, [TRIE])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_log_probabilities_are_found(batch: RaggedBatch, dtype: str) -> None:
    model = load_trainee("tiny-qwen3", 512, dtype)
    truth = checks.true_logprobs(model, batch)
    with planted("none"):
        assert checks.wrong_logprobs(model, batch, TRIE, truth) is None
    for fault in ("future", "branch"):
        with planted(fault):
            why = checks.wrong_logprobs(model, batch, TRIE, truth)
        assert why is not None
        assert "error" in why


def test_wrong_losses_are_found() -> None:
    right = {"a": 10.0, "b": 10.00001}
    assert checks.wrong_values(right, 10.0, torch.float32) == {}
    assert checks.wrong_values({**right, "c": 10.001}, 10.0, torch.float32).keys() == {"c"}
    assert checks.wrong_values({"a": 10.004}, 10.0, torch.bfloat16) == {}
    assert checks.wrong_values({"a": 10.01, "b": math.nan}, 10.0, torch.bfloat16).keys() == {"a", "b"}


@pytest.mark.parametrize("plant", ["scaled", "one row", "missing", "not a number"])
def test_wrong_gradients_are_found(plant: str) -> None:
    truth = {"w": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)), "b": torch.ones(4)}
    noisy = {name: value.bfloat16().float() for name, value in truth.items()}
    dense = [truth, noisy]
    assert checks.wrong_gradient(dict(noisy), dense, torch.bfloat16) is None
    bad = {name: value.clone() for name, value in truth.items()}
    if plant == "scaled":
        bad["w"] *= 1.05
    elif plant == "one row":
        bad["w"][3] = 0
    elif plant == "missing":
        del bad["b"]
    else:
        bad["b"][0] = math.nan
    why = checks.wrong_gradient(bad, dense, torch.bfloat16)
    assert why is not None
    assert ("b" if plant in ("missing", "not a number") else "w") in why


def test_a_curve_that_leaves_the_other_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = checks.curve("tiny-qwen3", "synthetic:12+4x3", 12, 3, shared=False)
    same = checks.curve("tiny-qwen3", "synthetic:12+4x3", 12, 3, shared=True)
    assert same == pytest.approx(own, rel=1e-5)
    assert len(set(own)) == 3
    real = variants.causal_lm_loss
    monkeypatch.setattr(
        variants,
        "causal_lm_loss",
        lambda model, batch, labels, **more: real(model, batch, labels, **more) * 1.0001,
    )
    wrong = checks.curve("tiny-qwen3", "synthetic:12+4x3", 12, 3, shared=True)
    assert wrong != pytest.approx(own, rel=1e-5)


def lean(measured: Step | HeadStep) -> float:
    return {TRIE: 30.0, "dense-sdpa": 100.0, "chunked": 9.0}.get(measured.variant, 120.0)


def hungry(measured: Step | HeadStep) -> float:
    return {TRIE: 40.0, "chunked": 13.0}.get(measured.variant, lean(measured))


def quiet(what: str) -> None:
    assert what


def test_the_whole_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars_module, "peak_megabytes_of", lean)
    bars = training_bars(quiet, TINY)
    speeds, others = bars[:2], bars[2:]
    assert len(others) == 4
    assert len({bar.name for bar in bars}) == 6
    for bar in speeds:
        assert "trie over dense" in bar.name
        assert bar.wrong is None
        assert bar.ideal is not None
        assert bar.limit == pytest.approx(0.85 * bar.ideal)
        assert set(bar.details["loss"]) == {*DENSE_LOSSES, TRIE}
        assert bar.details["against"] in DENSE_LOSSES
        assert "vocabulary 512" in bar.shape
    assert all(bar.passed for bar in others)
    assert [bar.value for bar in others if "memory over dense" in bar.name] == [0.3, 0.3]
    assert others[-1].value == 9 / 120
    json.dumps([bar.row() for bar in bars], allow_nan=False)


def test_hungry_paths_turn_red(monkeypatch: pytest.MonkeyPatch) -> None:
    for peaks, passed in ((lean, True), (hungry, False)):
        monkeypatch.setattr(bars_module, "peak_megabytes_of", peaks)
        assert bars_module._memory_bar(TINY, "all tokens", 0, quiet).passed is passed
        assert bars_module._head_bar(TINY, quiet).passed is passed


def test_a_wrong_trie_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = variants.causal_lm_loss

    def doubled(model: Any, batch: RaggedBatch, labels: Tensor | None, *, attention: str) -> Tensor:
        """Right value, twice the gradient."""
        loss = real(model, batch, labels, attention=attention)
        return 2 * loss - loss.detach() if attention == TRIE else loss

    monkeypatch.setattr(variants, "causal_lm_loss", doubled)
    for bar in bars_module._speed_bars(TINY, {"completions": 24}, quiet):
        assert not bar.passed
        assert bar.wrong is not None
        assert "gradient of" in bar.wrong


def test_too_little_memory_is_said_before_it_is_used() -> None:
    with pytest.raises(RuntimeError, match=r"naive head needs about [\d,]+ MB, [\d,]+ MB are free"):
        peak_megabytes_of(HeadStep("naive", 150_000, 10**9, 256))


@pytest.mark.slow
def test_fresh_processes_measure_and_say_why_they_fail() -> None:
    peaks = {
        name: peak_megabytes_of(Step(name, "tiny-qwen3", 512, "float32", "synthetic:600+20x8", 600))
        for name in ("dense-padded-rows", "dense-sdpa", TRIE)
    }
    assert 0.02 < peaks[TRIE] / min(peaks["dense-padded-rows"], peaks["dense-sdpa"]) < 0.5
    naive, chunked = (peak_megabytes_of(HeadStep(kind, 60_000, 2048, 16)) for kind in ("naive", "chunked"))
    logits_mb = 4 * 60_000 * 2048 / 1e6
    assert naive > 2.5 * logits_mb
    assert chunked < logits_mb
    with pytest.raises(RuntimeError, match=r"(?s)measuring memory of fast failed.*unknown loss 'fast'"):
        peak_megabytes_of(Step("fast", "tiny-qwen3", 512, "float32", "synthetic:8+2x2", 8))
