"""The three reports: what a machine, a reviewer and a reader find in them, and when they are red."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from radixmlp.verify import environment as environment_module
from radixmlp.verify import report
from radixmlp.verify.environment import device_slug, environment, find_checkout
from radixmlp.verify.plots import speed_plots
from radixmlp.verify.records import Record
from radixmlp.verify.report import failures, number, verdict, write_report

ENVIRONMENT = {
    "commit": "abc",
    "dirty": False,
    "device": "a <fast> CPU",
    "torch": "2.13.0",
    "python": "3.11.2",
}


def record(
    kind: Any = "parity", value: float = 0.5, limit: float | None = 1.0, passed: bool = True, **more: Any
) -> Record:
    fields = {
        "model": "tiny", "workload": "synthetic", "attention": "trie-sdpa", "dtype": "float32",
        "device": "cpu", "metric": "last_hidden_state_error", "details": {},
    }  # fmt: skip
    return Record(kind=kind, value=value, limit=limit, passed=passed, **(fields | more))


def speed_record(
    attention: str, r: float, value: float, prefix: int | None = None, model: str = "tiny"
) -> Record:
    details = {"q20": value * 0.9, "q80": value * 1.2, "r": r, "ideal": r * 0.9,
               "share_of_ideal": value / (r * 0.9), "prefix_length": prefix, "tokens": 4096,
               "fastest_dense": "dense-sdpa"}  # fmt: skip
    return record(
        "speed", value, 0.9, value >= 0.9, attention=attention, model=model, metric="speedup", details=details
    )


def mixed_records() -> list[Record]:
    speeds = [speed_record(a, r, 0.8 * r, prefix=p) for a in ("scatter-sdpa", "trie-sdpa", "prefix-kv")
              for r, p in ((1.5, 64), (3.0, 256), (6.0, 1024))]  # fmt: skip
    return [
        record(),
        record("compression", 3.0, 3.0),
        *speeds,
        record("memory", 0.3, 1.05, metric="peak_memory_ratio"),
    ]


class TextOf(HTMLParser):
    """The text of a page in order, and the addresses it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.loads: list[str] = []
        self.feed(page)

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object", "embed"):
            self.loads.append(tag)
        self.loads += [value or "" for name, value in attrs if name == "src"]

    @property
    def joined(self) -> str:
        return " ".join(" ".join(self.text).split())


def page_of(tmp_path: Path, records: list[Record]) -> TextOf:
    return TextOf(write_report(tmp_path, ENVIRONMENT, records)["html"].read_text())


def test_json_is_the_environment_and_the_records(tmp_path: Path) -> None:
    records = mixed_records()
    paths = write_report(tmp_path / "new" / "folder", ENVIRONMENT, records)
    assert {name: path.name for name, path in paths.items()} == {
        "json": "report.json", "md": "report.md", "html": "report.html",
    }  # fmt: skip
    document = json.loads(paths["json"].read_text())
    assert set(document) == {"environment", "records"}
    assert document["environment"] == ENVIRONMENT
    keys = [
        "kind",
        "model",
        "workload",
        "attention",
        "dtype",
        "device",
        "metric",
        "value",
        "limit",
        "passed",
        "details",
    ]
    assert [list(entry) for entry in document["records"]] == [keys] * len(records)
    assert [entry["value"] for entry in document["records"]] == [r.value for r in records]


def test_numbers_json_cannot_hold_become_null(tmp_path: Path) -> None:
    broken = record(
        value=math.nan, passed=False, details={"worst": math.inf, "row": 3, "got": numpy.float32(2)}
    )
    text = write_report(tmp_path, ENVIRONMENT, [broken])["json"].read_text()
    entry = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))["records"][0]
    assert entry["value"] is None
    assert entry["passed"] is False
    assert entry["details"]["worst"] is None
    assert entry["details"]["row"] == 3


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_verdict_stands_first_and_failures_before_everything_else(tmp_path: Path, suffix: str) -> None:
    bad = record(value=7.25, limit=1.0, passed=False, model="broken-model", details={"row": 41})
    text = write_report(tmp_path, ENVIRONMENT, [*mixed_records(), bad])[suffix].read_text()
    body = TextOf(text).joined if suffix == "html" else text
    assert body.lower().index("failed") < body.index("Failed checks") < body.index("broken-model")
    assert body.index("broken-model") < body.index("Compression:")
    assert "row=41" in body
    assert "7.25" in body
    parity = body[body.index("Parity:") :]
    assert parity.index("broken-model") < parity.index("tiny")


def test_a_green_report_names_no_failure(tmp_path: Path) -> None:
    page = page_of(tmp_path, mixed_records())
    assert "Passed: radixmlp verify" in page.joined
    assert "Failed checks" not in page.joined
    assert "# radixmlp verify: passed" in (tmp_path / "report.md").read_text()


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path, mixed_records())
    assert page.loads == []
    source = (tmp_path / "report.html").read_text()
    fetched = re.findall(r"(?:url\(|@import)\s*['\"]?(?!#)([^)'\"]*)", source)
    assert fetched == []


def test_text_of_others_is_escaped(tmp_path: Path) -> None:
    hostile = record(model="<script>alert(1)</script>", workload="a|b", details={"x": "<b>"}, passed=False)
    page = page_of(tmp_path, [hostile])
    assert "script" not in page.loads
    assert "<script>alert(1)</script>" in page.joined
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| failed")]
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 11


@pytest.mark.parametrize(
    ("records", "green"),
    [
        ([], False),
        ([record(limit=None)], False),  # nothing judged, nothing proven
        ([record()], True),
        ([record(), record(limit=None)], True),
        ([record(), record(passed=False)], False),
        ([record(value=math.nan, passed=True)], False),
        ([record(value=math.inf, passed=True)], False),
    ],
)
def test_verdict(records: list[Record], green: bool) -> None:
    assert verdict(records) is green


@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_every_failure_is_kept(outcomes: list[bool]) -> None:
    records = [record(passed=passed) for passed in outcomes]
    assert len(failures(records)) == outcomes.count(False)
    assert verdict(records) == all(outcomes)


def test_plots_show_ideal_and_units() -> None:
    plots = speed_plots(mixed_records())
    assert [plot.title for plot in plots] == [
        "Speed-up against compression ratio", "Speed-up against prefix length: tiny, float32",
    ]  # fmt: skip
    for plot in plots:
        root = ElementTree.fromstring(plot.svg)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        text = " ".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
        for needed in (
            "trie-sdpa",
            "scatter-sdpa",
            "ideal, trie-sdpa",
            "speed-up over the fastest dense (times)",
        ):
            assert needed in text, needed
    assert "tokens" in plots[0].svg
    assert "shared prefix (tokens)" in plots[1].svg


def test_plots_give_every_backend_another_look() -> None:
    from radixmlp.verify.plots import _styles_of

    names = ["trie-sdpa", "trie-flex", "scatter-sdpa", "prefix-kv", "mine", "yours"]
    styles = _styles_of([speed_record(name, 2.0, 1.5) for name in names])
    assert len({style.color for style in styles.values()}) == len(names)
    assert len({style.marker for style in styles.values()}) == len(names)


def test_no_speed_no_plots() -> None:
    assert speed_plots([record()]) == []
    dense_only = [speed_record("dense-padded", 2.0, 1.0)]
    assert speed_plots(dense_only) == []
    no_details = [record("speed", 2.0, None, metric="latency_ms")]
    assert speed_plots(no_details) == []


def bars_folder(root: Path, text: str) -> None:
    folder = root / "paper_figures" / "measured"
    folder.mkdir(parents=True)
    (folder / "machine.json").write_text(text)


def test_committed_bars_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars = [
        {
            "name": "good bar",
            "value": 7.0,
            "limit": 6.5,
            "better": "higher",
            "passed": True,
            "quantiles": [6.8, 7.1],
        },
        {"name": "bad bar", "value": 0.5, "limit": 0.25, "better": "lower", "passed": False},
    ]
    bars_folder(tmp_path, json.dumps({"environment": {"device": "Abacus"}, "bars": bars}))
    monkeypatch.setattr(report, "find_checkout", lambda: tmp_path)
    page = page_of(tmp_path / "out", [record()])
    for needed in ("Abacus", "good bar", "≥ 6.5", "6.8–7.1", "bad bar", "≤ 0.25"):
        assert needed in page.joined
    source = (tmp_path / "out" / "report.html").read_text()
    assert "width: 53.8%" in source  # 7.0 / 6.5 of the half that the limit stands for
    assert "width: 25.0%" in source


def test_an_unreadable_bar_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars_folder(tmp_path, '{"bars": [')
    monkeypatch.setattr(report, "find_checkout", lambda: tmp_path)
    assert "machine.json cannot be read: JSONDecodeError" in page_of(tmp_path / "out", [record()]).joined


def test_without_bars_the_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_checkout", lambda: None)
    assert "There are none: radixmlp bench" in page_of(tmp_path, [record()]).joined


def test_environment_says_what_ran() -> None:
    where = environment("cpu")
    assert where["torch"] == torch.__version__.split("+")[0] or where["torch"] == torch.__version__
    assert where["transformers"] == transformers.__version__
    assert where["numpy"] == numpy.__version__
    assert {"commit", "dirty", "device", "triton", "python"} <= set(where)
    assert re.search(r", \d+ cores?$", where["device"])
    if find_checkout() is not None:
        assert re.fullmatch(r"[0-9a-f]{40}", where["commit"])
        assert isinstance(where["dirty"], bool)


def test_a_wheel_in_somebody_elses_repository_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "radixmlp" / "verify" / "environment.py"
    installed.parent.mkdir(parents=True)
    installed.touch()
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(environment_module, "__file__", str(installed))
    assert find_checkout() is None
    where = environment("cpu")
    assert where["commit"] is None
    assert where["dirty"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(6.98123, "6.981"), (0.0, "0"), (1e-5, "1.00e-05"), (12, "12"), (73728, "73728"),
     (123456.7, "123457"), (2.5e9, "2.50e+09"), (None, "–"), ("dense", "dense"), (math.nan, "nan"),
     (math.inf, "inf"), (True, "True")],
)  # fmt: skip
def test_numbers_as_people_write_them(value: Any, text: str) -> None:
    assert number(value) == text


def test_slugs() -> None:
    assert device_slug("AMD EPYC (Turin), 2 cores") == "amd-epyc-turin-2-cores"
