"""Comparing measurements: the rule, claims that break, and the exit status; with planted changes."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmlp.verify import figures_command

Part = Callable[[str], ModuleType]
Change = Callable[[dict[str, Any]], None]


def read(part: Part, document: dict[str, Any]) -> Any:
    return part("data").Measured.of(document, Path("made-up.json"))


def states(part: Part, new: dict[str, Any], old: dict[str, Any]) -> dict[str, str]:
    """What differs, and how."""
    found = part("compare").compare(read(part, new), read(part, old))
    return {one.name: one.state for one in found if one.state != "agrees"}


def point(document: dict[str, Any], figure: str, series: str, x: float) -> dict[str, Any]:
    return next(p for p in document["series"] if (p["figure"], p["series"], p["x"]) == (figure, series, x))


def scale(found: dict[str, Any], factor: float) -> None:
    for key in ("y", "q20", "q80"):
        found[key] *= factor


def bar(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in document["bars"] if row["name"] == name)


def test_a_measurement_agrees_with_itself_and_breaks_nothing(part: Part, document: dict[str, Any]) -> None:
    for row in document["bars"]:
        row["passed"] = True
    assert states(part, document, document) == {}
    assert part("compare").broken_claims(read(part, document), read(part, document)) == []


@pytest.mark.parametrize(
    ("factor", "state"), [(1.01, None), (1.09, None), (0.92, None), (1.2, "better"), (0.8, "worse")]
)
def test_a_point_that_moves_beyond_the_rule_is_named(
    part: Part, document: dict[str, Any], factor: float, state: str | None
) -> None:
    new = copy.deepcopy(document)
    scale(point(new, "grid", "trie", 2), factor)
    expected = {} if state is None else {"grid: trie at 2 (times)": state}
    assert states(part, new, document) == expected


def test_less_is_better_for_times_shares_and_memory(part: Part, document: dict[str, Any]) -> None:
    new = copy.deepcopy(document)
    scale(point(new, "copies", "copy", 1), 0.5)
    scale(point(new, "memory", "trie", 0), 2)
    bar(new, "qwen3-8b: trie's peak memory over dense")["value"] *= 0.5
    assert states(part, new, document) == {
        "copies: copy at 1 (us)": "better",
        "memory: trie at 0 (share)": "worse",
        "bar: qwen3-8b: trie's peak memory over dense": "better",
    }


def test_counts_must_be_equal(part: Part, document: dict[str, Any]) -> None:
    new = copy.deepcopy(document)
    point(new, "gamma", "few-shot", 2)["y"] *= 1.0001
    assert states(part, new, document) == {"gamma: few-shot at 2 (share)": "worse"}


def test_wide_spreads_agree_where_the_medians_lie_in_both(part: Part, document: dict[str, Any]) -> None:
    new = copy.deepcopy(document)
    for found, y in ((point(new, "grid", "trie", 2), 3.0), (point(document, "grid", "trie", 2), 4.0)):
        found |= {"y": y, "q20": 2.9, "q80": 4.1}
    assert states(part, new, document) == {}
    point(new, "grid", "trie", 2)["q80"] = 3.9
    assert states(part, new, document) == {"grid: trie at 2 (times)": "worse"}


def test_what_only_one_has_is_named(part: Part, document: dict[str, Any]) -> None:
    new = copy.deepcopy(document)
    gone = point(new, "grid", "trie", 2)
    new["series"].remove(gone)
    assert states(part, new, document) == {"grid: trie at 2 (times)": "gone"}
    assert states(part, document, new) == {"grid: trie at 2 (times)": "new"}


@given(
    st.tuples(st.floats(0.1, 10), st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.floats(0.1, 10), st.floats(0, 1), st.floats(0, 1)),
)
def test_the_rule_has_no_sides(part: Part, one: tuple[float, ...], other: tuple[float, ...]) -> None:
    def made(values: tuple[float, ...]) -> Any:
        y, below, above = values
        return part("data").Point("grid", "trie", 0, y, "times", "", y - below, y + above)

    agree = part("compare").agree
    assert agree(made(one), made(other)) == agree(made(other), made(one))
    assert agree(made(one), made(one))


def swap_headline(document: dict[str, Any]) -> None:
    trie, scatter = (bar(document, f"qwen3-0.6b: {path} over dense") for path in ("trie", "scatter"))
    trie["value"], scatter["value"] = scatter["value"], trie["value"]


def slow_trie(document: dict[str, Any]) -> None:
    scale(point(document, "prefix", "qwen3-4b trie", 512), 0.5)


def slow_trie_far_out(document: dict[str, Any]) -> None:
    scale(point(document, "long", "trie", 8192), 0.5)


def no_growth(document: dict[str, Any]) -> None:
    for found in document["series"]:
        if found["series"].startswith("qwen3-0.6b") and found["x"] == 2048:
            scale(found, 0.1)


def document_first(document: dict[str, Any]) -> None:
    point(document, "gamma", "rerank, query first", 0)["y"] = 0.95


def slow_auto(document: dict[str, Any]) -> None:
    scale(point(document, "low", "auto", 0), 0.9)


def fat_trie(document: dict[str, Any]) -> None:
    scale(point(document, "memory", "trie", 0), 3)


def missed_bar(document: dict[str, Any]) -> None:
    bar(document, "qwen3-8b: trie over dense")["passed"] = False


def unmeasured_bar(document: dict[str, Any]) -> None:
    document["bars"].remove(bar(document, "qwen3-8b: trie over dense"))


def unmeasured_series(document: dict[str, Any]) -> None:
    document["series"] = [p for p in document["series"] if p["figure"] != "long"]


PLANTED: dict[Change, str] = {
    swap_headline: "trie > the paper's path > dense at 512 + 64",
    slow_trie: "at every measured prefix",
    slow_trie_far_out: "at every measured context length",
    no_growth: "grows with the prefix",
    document_first: "query first shares more",
    slow_auto: "auto is not slower",
    fat_trie: "no more memory",
    missed_bar: "bar: qwen3-8b: trie over dense",
    unmeasured_bar: "bar: qwen3-8b: trie over dense",
    unmeasured_series: "at every measured context length",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_change_breaks_its_claim(
    part: Part,
    document: dict[str, Any],
    plant: Change,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for row in document["bars"]:
        row["passed"] = True
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(document))
    assert figures_command.main(["--compare", str(old), "--against", str(old)]) == 0
    assert "Every claim holds." in capsys.readouterr().out
    plant(document)
    new.write_text(json.dumps(document))
    assert figures_command.main(["--compare", str(new), "--against", str(old)]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert PLANTED[plant] in printed.split("broken", 1)[1]


def test_claims_without_data_are_said_and_not_broken(part: Part, document: dict[str, Any]) -> None:
    document["series"] = []
    for row in document["bars"]:
        row["passed"] = True
    assert part("compare").broken_claims(read(part, document), read(part, document)) == []
    verdicts = part("compare").verdicts(read(part, document))
    assert sum(verdict.holds is None for verdict in verdicts) >= 5


@pytest.mark.parametrize("name", ["published", "predicted"])
def test_published_and_predicted_claims_can_break(
    part: Part, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    claims = part("compare_claims")
    if name == "published":
        titles = part("data_models").TITLES.values()
        monkeypatch.setattr(
            part("published"),
            "synthetic",
            lambda: [type("Row", (), {"model": title, "speedup": 2.0}) for title in titles],
        )
    else:
        monkeypatch.setattr(claims, "predicted_speedup", lambda device, shape, work, path: 2.0)
    verdicts = part("compare").verdicts(read(part, document))
    assert [v.holds for v in verdicts if v.name.startswith(name)] == [False]


def test_other_versions_are_named(part: Part, document: dict[str, Any]) -> None:
    new = copy.deepcopy(document)
    new["environment"] |= {"torch": "9.9", "commit": "f" * 40}
    assert part("compare").incomparable(read(part, new), read(part, document)) == ["torch"]


def test_what_cannot_be_read_is_a_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.json"
    file.write_text('{"environment": {"device": "x"}, "bars": [')
    assert figures_command.main(["--compare", str(file)]) == 2
    assert "line 1: not JSON" in capsys.readouterr().err
    assert figures_command.main(["--compare", str(tmp_path / "none.json")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_committed_measurement_holds_its_claims(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar that is missed there is shown, as it is in the README."""
    from radixmlp.verify.measured import HOUSE_DEVICE, measured_file

    file = measured_file(root, HOUSE_DEVICE)
    missed = [row["name"] for row in json.loads(file.read_text())["bars"] if not row["passed"]]
    assert figures_command.main(["--compare", str(file), "--against", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("missed before, too: bar:") == len(missed)


def test_a_bar_missed_before_is_no_claim_and_one_missed_anew_is(part: Part, document: dict[str, Any]) -> None:
    for row in document["bars"]:
        row["passed"] = True
    new = copy.deepcopy(document)
    bar(new, "qwen3-8b: trie over dense")["passed"] = False
    compare = part("compare")
    broken = [v.name for v in compare.broken_claims(read(part, new), read(part, document))]
    assert broken == ["bar: qwen3-8b: trie over dense"]
    assert [v.name for v in compare.broken_claims(read(part, new), None)] == broken
    assert compare.broken_claims(read(part, new), read(part, new)) == []
    assert [v.name for v in compare.still_missed(read(part, new), read(part, new))] == broken


def test_the_committed_file_is_that_of_the_last_commit(
    part: Part, document: dict[str, Any], tmp_path: Path
) -> None:
    """Not the working tree's, which a new measurement has replaced; outside git the file itself."""
    file = tmp_path / "paper_figures" / "measured" / "abacus.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(document))
    committed = part("compare").committed
    assert committed(tmp_path, file).device == document["environment"]["device"]
    name = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    device = document["environment"]["device"]
    document["environment"]["device"] = "Another, 2 cores"
    file.write_text(json.dumps(document))
    assert committed(tmp_path, file).device == device
