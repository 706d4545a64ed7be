"""Long context: FLOPs against brute force, the clock inside the layer, a prediction that keeps its measurement."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import radixmlp
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers
from radixmlp.verify.ideal import DecoderShape, ideal_speedup
from radixmlp.verify.models import load_model
from radixmlp.verify.workloads import make_workload

experiment = load_experiment("long_context")
clock = load_experiment("long_context", "clock")
SHAPE = DecoderShape(64, 4, 2, 16, 128, 512, (None, None))


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return experiment.measure(True, lambda _: None)


@settings(max_examples=30, deadline=None)
@given(prefix=st.integers(1, 12), own=st.integers(1, 6), count=st.integers(1, 4))
def test_work_is_that_of_brute_force(prefix: int, own: int, count: int) -> None:
    batch = make_workload(f"synthetic:{prefix}+{own}x{count}", None, 512).batch
    works = experiment.work_of(SHAPE, batch)
    rows = [tuple(row) for row in batch.sequences()]
    nodes = {row[:end] for row in rows for end in range(1, len(row) + 1)}
    dense_pairs = sum(len(row) * (len(row) + 1) // 2 for row in rows)
    trie_pairs = sum(map(len, nodes))  # a node sees its ancestors and itself
    expected = {
        "dense": (sum(map(len, rows)), dense_pairs),
        "scatter": (len(nodes), dense_pairs),
        "trie": (len(nodes), trie_pairs),
    }
    for path, (tokens, pairs) in expected.items():
        assert works[path].position_wise == 2 * tokens * SHAPE.flops_per_row
        assert works[path].attention == 2 * pairs * SHAPE.flops_per_pair
    ideal = ideal_speedup(SHAPE, batch, radixmlp.build_plan(batch))
    total = {path: work.position_wise + work.attention for path, work in works.items()}
    assert total["dense"] / total["trie"] == pytest.approx(ideal.speedup("trie"))
    assert total["dense"] / total["scatter"] == pytest.approx(ideal.speedup("scatter"))


@pytest.mark.parametrize("path", ["dense", "scatter", "trie"])
def test_half_length_is_where_attention_leads(path: str) -> None:
    length = experiment.half_length(SHAPE, 8, 3, path)

    def share(length: int) -> float:
        batch = make_workload(f"synthetic:{length - 8}+8x3", None, 512).batch
        return experiment.work_of(SHAPE, batch)[path].share

    assert share(length) >= 0.5 > share(length - 1)


def test_the_clock_measures_the_calls_inside_and_changes_nothing() -> None:
    model = load_model("tiny-qwen3", "float32").model
    batch = make_workload("synthetic:20+4x3", None, 512).batch
    plain = radixmlp.forward(model, batch, attention="trie-sdpa").last_hidden_state
    with clock.clocked("trie-sdpa", "dense-sdpa") as clocks:
        start = time.perf_counter()
        timed = radixmlp.forward(model, batch, attention="trie-sdpa" + clock.SUFFIX)
        assert 0 < clocks["trie-sdpa"].seconds < time.perf_counter() - start
        assert clocks["dense-sdpa"].seconds == 0
        dense = radixmlp.forward(model, batch, attention="dense-sdpa" + clock.SUFFIX)
    assert torch.equal(timed.last_hidden_state, plain)
    assert dense.plan.num_nodes == batch.num_tokens
    assert not [name for name in radixmlp.attention_backends() if name.endswith(clock.SUFFIX)]
    reason = clocks["trie-sdpa"].unsupported(None, torch.device("cuda"), torch.float32, False)
    assert "does not wait" in reason


def test_the_prediction_at_a_measured_length_is_the_measurement() -> None:
    works = {path: experiment.Work(100, 50 * n) for n, path in enumerate(experiment.PATHS, start=1)}
    seconds, attention = (
        {"dense": 3.0, "scatter": 2.0, "trie": 1.0},
        {"dense": 1.0, "scatter": 0.5, "trie": 0.25},
    )
    found = experiment.predict(works, experiment.rates_of(seconds, attention, works))
    assert found["seconds"] == pytest.approx(seconds)
    assert found["attention_share"] == pytest.approx(
        {path: attention[path] / seconds[path] for path in seconds}
    )
    assert found["over_dense"] == pytest.approx({"scatter": 1.5, "trie": 3.0})


def test_a_run_measures_and_predicts(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured))["predicted"] == measured["predicted"]
    for entry in (*measured["measured"], *measured["predicted"]):
        assert all(0 < share < 1 for share in entry["attention_share"].values())
        assert entry["flop_share"]["scatter"] > entry["flop_share"]["dense"]
        assert entry["ideal"]["trie"] > entry["ideal"]["scatter"] > 1


def test_the_report_names_every_number(measured: dict[str, Any]) -> None:
    assert unreported_numbers(experiment.report, measured) == []


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "wrong_outputs", lambda *_: {"trie-sdpa": "far off"})
    monkeypatch.setattr(experiment, "_time", lambda *_: pytest.fail("timed"))
    with pytest.raises(ValueError, match="far off"):
        experiment.measure(True, lambda _: None)
