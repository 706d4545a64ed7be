"""The figures: each draws from full, partial and no data, says what is missing, and gives the same bytes again."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from radixmlp.verify import checkout, figures_command
from radixmlp.verify.measured import MeasuredFileError

Part = Callable[[str], ModuleType]
TABLES = (2, 3)
MISSING = "not measured on this device"
NUMBERS = range(1, 11)


def data_of(part: Part, document: dict[str, Any]) -> Any:
    return part("data").Data(part("data").Measured.of(document, Path("made-up.json")))


def legend_of(figure: Any) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


@pytest.mark.parametrize("number", NUMBERS)
def test_every_figure_draws_and_names_its_kinds(part: Part, document: dict[str, Any], number: int) -> None:
    drawing = part("reproduce").draw(number, data_of(part, document))
    assert drawing.number == number
    assert (drawing.table is not None) == (number in TABLES)
    assert (drawing.figure is None) == (number in TABLES)
    for kind in ("published", "predicted", "measured"):
        assert kind in drawing.caption.lower()
    if drawing.figure is not None:
        labels = legend_of(drawing.figure)
        assert len(labels) == len(set(labels))
        assert not any(MISSING in label or "not calibrated" in label for label in labels)
        for axes in drawing.figure.axes:
            assert axes.get_xlabel() or all(label.get_text() for label in axes.get_xticklabels())


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_not_measured_is_said(part: Part, document: dict[str, Any], number: int) -> None:
    document |= {"series": [], "bars": [], "roofline": None}
    for data in (data_of(part, document), part("data").Data(None)):
        drawing = part("reproduce").draw(number, data)
        if number == 5:  # nothing of it can be measured without vLLM
            assert "not run by this project" in drawing.caption
        elif drawing.table is not None:
            assert any(MISSING in cell for row in drawing.table.rows for cell in row)
        else:
            assert any(MISSING in label for label in legend_of(drawing.figure))
        assert "Nothing in it is measured by this project." in drawing.caption


def test_a_bar_that_came_out_wrong_is_not_drawn(part: Part, document: dict[str, Any]) -> None:
    for row in document["bars"]:
        row["wrong"] = "planted"
    drawing = part("reproduce").draw(10, data_of(part, document))
    assert any(MISSING in label for label in legend_of(drawing.figure))


def test_captions_name_device_and_commit(part: Part, document: dict[str, Any]) -> None:
    reproduce, data = part("reproduce"), data_of(part, document)
    assert "AMD EPYC, 2 cores (commit made up)" in reproduce.draw(8, data).caption
    bar = next(row for row in document["bars"] if row["name"].startswith("training:"))
    commit = (bar.get("commit") or document["environment"]["commit"])[:10]
    assert f"AMD EPYC, 2 cores (commit {commit})" in reproduce.draw(10, data).caption


def test_without_a_calibration_the_legend_says_so(part: Part, document: dict[str, Any]) -> None:
    document["roofline"] = None
    labels = legend_of(part("reproduce").draw(8, data_of(part, document)).figure)
    assert "predicted: this CPU, from its calibration: not calibrated yet" in labels


def test_a_gpu_stands_beside_the_cpu_where_one_was_measured(part: Part, document: dict[str, Any]) -> None:
    def bar(name: str, value: float, **details: float) -> dict[str, Any]:
        rest = {"limit": None, "better": "higher", "passed": True, "shape": "", "ideal": None, "wrong": None}
        return {"name": name, "value": value, "quantiles": [0.9 * value, value], "details": details, **rest}

    where = {"device": "NVIDIA H200", "capability": "9.0", "commit": "c" * 40}
    shape = "[16000, 1024]"
    bars = [
        bar("qwen3-8b: trie over dense at prefix 2048", 6.6),
        bar(f"copies: gather_rows {shape} over index_select", 2.0, gather_rows_us=25.0),
        bar(f"copies: gather_rows {shape}, share of copy bandwidth", 0.91),
    ]
    measured = part("data").Measured
    gpu = measured.of({"environment": where, "bars": bars}, Path("nvidia-h200.json"))
    data = part("data").Data(measured.of(document, Path("made-up.json")), [gpu])
    drawing = part("reproduce").draw(1, data)
    labels = legend_of(drawing.figure)
    assert "measured: the trie, NVIDIA H200" in labels
    assert "the paper's path on a GPU: not measured yet" in labels
    assert "NVIDIA H200 (commit cccccccccc)" in drawing.caption
    rows = part("reproduce").draw(3, data).table.rows
    assert rows[0][-2:] == ["25 µs (NVIDIA H200)", "91%"]
    assert rows[1][-2:] == ["not measured: no GPU"] * 2


@pytest.mark.parametrize("number", [4, 8])
def test_the_same_data_give_the_same_bytes(
    part: Part, document: dict[str, Any], tmp_path: Path, number: int
) -> None:
    reproduce = part("reproduce")
    written = []
    for folder in ("one", "two"):
        drawing = reproduce.draw(number, data_of(part, document))
        written.append({p.name: p.read_bytes() for p in reproduce.write(drawing, tmp_path / folder)})
    assert len(written[0]) == 3
    assert written[0] == written[1]


def test_the_page_shows_what_was_drawn(part: Part, document: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    page = part("reproduce").reproduce(data_of(part, document), tmp_path / "out", [3, 8], said.append)
    text = page.read_text(encoding="utf-8")
    links = re.findall(r'(?:href|src)="([^"]+)"', text)
    assert {link.rsplit(".", 1)[1] for link in links} == {"svg", "pdf", "png", "md", "csv", "tex"}
    for link in links:
        assert (page.parent / link).stat().st_size > 0
    assert text.count("<figcaption>") == len(said) == 2
    ElementTree.parse(page.parent / "figure-08-grid.svg")
    ElementTree.fromstring(
        re.sub(r"<!doctype html>|<meta [^>]*>|(?<=alt)(\"[^\"]*\")>|<img [^>]*>", "", text)
    )


def test_tables_say_the_same_in_each_form(part: Part) -> None:
    table = part("style_table").Table(("a & b", "50%"), [["x_1", "1,5 | 2"], ["<b>", "3×"]])
    assert list(csv.reader(io.StringIO(table.csv()))) == [["a & b", "50%"], ["x_1", "1,5 | 2"], ["<b>", "3×"]]
    assert table.markdown().splitlines()[2] == "| x_1 | 1,5 \\| 2 |"
    assert r"a \& b & 50\% \\" in table.latex()
    assert r"x\_1 & 1,5 | 2 \\" in table.latex()
    assert "&lt;b&gt;" in table.html()
    with pytest.raises(ValueError, match="row 0 has 1 cells"):
        part("style_table").Table(("a", "b"), [["x"]])


def test_each_script_has_a_main_and_is_short(part: Part, root: Path) -> None:
    for name in part("reproduce").FIGURES.values():
        lines = (root / "paper_figures" / "figures" / f"{name}.py").read_text().splitlines()
        assert len(lines) < 150
        assert callable(part(f"figures.{name}").main)


def test_the_readme_pictures_are_drawn_from_the_committed_data(
    part: Part, root: Path, tmp_path: Path
) -> None:
    pinned = re.search(r"^matplotlib==(\S+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    installed = importlib.metadata.version("matplotlib")
    if pinned is None or pinned[1] != installed:
        pytest.skip(f"matplotlib {installed} draws other bytes than the pinned one")
    drawn = part("reproduce_readme").pictures(root, tmp_path)
    assert [path.name for path in drawn] == ["prefix.svg", "grid.svg", "measured.svg"]
    for path in drawn:
        committed = root / "paper_figures" / "pictures" / path.name
        assert committed.read_bytes() == path.read_bytes(), "redraw: radixmlp figures --readme"


def test_measurements_are_chosen_by_device(part: Part, document: dict[str, Any], tmp_path: Path) -> None:
    import json

    folder = tmp_path / "paper_figures" / "measured"
    folder.mkdir(parents=True)
    data = part("data")
    names = {"AMD EPYC, 2 cores": None, "Abacus, 2 cores": None, "NVIDIA H200": "9.0"}
    for device, capability in names.items():
        document["environment"] |= {"device": device, "capability": capability}
        slug = re.sub(r"[^a-z0-9]+", "-", device.lower())
        (folder / f"{slug}.json").write_text(json.dumps(document))
    assert data.load_data(tmp_path).cpu.device == "AMD EPYC, 2 cores"
    for asked in ("abacus-2-cores", "Abacus, 2 cores"):
        loaded = data.load_data(tmp_path, asked)
        assert loaded.cpu.device == "Abacus, 2 cores"
        assert [gpu.device for gpu in loaded.gpus] == ["NVIDIA H200"]
    with pytest.raises(MeasuredFileError, match=r"there: abacus-2-cores, amd-epyc-2-cores, nvidia-h200"):
        data.load_data(tmp_path, "Zuse Z3")
    with pytest.raises(MeasuredFileError, match="is of a GPU"):
        data.load_data(tmp_path, "NVIDIA H200")


def test_the_command_draws_one_figure(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures_command.main(["--only", "6", "--out", str(tmp_path / "out")]) == 0
    assert "index.html" in capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["figure-06-gamma.pdf", "figure-06-gamma.png", "figure-06-gamma.svg", "index.html"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "11"], "there is no figure 11"),
        (["--device", "zuse-z3"], "zuse-z3 has no measurements"),
        (["--quick"], "go with --measure"),
        (["--against", "x"], "goes with --compare"),
        (["--measure", "--device", "x"], "measures this machine"),
    ],
)
def test_wrong_use_is_told(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = figures_command.main(arguments)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    assert said in capsys.readouterr().err


def test_outside_a_checkout_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkout, "find_checkout", lambda: None)
    assert figures_command.main([]) == 2
    assert "works on a checkout" in capsys.readouterr().err


@pytest.mark.slow
def test_all_of_it_takes_less_than_a_minute(tmp_path: Path) -> None:
    started = time.process_time()
    assert figures_command.main(["--out", str(tmp_path / "out")]) == 0
    assert time.process_time() - started < 60
    assert len(list((tmp_path / "out").iterdir())) == 8 * 3 + 2 * 3 + 1
