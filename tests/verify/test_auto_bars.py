"""The bars of `"auto"`: green where it chooses well, red where it does not, and no verdict on a busy machine."""

from typing import Any

import pytest
import torch

from radixmlp import build_plan
from radixmlp.optimized.cost import CostModel, known
from radixmlp.verify import auto_bars
from radixmlp.verify.auto_bars import AutoTimings, bars_of
from radixmlp.verify.bars import Bar
from radixmlp.verify.models import LoadedModel, check_model_name, load_model
from radixmlp.verify.timing import Timings
from radixmlp.verify.workloads import is_workload

SECONDS = {"dense-sdpa": 1.0, "dense-padded": 1.1, "scatter-sdpa": 0.8, "trie-sdpa": 0.6, "dense again": 1.0}


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to the user's own cache, or kept from another test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known.forget()


def measured(auto: float, again: tuple[float, ...] = (0.99, 1.0, 1.01)) -> AutoTimings:
    rounds = len(again)
    seconds = {name: [value] * rounds for name, value in SECONDS.items()}
    seconds |= {"auto": [auto] * rounds, "dense again": list(again)}
    return AutoTimings("tree", Timings(seconds), "trie-sdpa", {"trie-sdpa": 0.6}, 0.5)


def bars(monkeypatch: pytest.MonkeyPatch, *results: AutoTimings, cost: CostModel | None = None) -> list[Bar]:
    """The two bars of one model, from given timings; a second measurement of a batch finds the same."""
    given = {str(i): result for i, result in enumerate(results)}
    monkeypatch.setattr(auto_bars, "time_auto", lambda _loaded, workload, *_: given[workload])
    monkeypatch.setattr(auto_bars, "_batch", lambda *_: None)
    monkeypatch.setattr(CostModel, "for_model", lambda *_, **__: cost or CostModel({}))
    loaded = LoadedModel("some-model", None, 97, lambda: None)
    return bars_of(loaded, "bfloat16", tuple(given), 15, lambda _: None)


def test_the_best_choice_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    best, dense = bars(monkeypatch, measured(0.6), measured(0.61))
    assert best.passed
    assert dense.passed
    assert best.value == pytest.approx(0.61 / 0.6 - 1)
    assert best.limit == pytest.approx(0.05)
    assert dense.value == pytest.approx(-0.39)
    assert dense.limit == pytest.approx(0.02)
    assert len(best.details["batches"]) == 2
    assert "1.0%" not in best.name
    assert "dense against itself" in best.shape


def test_one_bad_batch_among_good_ones_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    best, dense = bars(monkeypatch, measured(0.6), measured(0.66), measured(0.6))
    assert not best.passed
    assert dense.passed
    best, dense = bars(monkeypatch, measured(0.6), measured(1.03))
    assert not best.passed
    assert not dense.passed


def test_within_the_spread_of_dense_against_itself_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    shaky = (0.94, 0.94, 1.0, 1.06, 1.06)
    best, dense = bars(monkeypatch, measured(0.635, shaky))
    assert best.passed
    assert best.limit == pytest.approx(0.06)
    assert dense.limit == pytest.approx(0.06)
    assert not bars(monkeypatch, measured(0.64, shaky))[0].passed


def test_a_busy_machine_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for bar in bars(monkeypatch, measured(0.6), measured(0.6, (0.7, 0.7, 1.0, 1.4, 1.4))):
        assert not bar.passed
        assert "the machine is busy" in str(bar.wrong)


def test_where_nothing_was_predicted_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    best, _ = bars(monkeypatch, measured(0.6), cost=CostModel({}, failure="RuntimeError: x"))
    assert not best.passed
    assert "RuntimeError: x" in str(best.wrong)


def test_the_batches_exist_and_hold_every_kind() -> None:
    for name, _, workloads in (*auto_bars._GRID, auto_bars._TINY):
        check_model_name(name)
        assert all(is_workload(workload) for workload in workloads)
    loaded = LoadedModel("bytes", None, 512, lambda: None)
    gammas = []
    for workload in auto_bars._GRID[0][2]:
        batch = auto_bars._batch(workload, loaded)
        assert bool((batch.lengths > 0).all())
        gammas.append(build_plan(batch).gamma)
    assert min(gammas) < 0.3
    assert sum(0.6 < gamma <= 0.9 for gamma in gammas) >= 3
    assert max(gammas) == 1.0


def test_a_tiny_model_is_measured_and_not_judged() -> None:
    loaded = load_model("tiny-qwen3", "float32")
    best, dense = bars_of(loaded, "float32", ("tree", "nothing-shared"), 2, lambda _: None, judged=False)
    assert best.limit is None
    assert dense.limit is None
    assert best.passed
    rows = {row["workload"]: row for row in best.details["batches"]}
    assert set(rows) == {"tree", "nothing-shared"}
    assert rows["tree"]["choice"] == "trie-sdpa"
    assert rows["nothing-shared"]["choice"] == "dense-sdpa"
    assert set(rows["tree"]["seconds"]) == {*SECONDS, "auto"}
    assert torch.tensor([list(row["seconds"].values()) for row in rows.values()]).gt(0).all()
    assert best.details["calibration"]["layers"] == 2
