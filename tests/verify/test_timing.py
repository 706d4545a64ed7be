"""Interleaving, pairing and quantiles of the timer."""

import itertools
import statistics
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.verify.timing import Timings, quantile, time_interleaved

NAMES = ["a", "b", "c"]


def recording_calls(log: list[str]) -> dict[str, object]:
    return {name: (lambda name=name: log.append(name)) for name in NAMES}


@settings(max_examples=10, deadline=None)  # each round collects garbage
@given(rounds=st.integers(1, 7), warmup=st.integers(0, 3))
def test_every_round_calls_each_once_and_starts_with_another(rounds: int, warmup: int) -> None:
    log: list[str] = []
    timings = time_interleaved(recording_calls(log), rounds, warmup)  # type: ignore[arg-type]
    order = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert len(order) == rounds + warmup
    assert all(sorted(one_round) == NAMES for one_round in order)
    assert all(first[0] != second[0] for first, second in itertools.pairwise(order))
    assert [one_round[0] for one_round in order[warmup:]] == [NAMES[i % 3] for i in range(rounds)]
    assert all(len(seconds) == rounds for seconds in timings.seconds.values())
    assert timings.rounds == rounds


def test_the_clock_sees_the_difference() -> None:
    calls = {"slow": lambda: time.sleep(0.02), "fast": lambda: time.sleep(0.005)}
    timings = time_interleaved(calls, rounds=5)
    ratio = timings.ratio("slow", "fast")
    assert 2.5 < ratio.median < 5
    assert ratio.q20 <= ratio.median <= ratio.q80
    assert timings.fastest(["slow", "fast"]) == "fast"


def test_warmup_rounds_are_not_in_the_result() -> None:
    delays = iter([0.05, 0.0, 0.0])
    timings = time_interleaved({"x": lambda: time.sleep(next(delays))}, rounds=2, warmup=1)
    assert max(timings.seconds["x"]) < 0.04


@given(drift=st.lists(st.floats(0.1, 10), min_size=1, max_size=9), factor=st.floats(0.5, 8))
def test_paired_ratios_ignore_a_drift_that_hits_both(drift: list[float], factor: float) -> None:
    timings = Timings({"dense": [factor * d for d in drift], "trie": list(drift)})
    ratio = timings.ratio("dense", "trie")
    assert ratio.median == pytest.approx(factor)
    assert ratio.q20 == pytest.approx(factor)
    assert ratio.q80 == pytest.approx(factor)


@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_quantiles_agree_with_the_standard_library(values: list[float]) -> None:
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))
    if len(values) > 1:
        fifths = statistics.quantiles(values, n=5, method="inclusive")
        assert quantile(values, 0.2) == pytest.approx(fifths[0])
        assert quantile(values, 0.8) == pytest.approx(fifths[3])


def test_the_device_is_idle_on_both_sides_of_a_timed_call() -> None:
    log: list[str] = []
    time_interleaved({"x": lambda: log.append("call")}, 2, warmup=0, synchronize=lambda: log.append("wait"))
    assert log == ["wait", "call", "wait"] * 2


def test_pooling_appends_rounds() -> None:
    pooled = Timings({"a": [1.0], "b": [2.0]}).extended(Timings({"a": [3.0], "b": [4.0]}))
    assert pooled.seconds == {"a": [1.0, 3.0], "b": [2.0, 4.0]}
    with pytest.raises(ValueError, match="cannot pool"):
        pooled.extended(Timings({"a": [1.0]}))


def test_nothing_to_time_is_an_error() -> None:
    with pytest.raises(ValueError, match="no variants"):
        time_interleaved({}, 3)
    with pytest.raises(ValueError, match="rounds is 0"):
        time_interleaved({"a": lambda: None}, 0)


def test_a_failing_call_leaves_garbage_collection_on() -> None:
    import gc

    with pytest.raises(ZeroDivisionError):
        time_interleaved({"a": lambda: 1 // 0}, 1)
    assert gc.isenabled()
