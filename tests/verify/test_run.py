"""`radixmlp verify` as a person meets it: names, exit codes, the report, an interruption, an error in a cell."""

import json
import subprocess
import sys

import pytest

import radixmlp
from radixmlp.verify import console, run, runner
from radixmlp.verify.matrix import Settings, plan_cells
from radixmlp.verify.subject import Subject

SMALL = ["--model", "tiny-qwen3", "--workload", "one-sequence", "--dtype", "float32"]


def report(folder):
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "huge"], "unknown model 'huge': known are tiny-qwen3"),
        (["--model", "qwen3-8b-width:9"], "9 layers"),
        (["--workload", "nothing"], "unknown workload 'nothing': known are synthetic"),
        (["--attention", "flash"], "unknown attention 'flash': known are dense-sdpa"),
        (["--dtype", "int4"], "unknown dtype 'int4': known are float64"),
        (["--prefix-lengths", "256,many"], "expected numbers such as 256,512"),
        (["--prefix-lengths", "0"], "at least 1"),
        (["--data", "nowhere.jsonl"], "no passage file at nowhere.jsonl"),
        (["--device", "tpu"], "unknown device 'tpu'"),
    ],
)
def test_what_is_unknown_is_refused_before_anything_runs(arguments, complaint, capsys, tmp_path):
    assert run.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_bad_data_names_the_line(tmp_path, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"query": "q", "passages": ["p"]}\n{"query": 1}\n')
    assert run.main(["--data", str(file)]) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_green_run_exits_0_and_writes_three_reports(tmp_path, capsys):
    assert run.main([*SMALL, "--out", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.md", "report.html"}
    document = report(tmp_path)
    wanted = {"commit", "dirty", "device", "torch", "triton", "transformers", "numpy", "python"}
    assert wanted <= document["environment"].keys()
    fields = {
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
    }
    assert all(fields <= record.keys() for record in document["records"])
    printed = capsys.readouterr().out
    assert "every check passed" in printed
    assert str(tmp_path / "report.html") in printed
    assert "\x1b[" not in printed  # not a terminal: plain lines


def test_named_choices_are_the_ones_that_run(tmp_path):
    arguments = [*SMALL, "--workload", "all-equal", "--attention", "trie-sdpa", "--attention", "auto"]
    assert run.main([*arguments, "--prefix-lengths", "8,16", "--out", str(tmp_path)]) == 0
    parity = [record for record in report(tmp_path)["records"] if record["kind"] == "parity"]
    assert {r["workload"] for r in parity} == {
        "one-sequence",
        "all-equal",
        "synthetic:8+64x8",
        "synthetic:16+64x8",
    }
    assert {r["attention"] for r in parity} == {"trie-sdpa", "auto", "none"}
    assert {(r["model"], r["dtype"]) for r in parity} == {("tiny-qwen3", "float32")}


@pytest.mark.slow  # converts SmolLM2 for its tokenizer where that is not cached yet
def test_own_data_is_what_the_text_workloads_hold(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"query": "what", "passages": ["this one", "that one", "this other one"]}\n')
    arguments = ["--model", "tiny-qwen3", "--workload", "rerank-query-first", "--dtype", "float32"]
    assert run.main([*arguments, "--data", str(file), "--out", str(tmp_path / "out")]) == 0
    records = report(tmp_path / "out")["records"]
    (compression,) = (record for record in records if record["kind"] == "compression")
    assert compression["value"] > 2


def test_an_interruption_writes_what_there_is_and_exits_130(tmp_path, capsys):
    calls = []

    def forward(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return radixmlp.forward(*arguments, **options)

    arguments = [*SMALL, "--workload", "all-equal", "--attention", "trie-sdpa", "--attention", "dense-sdpa"]
    code = run.main([*arguments, "--out", str(tmp_path)], Subject(forward, radixmlp.build_plan))
    assert code == 130
    records = report(tmp_path)["records"]
    assert {r["workload"] for r in records if r["kind"] == "parity"} == {"one-sequence"}
    assert "interrupted after" in capsys.readouterr().err


def test_an_error_in_a_cell_is_a_failed_record_and_the_rest_still_runs(tmp_path, monkeypatch):
    def broken(name, *arguments):
        raise MemoryError("no room for the weights")

    monkeypatch.setattr(runner, "load_model", broken)
    assert run.main([*SMALL, "--out", str(tmp_path)]) == run.EXIT_FAILED
    records = report(tmp_path)["records"]
    (error,) = (record for record in records if record["metric"] == "error")
    assert not error["passed"]
    assert "no room for the weights" in error["details"]["error"]
    assert any(record["kind"] == "compression" for record in records)


def test_on_a_terminal_there_is_a_progress_bar(capsys):
    with console.Watch(2, interactive=True) as watch:
        watch.start("parity: one")
        watch.say("truth")
        watch.finish([])
    assert "parity: one" in capsys.readouterr().out


def test_quick_holds_every_kind_of_check_and_the_real_model():
    cells = plan_cells(Settings(quick=True))
    assert {cell.kind for cell in cells} == {"index", "parity", "gradient", "speed", "memory"}
    assert any(cell.model == "smollm2-135m" for cell in cells)
    assert {cell.dtype for cell in cells} >= {"float64", "float32", "float16", "bfloat16"}


@pytest.mark.parametrize("quick", [True, False])
def test_nothing_is_timed_whose_parity_is_not_judged(quick):
    cells = plan_cells(Settings(quick=quick))
    assert len(cells) == len(set(cells))
    judged = {(c.model, c.workload, c.dtype): i for i, c in enumerate(cells) if c.kind == "parity"}
    for i, cell in enumerate(cells):
        if cell.kind in ("speed", "memory"):
            assert judged[cell.model, cell.workload, cell.dtype] < i


@pytest.mark.parametrize("model", ["tiny-llama", "qwen3-8b-width:2", "smollm2-135m", "some/hub-model"])
def test_every_model_has_a_default_matrix(model):
    for quick in (True, False):
        cells = [c for c in plan_cells(Settings(quick=quick, models=(model,))) if c.kind != "index"]
        assert {cell.model for cell in cells} == {model}
        assert any(cell.kind == "parity" for cell in cells)


@pytest.mark.slow
def test_the_command_itself(tmp_path):
    command = [sys.executable, "-P", "-m", "radixmlp.cli", "verify", *SMALL, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "every check passed" in done.stdout
