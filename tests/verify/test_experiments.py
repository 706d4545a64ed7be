"""`radixmlp experiment`: a new one is green, a wrong one is red and never timed, a broken one names its line."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import radixmlp
from radixmlp.verify import checkout
from radixmlp.verify.checkout import load_module
from radixmlp.verify.experiments import files, planting, trial
from radixmlp.verify.experiments.command import main, markdown_table
from radixmlp.verify.experiments.faults import FAULTS, GRADIENT, WINDOW
from radixmlp.verify.experiments.files import PACKAGE, ExperimentError, load_experiment, summaries
from radixmlp.verify.experiments.result import document_of
from radixmlp.verify.experiments.trial import TrialSettings

ROOT = Path(__file__).parents[2]
TINY = ("--quick", "--model", "tiny-qwen3", "--workload", "synthetic:24+8x4")


@pytest.fixture
def root(tmp_path):
    """An empty folder of experiments; what is loaded from it is forgotten again."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if name.startswith(PACKAGE):
            del sys.modules[name]


@pytest.fixture
def small(monkeypatch):
    """One parity cell, one dtype of faults, and memory without a process for each variant."""
    monkeypatch.setattr(TrialSettings, "dtypes", ("float32",))
    monkeypatch.setattr(TrialSettings, "shapes", ("tree",))
    monkeypatch.setattr(TrialSettings, "rounds", 1)
    monkeypatch.setattr(trial, "FEATURE_MODELS", {})
    monkeypatch.setattr(planting, "DTYPES", ("float32",))

    def memory_rows(model, workload, names, dtype, device, progress, folder):
        labels = {"model": model, "workload": workload.name, "dtype": dtype}
        variants = ["trie-sdpa", *names]
        return [{**labels, "variant": name, "peak_mb": 2.0, "over_dense": 1.0} for name in variants]

    monkeypatch.setattr(trial, "memory_rows", memory_rows)


@pytest.fixture
def untimed(monkeypatch):
    """Timing anything is an error."""

    def refuse(*arguments):
        raise AssertionError("timed")

    monkeypatch.setattr(trial, "speed_rows", refuse)
    monkeypatch.setattr(trial, "memory_rows", refuse)


def write(root, name, source, question='QUESTION = "Does it?"'):
    """An experiment of which only `experiment.py` matters."""
    (root / name).mkdir()
    (root / name / "experiment.py").write_text(f"{question}\n{source}\n")


def edited(root, name, *changes):
    """A new experiment with its source changed: (old, new) pairs, each of which must be there."""
    assert main(["new", name], root) == 0
    file = root / name / "experiment.py"
    text = file.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text)


def result_of(root, name):
    folder = root.parent / "build" / "experiments" / name
    return json.loads((folder / "result.json").read_text()), (folder / "result.md").read_text()


def test_a_new_experiment_is_green_from_the_start(root, small, monkeypatch, capsys):
    assert main(["new", "fresh_idea"], root) == 0
    written = {path.name for path in (root / "fresh_idea").iterdir()}
    assert written == {"README.md", "experiment.py", "test_fresh_idea.py"}
    assert main(["run", "fresh_idea", *TINY], root) == 0
    document, text = result_of(root, "fresh_idea")
    assert document["trial"]["passed"]
    assert document["quick"]
    assert {fault["fault"] for fault in document["trial"]["faults"]} == set(FAULTS)
    assert all(fault["caught_by"] for fault in document["trial"]["faults"])
    assert {row["variant"] for row in document["trial"]["speed"]} == {
        "dense-padded",
        "dense-sdpa",
        "scatter-sdpa",
        "trie-sdpa",
        "fresh-idea",
    }
    out = capsys.readouterr().out
    assert re.search(r"fresh-idea: parity green \(\d+ checks\), 9 of 9 planted faults caught; ", out)
    assert "## Planted faults" in text
    assert "a quick run, no evidence" in text
    assert "fresh-idea" not in radixmlp.attention_backends()
    monkeypatch.setattr(files, "experiments_folder", lambda *_: root)
    module = load_module(root / "fresh_idea", "radixmlp_experiment_fresh_idea", "test_fresh_idea")
    module.test_same_values_and_gradients_as_the_reference()


def test_a_whole_run_writes_beside_the_readme_and_any_other_does_not(root):
    write(root, "where_to", "def measure(quick, progress):\n    return {'quick': quick}")
    (root / "where_to" / "result.json").write_text("{}")
    assert main(["run", "where_to", "--quick"], root) == 0
    assert (root / "where_to" / "result.json").read_text() == "{}"
    assert result_of(root, "where_to")[0]["measured"] == {"quick": True}
    assert main(["run", "where_to"], root) == 0
    assert json.loads((root / "where_to" / "result.json").read_text())["measured"] == {"quick": False}
    assert main(["run", "where_to", "--out", str(root / "elsewhere")], root) == 0
    assert (root / "elsewhere" / "result.md").is_file()


@pytest.mark.parametrize(
    "name", ["Upper", "two words", "hy-phen", "1st", "", "_x", "../x", "a" * 41, "dense_sdpa", "auto"]
)
def test_names_that_cannot_be_are_refused(root, name, capsys):
    assert main(["new", name], root) == 2
    assert list(root.iterdir()) == []
    assert "radixmlp experiment: " in capsys.readouterr().err


def test_an_existing_folder_is_never_overwritten(root, capsys):
    (root / "taken").mkdir()
    (root / "taken" / "README.md").write_text("mine")
    assert main(["new", "taken"], root) == 2
    assert (root / "taken" / "README.md").read_text() == "mine"
    assert len(list((root / "taken").iterdir())) == 1
    assert "choose another name" in capsys.readouterr().err


@pytest.mark.parametrize("line", [["list"], ["new", "x"], ["run", "x"]])
def test_outside_a_checkout_the_commands_say_so(monkeypatch, line, capsys):
    monkeypatch.setattr(checkout, "find_checkout", lambda: None)
    assert main(line) == 2
    assert f"radixmlp experiment {line[0]} works on a checkout" in capsys.readouterr().err


def some_slow(names, *quick):
    """All names, those that are not named again marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


SEEN = "(rows[:, None] < plan.subtree_end)"
WRONG = {
    "sees_the_future": ("(rows <= rows[:, None])", "(rows <= rows[:, None] + 1)"),
    "sees_a_cousin": (SEEN, "(rows[:, None] < plan.subtree_end + 1)"),
    "forgets_roots": (SEEN, f"{SEEN} & ((plan.parent >= 0) | (rows == rows[:, None]))"),
    "all_zeros": ("weights, v.to(wide))", "weights * 0, v.to(wide))"),
    "writes_k": ("        rows = torch", "        k.detach().add_(0.1)\n        rows = torch"),
    "wrong_dtype": (".to(q.dtype)\n", ".double()\n"),
    "too_few_rows": (".to(q.dtype)\n", ".to(q.dtype)[1:]\n"),
    "raises": ("        rows = torch", "        raise RuntimeError('no')\n        rows = torch"),
}


@pytest.mark.parametrize("name", some_slow(WRONG, "sees_the_future", "writes_k"))
def test_a_wrong_backend_is_red_and_nothing_is_timed_or_written(root, small, untimed, name, capsys):
    edited(root, name, WRONG[name])
    assert main(["run", name, *TINY], root) == 1
    printed = capsys.readouterr()
    assert "parity RED" in printed.out
    assert "NOT PASSED" in printed.err
    assert not (root.parent / "build").exists()
    if name == "writes_k":
        assert "wrote into its input k" in printed.out


def test_a_wrong_gradient_is_red(root, small, untimed, capsys):
    edited(root, "no_gradient", ("k.to(wide)", "k.to(wide).detach()"))
    assert main(["run", "no_gradient", *TINY], root) == 1
    assert "lifted_gradient_error" in capsys.readouterr().out


@pytest.mark.parametrize("fault", some_slow(FAULTS, WINDOW, GRADIENT))
def test_a_fault_that_parity_does_not_see_makes_the_run_red(root, small, untimed, monkeypatch, fault, capsys):
    """Parity made blind to one planted fault."""

    def blind(check):
        def checked(*arguments):
            found = check(*arguments)
            return [
                SimpleNamespace(**{**vars(record), "passed": True})
                if record.attention.endswith(fault)
                else record
                for record in found
            ]

        return checked

    monkeypatch.setattr(planting, "check_parity", blind(planting.check_parity))
    monkeypatch.setattr(planting, "check_gradients", blind(planting.check_gradients))
    name = f"blind_{list(FAULTS).index(fault)}"
    edited(root, name)
    assert main(["run", name, *TINY], root) == 1
    assert f"faults MISSED: {fault}" in capsys.readouterr().out


def test_what_a_backend_refuses_is_reported_not_judged(root, small, monkeypatch, capsys):
    monkeypatch.setattr(trial, "FEATURE_MODELS", {"tiny-mistral": "sliding window"})
    refusal = (
        "if spec.sliding_window is not None or training:\n            return 'no windows, no training'\n"
    )
    edited(root, "narrow_minded", ("if spec.dropout > 0", f"{refusal}        if spec.dropout > 0"))
    assert main(["run", "narrow_minded", *TINY], root) == 0
    document, text = result_of(root, "narrow_minded")
    refused = document["trial"]["refused"]["narrow-minded"]
    assert refused.keys() == {"sliding window", "training"}
    assert "no windows, no training" in text
    remarks = {each["fault"] for each in document["trial"]["faults"] if each["remark"]}
    assert remarks == {WINDOW, GRADIENT}
    assert "7 of 7 planted faults" in capsys.readouterr().out


def test_a_backend_that_does_not_serve_this_device_is_not_run(root, small, untimed, capsys):
    edited(root, "elsewhere", ("if spec.dropout > 0", 'return "needs a GPU"\n        if spec.dropout > 0'))
    assert main(["run", "elsewhere", *TINY], root) == 0
    assert "elsewhere: not run here: needs a GPU" in capsys.readouterr().out


BROKEN = {
    "syntax": ("def measure(", r"experiment\.py, line 2: SyntaxError"),
    "unknown_name": ("x = 1\nprint(y)", r"experiment\.py, line 3: NameError: name 'y'"),
    "nothing_to_run": ("x = 1", r"needs backends\(\) that returns some, or measure\(\)"),
    "no_backends": ("def backends():\n    return []", r"needs backends\(\) that returns some"),
    "backends_raise": (
        "def backends():\n    return 1 / 0",
        r"backends\(\) of \w+ failed: experiment\.py, line 3",
    ),
    "not_a_backend": ("def backends():\n    return [3]", "3 is no attention backend"),
    "measure_raises": (
        "def measure(quick, progress):\n    return 1 / 0",
        r"experiment\.py, line 3: ZeroDivision",
    ),
    "measure_a_list": ("def measure(quick, progress):\n    return []", "returned list: return a dict"),
    "measure_an_object": (
        "def measure(quick, progress):\n    return {'x': object()}",
        "not JSON: Object of type object",
    ),
    "report_raises": (
        "def measure(quick, progress):\n    return {}\ndef report(measured):\n    return measured['x']",
        r"report\(\) of report_raises failed: experiment\.py, line 5: KeyError",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_experiment_is_reported_by_file_and_line(root, name, capsys):
    source, message = BROKEN[name]
    write(root, name, source)
    assert main(["run", name, "--quick"], root) == (1 if "measure_" in name or "report_" in name else 2)
    assert re.search(message, capsys.readouterr().err)
    written = [path.name for path in root.parent.rglob("*.json")]
    assert written == (["unreported.json"] if name == "report_raises" else [])


def test_a_name_that_is_taken_is_refused(root, capsys):
    edited(root, "imposter", ('name = "imposter"', 'name = "trie-sdpa"'))
    assert main(["run", "imposter", *TINY], root) == 2
    assert "'trie-sdpa' is registered already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["run", "absent"], "there is no experiment 'absent'; there are: present"),
        (["run", "old"], "old has a run.py of its own"),
        (["run", "present", "--model", "nope"], "unknown model 'nope'"),
        (["run", "present", "--workload", "nope"], "unknown workload 'nope'"),
        (["run", "present", "--model", "tiny-qwen3"], "present has no backends here"),
        (["run", "unasked"], "unasked/experiment.py has no QUESTION"),
    ],
)
def test_wrong_use(root, line, message, capsys):
    write(root, "present", "def measure(quick, progress):\n    return {}")
    write(root, "unasked", "def measure(quick, progress):\n    return {}", question="")
    (root / "old").mkdir()
    (root / "old" / "run.py").write_text("")
    if line[1] == "absent":
        (root / "unasked" / "experiment.py").unlink()
    assert main(line, root) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_run_writes_nothing(root, capsys):
    write(root, "interrupted", "def measure(quick, progress):\n    raise KeyboardInterrupt")
    assert main(["run", "interrupted", "--quick"], root) == 130
    assert not (root.parent / "build").exists()


def test_list_reads_folders_without_running_them(root, capsys):
    write(root, "alive", "raise RuntimeError('not imported')")
    (root / "alive" / "README.md").write_text(
        "# Alive\n\n**Status:** measured;\nverdict: no.\n\n## Hypothesis\n"
    )
    (root / "alive" / "result.json").write_text(
        '{"environment": {"commit": "0123456789abc", "device": "cpu"}}'
    )
    write(root, "torn", "def (")
    write(root, "silent", "", question="")
    (root / "old").mkdir()
    (root / "old" / "run.py").write_text("")
    (root / "old" / "README.md").write_text("# Old one\n\n## Status\n\nWorks.\n")
    found = {each.name: each for each in summaries(root)}
    assert found["alive"].status == "measured; verdict: no."
    assert found["alive"].question == "Does it?"
    assert found["alive"].result == "0123456789 on cpu"
    assert "line 2" in found["torn"].question
    assert "no QUESTION" in found["silent"].question
    assert (found["old"].question, found["old"].status, found["old"].harness) == ("Old one", "Works.", False)
    assert main(["list"], root) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in found)
    assert main(["list", "--markdown"], root) == 0
    assert "| [`alive`](alive/README.md) | Does it? | measured; verdict: no. |" in capsys.readouterr().out


def test_numbers_that_json_lacks_become_null():
    document = document_of("x", "?", True, {}, None, {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert document["measured"] == {"a": None, "b": [None, 1.5]}


def test_an_experiment_is_loaded_once_with_its_own_modules(root):
    write(root, "pair", "from .other import X")
    (root / "pair" / "other.py").write_text("X = 3")
    assert load_experiment("pair", root=root) is load_experiment("pair", root=root)
    assert load_experiment("pair", "other", root=root).X == 3
    with pytest.raises(ExperimentError, match=r"pair has no more\.py"):
        load_experiment("pair", "more", root=root)


SHIPPED = [each for each in summaries(ROOT / "experiments") if each.harness]


@pytest.mark.parametrize("each", SHIPPED, ids=lambda each: each.name)
def test_a_shipped_experiment_says_what_it_asks_and_found(each):
    readme = (ROOT / "experiments" / each.name / "README.md").read_text()
    assert not each.status.startswith("(")
    assert not each.question.startswith("(")
    headings = re.findall(r"^## (.+)$", readme, re.MULTILINE)
    assert headings == ["Hypothesis", "Method", "Result", "Verdict"]
    assert "result.md" in readme
    assert (ROOT / "experiments" / each.name / f"test_{each.name}.py").is_file()
    module = load_experiment(each.name)
    assert each.question == module.QUESTION
    assert hasattr(module, "backends") or hasattr(module, "measure")


def test_the_readmes_table_says_what_list_prints():
    """An experiment may be added without touching the table; a row that is there must be true."""
    text = (ROOT / "experiments" / "README.md").read_text()
    shown = [line for line in text.splitlines() if line.startswith("| [`")]
    rows = markdown_table(list(summaries(ROOT / "experiments"))).splitlines()[2:]
    assert shown == sorted(shown)
    stale = [row for row in shown if row not in rows]
    assert not stale, "put what `radixmlp experiment list --markdown` prints into experiments/README.md"
    assert len(shown) >= 12


def test_the_walk_through_works_as_written(root, small, monkeypatch):
    """The code block of experiments/README.md, put where it says, with the test that `new` wrote."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "experiments" / "README.md").read_text(), re.DOTALL)
    edited(root, "path_by_path")
    (root / "path_by_path" / "experiment.py").write_text(code)
    assert main(["run", "path_by_path", *TINY], root) == 0
    monkeypatch.setattr(files, "experiments_folder", lambda *_: root)
    module = load_module(root / "path_by_path", "radixmlp_experiment_path_by_path", "test_path_by_path")
    module.test_same_values_and_gradients_as_the_reference()


@pytest.mark.slow
def test_the_whole_harness_on_a_new_experiment(root, capsys):
    """Nothing replaced: every dtype of a quick run, and memory in fresh processes that load the folder."""
    assert main(["new", "real_run"], root) == 0
    assert main(["run", "real_run", *TINY], root) == 0
    document, _ = result_of(root, "real_run")
    peaks = {row["variant"]: row["peak_mb"] for row in document["trial"]["memory"]}
    assert peaks["real-run"] >= 0
    assert len(document["trial"]["refused"]["real-run"]) == 2  # softcap and sinks
