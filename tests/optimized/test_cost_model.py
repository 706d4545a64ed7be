"""The cost model itself: work is counted as it is done, costs are fitted, and choices follow from them."""

import json
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.optimized.attention.products import Products
from radixmlp.optimized.attention.sdpa import DenseSdpa, ScatterSdpa
from radixmlp.optimized.attention.trie_sdpa import TrieSdpa
from radixmlp.optimized.cost import CostModel, work_of
from radixmlp.optimized.cost.fit import ascending, fit_costs, interpolate
from radixmlp.optimized.cost.model import LEAST_GAIN
from radixmlp.optimized.cost.work import copied_rows
from radixmlp.optimized.index import build_plan
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

COSTS = st.lists(st.floats(0, 1), min_size=3, max_size=3)


def shared_prefix(prefix: int, suffix: int, batch: int) -> TriePlan:
    rows = [[*range(prefix), *range(1000 * (i + 1), 1000 * (i + 1) + suffix)] for i in range(batch)]
    return build_plan(RaggedBatch.from_sequences(rows))


def cost_model(**changes: Any) -> CostModel:
    """100 us a row and layer; attention costs 1 us a round, and next to nothing a score."""
    values: dict[str, Any] = {
        "key": {"device": "test"},
        "layers": 4,
        "query_heads": 4,
        "kv_heads": 2,
        "candidates": ("trie-sdpa", "dense-sdpa", "scatter-sdpa"),
        "row_seconds": ((16, 1.6e-3), (256, 25.6e-3)),
        "attention": {"parts": (1e-6, 1e-12, 1e-12)},
        "copy_seconds": 1e-9,
        "seconds": 0.1,
    }
    return CostModel(**{**values, **changes})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), max_size=60), min_size=1, max_size=12))
def test_work_is_what_attention_does(sequences: list[list[int]]) -> None:
    heads, kv_heads, done = 4, 2, []
    plan = build_plan(RaggedBatch.from_sequences(sequences))
    original = Products.scores

    def counted(self: Products, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        done.append(q.shape[0] * q.shape[1] * k.shape[1])
        return original(self, q, k, scale)

    identity = TriePlan.identity(RaggedBatch.from_sequences(sequences))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Products, "scores", counted)
        for backend, its_plan in ((TrieSdpa(), plan), (DenseSdpa(), identity), (ScatterSdpa(), plan)):
            done.clear()
            q = torch.randn(its_plan.num_nodes, heads, 8)
            k = torch.randn(its_plan.num_nodes, kv_heads, 8)
            backend(q, k, k, its_plan, AttentionSpec(1.0))
            work = work_of(backend.name, plan, heads, kv_heads, "cpu")
            assert (work.rounds, work.scores) == (len(done), sum(done)), backend.name


def test_work_on_a_gpu_is_one_call_a_run_of_equal_lengths() -> None:
    plan = build_plan(RaggedBatch.from_sequences([[1, 2], [1, 3], [1, 2, 3], []]))
    dense = work_of("dense-sdpa", plan, 4, 2, "cuda")
    assert (dense.rounds, dense.scores, dense.moved) == (2, 4 * (3 + 3 + 6), 4 * 7)
    kernel = work_of("trie-triton", plan, 4, 2, "cuda")
    assert (kernel.rounds, kernel.scores) == (1, 4 * (1 + 2 + 3 + 2))
    assert copied_rows(plan, 4, 2) == 7 * 8 + 4 * 4


@given(COSTS, st.lists(st.tuples(*[st.floats(0.1, 100)] * 3), min_size=6, max_size=12))
def test_fitted_costs_are_never_negative_and_explain_what_is_linear(
    costs: list[float], features: list[tuple[float, ...]]
) -> None:
    seconds = [sum(c * f for c, f in zip(costs, row, strict=True)) + 1e-3 for row in features]
    found = fit_costs([(*row, 1.0) for row in features], seconds)
    assert min(found) >= 0
    for row, expected in zip(features, seconds, strict=True):
        got = sum(c * f for c, f in zip(found, (*row, 1.0), strict=True))
        assert got == pytest.approx(expected, rel=0.05)


@given(st.lists(st.floats(1e-3, 10), min_size=4, max_size=10), st.randoms(use_true_random=False))
def test_fitted_costs_of_noise_are_not_negative(seconds: list[float], random: Any) -> None:
    features = [[random.randrange(100) for _ in range(3)] for _ in seconds]
    assert min(fit_costs(features, seconds)) >= 0


def test_no_costs_are_fitted_to_nothing() -> None:
    with pytest.raises(ValueError, match="positive seconds"):
        fit_costs([], [])
    with pytest.raises(ValueError, match="positive seconds"):
        fit_costs([[1, 2, 3]], [0.0])


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-6, 1)), min_size=1, max_size=6))
def test_more_rows_never_take_less(points: list[tuple[int, float]]) -> None:
    curve = ascending(sorted(dict(points).items()))
    assert [rows for rows, _ in curve] == sorted(dict(points))
    assert all(interpolate(curve, rows) == pytest.approx(seconds) for rows, seconds in curve)
    values = [interpolate(curve, x) for x in range(1, 25_000, 501)]
    assert all(low <= high * (1 + 1e-9) for low, high in pairwise(values))


def test_a_fixed_cost_does_not_shrink_and_the_last_slope_goes_on() -> None:
    curve = ((16, 1.0), (64, 2.0), (256, 6.0))
    assert interpolate(curve, 3) == 1.0
    assert interpolate(curve, 40) == pytest.approx(1.5)
    assert interpolate(curve, 448) == pytest.approx(10.0)


def test_rows_that_cost_much_are_shared() -> None:
    cost = cost_model()
    choice = cost.choose(shared_prefix(64, 16, 8))
    assert choice.attention in ("trie-sdpa", "scatter-sdpa")
    assert choice.predicted[choice.attention] < choice.predicted["dense-sdpa"]
    assert "predicted" in choice.reason


def test_dense_runs_where_attention_in_pieces_costs_more_than_the_rows() -> None:
    cost = cost_model(attention={"parts": (1.0, 0.0, 0.0)}, copy_seconds=1.0)
    plan = shared_prefix(8, 40, 3)
    assert work_of("trie-sdpa", plan, 4, 2, "cpu").rounds > work_of("dense-sdpa", plan, 4, 2, "cpu").rounds
    choice = cost.choose(plan)
    assert choice.attention == "dense-sdpa"
    assert not choice.shares


def test_scatter_runs_where_pieces_cost_and_copies_do_not() -> None:
    cost = cost_model(attention={"parts": (1e-3, 0.0, 0.0)}, copy_seconds=0.0)
    assert cost.choose(shared_prefix(8, 40, 3)).attention == "scatter-sdpa"


def test_a_gain_within_the_margin_is_no_reason_to_share() -> None:
    plan = shared_prefix(1, 99, 2)  # 199 of 200 rows
    choice = cost_model(row_seconds=((16, 1.6e-3), (256, 25.6e-3))).choose(plan)
    assert 1 - min(choice.predicted.values()) / choice.predicted["dense-sdpa"] < LEAST_GAIN
    assert choice.attention == "dense-sdpa"


def test_the_models_own_forward_pays_for_padding() -> None:
    plan = shared_prefix(2, 98, 2)
    cost = cost_model()
    even = cost.choose(plan, slots=plan.num_tokens)
    assert even.attention == "model"
    padded = cost.choose(plan, slots=2 * plan.num_tokens)
    assert padded.shares
    assert padded.predicted["model"] == pytest.approx(2 * even.predicted["model"], rel=0.05)


def test_a_backend_that_refused_is_no_candidate() -> None:
    plan = shared_prefix(64, 16, 8)
    assert cost_model(candidates=("trie-sdpa",)).choose(plan).attention == "trie-sdpa"
    choice = cost_model(candidates=("dense-sdpa", "scatter-sdpa")).choose(plan)
    assert choice.attention == "scatter-sdpa"
    assert "trie-sdpa" not in choice.predicted
    kernel = cost_model(
        device_type="cuda",
        candidates=("trie-sdpa", "dense-sdpa", "scatter-sdpa", "trie-triton"),
        attention={"parts": (1e-3, 0, 0), "fused": (1e-4, 0, 0), "trie-triton": (1e-5, 0, 0)},
    )
    assert kernel.choose(plan).attention == "trie-triton"


def test_choices_are_the_same_for_the_same_calibration() -> None:
    for plan in (shared_prefix(64, 16, 8), shared_prefix(1, 99, 2)):
        again = CostModel.from_dict(json.loads(json.dumps(cost_model().to_dict())))
        assert again == cost_model()
        assert again.choose(plan) == cost_model().choose(plan)


def test_what_may_not_be_used_predicts_nothing() -> None:
    plan = shared_prefix(1, 99, 2)
    for cost, why in (
        (cost_model(failure="RuntimeError: x"), "RuntimeError: x"),
        (cost_model(calm=False), "busy"),
    ):
        choice = cost.choose(plan)
        assert choice.attention == "trie-sdpa"
        assert choice.predicted == {}
        assert why in choice.reason


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"layers": "four"},
        {"query_heads": 3},
        {"row_seconds": []},
        {"row_seconds": [[16, 1.0], [16, 2.0]]},
        {"row_seconds": [[16, -1.0]]},
        {"row_seconds": 7},
        {"attention": {"parts": [1.0, 2.0]}},
        {"attention": {"parts": [float("nan"), 0, 0]}},
        {"attention": {}},
        {"attention": {"fused": [1.0, 0.0, 0.0]}},
        {"candidates": None},
        {"copy_seconds": None},
        {"failure": "it failed"},
        {"calm": False},
        {"unheard_of": 1},
    ],
)
def test_files_that_are_no_calibration_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a cost model"):
        CostModel.from_dict({**cost_model().to_dict(), **change})


def test_other_documents_are_refused() -> None:
    for document in ({}, {"key": {}}, [], None, "x"):
        with pytest.raises(ValueError, match="not a cost model"):
            CostModel.from_dict(document)  # type: ignore[arg-type]
