"""Measuring: finished cells survive a kill, count only for the same code, and replace nothing half-done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from radixmlp.verify import figures_command
from radixmlp.verify.bars import Bar
from radixmlp.verify.figures import GROUPS
from radixmlp.verify.measured import (
    MeasuredFileError,
    measured_file,
    read_document,
    replace_groups,
    whole_document,
)
from radixmlp.verify.models import load_model
from radixmlp.verify.workloads import make_workload

Part = Callable[[str], ModuleType]
WHERE = {
    "commit": "a" * 40, "dirty": False, "device": "Abacus, 2 cores", "threads": 2, "torch": "2.13.0",
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout's folders with one line of code each."""
    for folder in ("reference", "kernels", "optimized", "verify", "paper_figures/measured"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "code.py").write_text("x = 1\n")
    return tmp_path


@pytest.fixture
def here(part: Part, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `measure` takes for this machine's environment; tests change it."""
    where = dict(WHERE)
    monkeypatch.setattr(part("measure"), "environment", lambda device: dict(where))
    return where


def cells_of(part: Part, ran: list[str], *names: str, broken: str = "") -> list[Any]:
    """Cells that note that they ran; the one called `broken` raises."""

    def make(name: str) -> Any:
        def run(progress: Callable[[str], None]) -> dict[str, Any]:
            progress("now")
            ran.append(name)
            if name == broken:
                raise ValueError("planted")
            point = {"figure": "f", "series": name, "x": 1.0, "y": 2.0, "unit": "times"}
            bar = {"name": f"{name}: bar", "value": 7.0, "passed": True}
            return {"series": [point], "bars": [bar]}

        return part("measure_cells").Cell(name, 1.0, run)

    return [make(name) for name in names]


def test_a_whole_run_replaces_the_committed_file_and_forgets_its_cells(
    part: Part, checkout: Path, here: dict[str, Any]
) -> None:
    ran: list[str] = []
    outcome = part("measure").measure(checkout, cells=cells_of(part, ran, "one", "two"))
    assert outcome.kept == measured_file(checkout, WHERE["device"])
    document = read_document(outcome.kept)
    assert document["environment"]["commit"] == WHERE["commit"]
    assert [point["commit"] for point in document["series"]] == [WHERE["commit"]] * 2
    assert [bar["name"] for bar in document["bars"]] == ["one: bar", "two: bar"]
    assert read_document(outcome.file) == document
    part("measure").measure(checkout, cells=cells_of(part, ran, "one", "two"))
    assert ran == ["one", "two"] * 2


@pytest.mark.parametrize("dirty", [True, None])
def test_a_tree_that_is_not_clean_replaces_nothing_and_measures_nothing_twice(
    part: Part, checkout: Path, here: dict[str, Any], dirty: bool | None
) -> None:
    ran: list[str] = []
    here["dirty"] = dirty
    outcome = part("measure").measure(checkout, cells=cells_of(part, ran, "one"))
    assert outcome.kept is None
    assert "not clean" in outcome.reason
    assert read_document(outcome.file)["series"]
    assert not measured_file(checkout, WHERE["device"]).exists()
    here["dirty"] = False
    outcome = part("measure").measure(checkout, cells=cells_of(part, ran, "one"))
    assert outcome.kept is not None
    assert ran == ["one"]


def test_a_cell_that_raises_stops_no_other_and_writes_nothing(
    part: Part, checkout: Path, here: dict[str, Any]
) -> None:
    ran: list[str] = []
    outcome = part("measure").measure(checkout, cells=cells_of(part, ran, "one", "bad", "two", broken="bad"))
    assert ran == ["one", "bad", "two"]
    assert outcome.failed == {"bad": "ValueError: planted"}
    assert outcome.file is None
    assert not measured_file(checkout, WHERE["device"]).exists()
    outcome = part("measure").measure(checkout, cells=cells_of(part, ran, "one", "bad", "two"))
    assert ran == ["one", "bad", "two", "bad"]
    assert outcome.kept is not None


@pytest.mark.parametrize("folder", ["reference", "kernels", "optimized", "verify", "paper_figures"])
def test_cells_of_other_code_do_not_count(
    part: Part, checkout: Path, here: dict[str, Any], folder: str
) -> None:
    ran: list[str] = []
    here["dirty"] = True
    part("measure").measure(checkout, cells=cells_of(part, ran, "one"))
    (checkout / folder / "code.py").write_text("x = 2\n")
    part("measure").measure(checkout, cells=cells_of(part, ran, "one"))
    assert ran == ["one", "one"]


@pytest.mark.parametrize("changed", [{"torch": "2.14.0"}, {"threads": 1}])
def test_cells_of_another_machine_do_not_count(
    part: Part, checkout: Path, here: dict[str, Any], changed: dict[str, Any]
) -> None:
    ran: list[str] = []
    here["dirty"] = True
    part("measure").measure(checkout, cells=cells_of(part, ran, "one"))
    here |= changed
    part("measure").measure(checkout, cells=cells_of(part, ran, "one"))
    assert ran == ["one", "one"]


def test_fresh_measures_everything_again(part: Part, checkout: Path, here: dict[str, Any]) -> None:
    ran: list[str] = []
    here["dirty"] = True
    for fresh in (False, True):
        part("measure").measure(checkout, fresh=fresh, cells=cells_of(part, ran, "one"))
    assert ran == ["one", "one"]


def test_a_broken_cell_file_is_measured_again(part: Part, tmp_path: Path) -> None:
    store = part("measure_store").CellStore(tmp_path, "key")
    store.save("one", {"bars": []}, 1.0)
    file = next(tmp_path.iterdir())
    assert store.load("one") == {"bars": []}
    for text in (file.read_text()[:-9], "[]", ""):
        file.write_text(text)
        assert store.load("one") is None


KILLED = """
    import pathlib, sys, time
    from radixmlp.verify.checkout import load_module
    load = lambda name: load_module(pathlib.Path(sys.argv[1]), "radixmlp_paper_figures", name)
    log = pathlib.Path(sys.argv[3])

    def cell(number):
        def run(progress):
            with log.open("a") as file:
                file.write(f"{number}\\n")
            time.sleep(0.15)
            return {"series": [{"figure": "f", "series": "s", "x": number, "y": 1.0, "unit": "times"}]}
        return load("measure_run").Cell(f"cell {number}", 1.0, run)

    store = load("measure_store").CellStore(pathlib.Path(sys.argv[2]), "key")
    results, failed = load("measure_run").run_cells([cell(n) for n in range(6)], store)
    assert not failed and len(results) == 6
"""


def test_a_run_that_is_killed_loses_at_most_one_cell(root: Path, tmp_path: Path) -> None:
    script, log = tmp_path / "run.py", tmp_path / "log"
    script.write_text(textwrap.dedent(KILLED))
    command = [
        sys.executable,
        "-P",
        str(script),
        str(root / "paper_figures"),
        str(tmp_path / "cells"),
        str(log),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not log.exists() or len(log.read_text().split()) < 3):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = log.read_text().split()
    assert len(begun) >= 3
    for file in (tmp_path / "cells").glob("*.json"):
        assert json.loads(file.read_text())["result"]["series"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert len(log.read_text().split()) <= 6 + 1
    assert len(list((tmp_path / "cells").glob("*.json"))) == 6


def test_the_cells_cover_the_bench_and_fit_the_time(part: Part) -> None:
    cells_module = part("measure_cells")
    cells = cells_module.all_cells(cells_module.Sizes())
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    assert set(cells_module.FIGURE_GROUPS) <= set(GROUPS)
    assert {f"bench: {group}" for group in cells_module.FIGURE_GROUPS} <= set(names)
    assert sum(cell.seconds for cell in cells) <= 40 * 60
    every = [cell.name for cell in cells_module.all_cells(cells_module.Sizes(), tuple(GROUPS))]
    assert {f"bench: {group}" for group in GROUPS} <= set(every)


def test_bars_that_were_not_measured_stay_with_their_commit(
    part: Part, checkout: Path, here: dict[str, Any]
) -> None:
    """Only where machine and versions are the same."""
    file = measured_file(checkout, WHERE["device"])
    old = {"environment": {**WHERE, "commit": "b" * 40}, "bars": [{"name": "old: x"}, {"name": "one: x"}]}
    file.write_text(json.dumps(old))
    outcome = part("measure").measure(checkout, cells=cells_of(part, [], "one"))
    kept = [(bar["name"], bar.get("commit")) for bar in outcome.document["bars"]]
    assert kept == [("one: bar", None), ("old: x", "b" * 40)]
    here["torch"] = "2.14.0"
    outcome = part("measure").measure(checkout, cells=cells_of(part, [], "one"))
    assert [bar["name"] for bar in outcome.document["bars"]] == ["one: bar"]


def test_code_that_changes_meanwhile_replaces_nothing(
    part: Part, checkout: Path, here: dict[str, Any]
) -> None:
    def run(progress: Callable[[str], None]) -> dict[str, Any]:
        (checkout / "verify" / "code.py").write_text("x = 3\n")
        return {"bars": []}

    outcome = part("measure").measure(checkout, cells=[part("measure_cells").Cell("one", 1.0, run)])
    assert outcome.kept is None
    assert "changed while it was measured" in outcome.reason


def test_one_small_batch_is_timed_and_checked(part: Part) -> None:
    loaded = load_model("tiny-qwen3", "bfloat16", "cpu")
    batch = make_workload("synthetic:24+6x6", None, loaded.vocab_size).batch
    points = part("measure_points")
    timed = points.time_batch(loaded.model, batch, ["scatter-sdpa", "trie-sdpa"], 3, lambda what: None)
    point = timed.point("grid", "trie", "trie-sdpa", 24, "a shape", prefix=24)
    assert point.q20 <= point.y <= point.q80
    assert point.details["against"] in ("dense-padded", "dense-sdpa")
    assert point.details["rounds"] == 3
    assert point.details["ideal"] > 1


@pytest.mark.parametrize("wrong", ["trie-sdpa", "dense-sdpa"])
def test_wrong_outputs_have_no_speed(part: Part, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    points = part("measure_points")
    honest = points.build_variants

    def planted(model: Any, batch: Any, names: Any) -> dict[str, Callable[[], torch.Tensor]]:
        calls = honest(model, batch, names)
        if wrong in calls:
            true = calls[wrong]
            calls[wrong] = lambda: true().roll(1, 0)
        return calls

    monkeypatch.setattr(points, "build_variants", planted)
    monkeypatch.setattr(points, "DENSE", ("dense-sdpa",))
    loaded = load_model("tiny-qwen3", "float32", "cpu")
    batch = make_workload("synthetic:24+6x6", None, loaded.vocab_size).batch
    with pytest.raises(points.WrongOutputError, match=wrong):
        points.time_batch(loaded.model, batch, ["trie-sdpa"], 2, lambda what: None)


def test_copies_and_gamma_are_measured(part: Part) -> None:
    rows = part("measure_copies").copies(1000, 2, lambda what: None)["series"]
    assert {(row["x"], row["series"]) for row in rows} == {
        (x, name) for x in range(3) for name in ("index_select", "index_copy_", "copy")
    }
    assert all(row["q20"] <= row["y"] <= row["q80"] for row in rows)
    shares = {
        row["series"]: row["y"] for row in part("measure_texts").gamma(True, lambda what: None)["series"]
    }
    assert shares["nothing-shared"] == 1
    assert shares["rerank, query first"] < shares["rerank, document first"]
    assert shares["synthetic:2048+256x32"] == pytest.approx((2048 + 256 * 32) / (2304 * 32))


def test_the_command_draws_what_it_measured(
    part: Part,
    document: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "new.json"
    file.write_text(json.dumps(document))
    asked: list[tuple[Any, ...]] = []

    def measured(root: Path, *options: bool) -> Any:
        asked.append(options)
        return part("measure").Outcome(file=file, reason="this was a quick run")

    monkeypatch.setattr(part("measure"), "measure", measured)
    assert figures_command.main(["--measure", "--quick", "--fresh", "--only", "6"]) == 0
    assert asked == [(True, True, False)]
    assert (tmp_path / "out" / "figure-06-gamma.svg").exists()
    assert "Not put in place: this was a quick run" in capsys.readouterr().out


def test_the_command_tells_of_failed_cells_and_interruption(
    part: Part, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        part("measure"), "measure", lambda *options: part("measure").Outcome(failed={"grid": "planted"})
    )
    assert figures_command.main(["--measure"]) == 1
    assert "FAILED grid: planted" in capsys.readouterr().err

    def interrupted(*options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(part("measure"), "measure", interrupted)
    assert figures_command.main(["--measure"]) == 130
    assert "the next --measure goes on" in capsys.readouterr().err


@pytest.mark.slow
def test_a_quick_run_writes_below_build_only(part: Part, checkout: Path, here: dict[str, Any]) -> None:
    outcome = part("measure").measure(checkout, quick=True)
    assert outcome.failed == {}
    assert outcome.kept is None
    assert outcome.file.is_relative_to(checkout / "build" / "figures" / "quick")
    figures = {point["figure"] for point in read_document(outcome.file)["series"]}
    assert figures == {"gamma", "copies", "prefix", "grid", "long", "low", "small", "rerank"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "holds a list"),
        ('{"bars": []}', "no `environment`"),
        ('{"environment": {"device": "x"}}', "no list of `bars`"),
        ('{"environment": {"device": "x"}, "bars": [], "series": [{"x": 1}]}', "point 0 of `series`"),
    ],
)
def test_a_broken_file_says_what_is_wrong_with_it(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "device.json"
    file.write_text(text)
    with pytest.raises(MeasuredFileError, match=r"device\.json.*restore the committed file") as raised:
        read_document(file)
    assert reason in str(raised.value)
    with pytest.raises(MeasuredFileError, match="no such file"):
        read_document(tmp_path / "other.json")


def test_a_whole_bench_keeps_the_series_of_the_same_machine(tmp_path: Path) -> None:
    file = tmp_path / "device.json"
    series = [{"figure": "f", "series": "s", "x": 1, "y": 2, "unit": "times", "commit": "b" * 40}]
    old = {
        "environment": {**WHERE, "commit": "b" * 40},
        "bars": [],
        "series": series,
        "roofline": {"touch": 1},
    }
    file.write_text(json.dumps(old))
    bars = [Bar("one: bar", 7.0, 6.0, "higher", "a shape")]
    document = whole_document(file, bars, WHERE)
    assert document["environment"] == WHERE
    assert [bar["name"] for bar in document["bars"]] == ["one: bar"]
    assert document["series"] == series
    assert document["roofline"] == {"touch": 1}
    assert "series" not in whole_document(file, bars, WHERE | {"torch": "2.14.0"})
    assert "series" not in whole_document(tmp_path / "none.json", bars, WHERE)
    assert "Replaced" in replace_groups(file, ["one"], bars, WHERE)
    assert read_document(file)["series"] == series
