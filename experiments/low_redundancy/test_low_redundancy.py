"""Low redundancy: the batches have the ratio they promise, and break-even is where the curve crosses 1."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers

experiment = load_experiment("low_redundancy")
batches = load_experiment("low_redundancy", "batches")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return experiment.measure(True, lambda _: None)


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(["one prefix", "pairs"]),
    half=st.integers(1, 6),
    length=st.integers(16, 90),
    ratio=st.floats(1.0, 1.3),
)
def test_batches_have_the_ratio_they_promise(layout: str, half: int, length: int, ratio: float) -> None:
    batch = batches.LAYOUTS[layout](2 * half, length, ratio, 512)
    rows = [tuple(row) for row in batch.sequences()]
    assert [len(row) for row in rows] == [length] * (2 * half)
    nodes = {row[:end] for row in rows for end in range(1, length + 1)}
    # The shared length is a whole number: off by half a token, for every sequence that shares it.
    assert abs(len(nodes) - batch.num_tokens / ratio) <= 0.5 * (2 * half - 1) + 1e-9


def test_too_large_a_ratio_and_odd_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="smaller ratio"):
        batches.one_prefix(2, 16, 3.0, 512)
    with pytest.raises(ValueError, match="even number"):
        batches.pairs(3, 16, 1.1, 512)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1.0, 1.02), (1.1, 1.2)], 1.0),
        ([(1.0, 0.9), (1.1, 1.1)], 1.05),
        ([(1.0, 1.1), (1.1, 0.95), (1.2, 1.05)], 1.15),
        ([(1.0, 1.1), (1.1, 0.9)], None),
    ],
)
def test_break_even(points: list[tuple[float, float]], expected: float | None) -> None:
    assert experiment.break_even(points) == (expected if expected is None else pytest.approx(expected))


def test_a_run_counts_and_times_every_path(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured))["shapes"] == measured["shapes"]
    for shape in measured["shapes"]:
        assert shape["rows"] * shape["r"] == pytest.approx(shape["tokens"])
        assert shape["auto_ran"] == "dense-sdpa" or shape["r"] > 1.1
    nothing = [shape for shape in measured["shapes"] if shape["rows"] == shape["tokens"]]
    assert len(nothing) == 2
    assert all(shape["ideal"] == {"trie": 1.0, "scatter": 1.0} for shape in nothing)


def test_the_report_names_every_number(measured: dict[str, Any]) -> None:
    assert unreported_numbers(experiment.report, measured) == []


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "wrong_outputs", lambda *_: {"trie-sdpa": "far off"})
    with pytest.raises(ValueError, match="far off"):
        experiment.measure(True, lambda _: None)
