"""`radixmlp kernels`: its verdicts, its table and its errors."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from radixmlp.kernels.aot import CannotCompileError, Compiled
from radixmlp.kernels.config import KernelConfig
from radixmlp.verify import kernels

GOOD = Compiled(
    config=KernelConfig("it", "copy", lambda: None, {}),
    arch="sm_90",
    registers=40,
    spills=0,
    shared_bytes=0,
    wgmma=0,
    other_mma=0,
    wide_loads=8,
    wide_stores=8,
    narrow_stores=0,
    tma=0,
    ttir="",
)
MATRIX = replace(GOOD, config=replace(GOOD.config, kind="matrix"), wgmma=4, wide_stores=0, narrow_stores=9)
REDUCE = replace(GOOD, config=replace(GOOD.config, kind="reduce"))
UNALIGNED = replace(
    GOOD, config=replace(GOOD.config, kind="unaligned"), wide_loads=0, wide_stores=0, narrow_stores=9
)


@pytest.mark.parametrize(
    "compiled",
    [
        GOOD,
        MATRIX,
        REDUCE,
        UNALIGNED,
        replace(MATRIX, arch="sm_80", wgmma=0, other_mma=8),
        replace(MATRIX, arch="sm_100", wgmma=0, other_mma=8),
        replace(GOOD, wide_loads=0, wide_stores=0, tma=4),
        replace(MATRIX, shared_bytes=227 * 1024),
    ],
)
def test_a_good_kernel_has_no_faults(compiled):
    assert kernels.faults(compiled) == []


@pytest.mark.parametrize(
    ("compiled", "fault"),
    [
        (replace(GOOD, spills=2), "2 instructions spill registers"),
        (replace(UNALIGNED, spills=2), "2 instructions spill registers"),
        (replace(MATRIX, wgmma=0, other_mma=8), "a matrix kernel without wgmma"),
        (replace(MATRIX, arch="sm_80", wgmma=0), "a matrix kernel without tensor-core instructions"),
        (replace(GOOD, wide_loads=0), "a copy kernel without 128-bit loads"),
        (replace(REDUCE, wide_stores=0), "a reduce kernel without 128-bit stores"),
        (replace(GOOD, narrow_stores=3), "3 stores of a copy kernel move fewer than 128 bits"),
        (replace(MATRIX, shared_bytes=227 * 1024 + 1), "232449 bytes of shared memory, a block has 232448"),
        (replace(MATRIX, arch="sm_80", other_mma=1, shared_bytes=164 * 1024), "a block has 166912"),
    ],
)
def test_each_fault_is_named(compiled, fault):
    (found,) = kernels.faults(compiled)
    assert fault in found


@pytest.fixture
def compile_to(monkeypatch):
    """Let `main` find these configurations, and compile each to the outcome of its name."""

    def arrange(**outcomes):
        configs = [KernelConfig(name, "copy", lambda: None, {}) for name in outcomes]

        def compile_kernel(config, arch):
            outcome = outcomes[config.name]
            if isinstance(outcome, Exception):
                raise outcome
            return replace(outcome, config=config, arch=arch)

        monkeypatch.setattr(kernels, "shipped", lambda arch: configs)
        monkeypatch.setattr(kernels, "interpreted", lambda config: False)
        monkeypatch.setattr(kernels, "compile_kernel", compile_kernel)

    return arrange


def test_all_good_is_zero(compile_to, capsys, tmp_path):
    compile_to(one=GOOD, two=GOOD)
    path = tmp_path / "new" / "kernels.json"
    assert kernels.main(["--arch", "sm_90", "--arch", "sm_80", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "4 of 4 kernels passed" in printed
    assert "sm_80: a block may use 163 KiB" in printed
    report = json.loads(path.read_text())
    assert report["passed"] is True
    assert [(row["name"], row["arch"]) for row in report["kernels"]] == [
        ("one", "sm_90"),
        ("two", "sm_90"),
        ("one", "sm_80"),
        ("two", "sm_80"),
    ]
    assert report["kernels"][0]["registers"] == 40


def test_one_fault_is_one(compile_to, capsys, tmp_path):
    compile_to(one=GOOD, two=replace(GOOD, spills=7), three=CannotCompileError("three does not compile"))
    path = tmp_path / "kernels.json"
    assert kernels.main(["--json", str(path)]) == 1
    printed = capsys.readouterr().out
    assert "1 of 3 kernels passed" in printed
    assert "FAILED  sm_90  two: 7 instructions spill registers" in printed
    assert "FAILED  sm_90  three: three does not compile" in printed
    report = json.loads(path.read_text())
    assert report["passed"] is False
    assert report["kernels"][2]["registers"] is None


def test_a_part_of_a_name_chooses(compile_to, capsys):
    compile_to(gather=GOOD, scatter=replace(GOOD, spills=7))
    assert kernels.main(["--kernel", "gath"]) == 0
    assert kernels.main(["--kernel", "rope"]) == 2
    assert "no kernel configuration has 'rope' in its name" in capsys.readouterr().err


def test_an_unknown_architecture_is_refused(compile_to, capsys):
    compile_to(one=GOOD)
    assert kernels.main(["--arch", "sm_91"]) == 2
    assert "unknown architecture 'sm_91': expected one of sm_80" in capsys.readouterr().err


def command(*arguments, before="", **environment):
    """Run `radixmlp kernels ...` in a process of its own, in an environment without TRITON_INTERPRET."""
    code = f"import sys\n{before}\nfrom radixmlp.cli import main\nsys.exit(main(sys.argv[1:]))"
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "kernels", *arguments],
        capture_output=True,
        text=True,
        env={**clean, **environment},
        timeout=300,
    )


def test_the_command_compiles_a_kernel(tmp_path):
    path = tmp_path / "kernels.json"
    run = command("--arch", "sm_90", "--kernel", "gather_rows i64", "--json", str(path))
    assert run.returncode == 0, run.stderr
    assert "1 of 1 kernels passed" in run.stdout
    (row,) = json.loads(path.read_text())["kernels"]
    assert row["wide_loads"] > 0
    assert row["faults"] == []


def test_nothing_to_compile_with_is_refused(compile_to, monkeypatch, capsys):
    compile_to(one=GOOD)
    monkeypatch.setattr(kernels, "interpreted", lambda config: True)
    assert kernels.main([]) == 2
    assert "TRITON_INTERPRET is set, so there is no compiler" in capsys.readouterr().err

    def missing(name):
        raise ModuleNotFoundError("no such module", name=name)

    monkeypatch.setattr(kernels, "shipped", lambda arch: missing("triton.language"))
    assert kernels.main([]) == 2
    assert "Triton is not installed" in capsys.readouterr().err
    monkeypatch.setattr(kernels, "shipped", lambda arch: missing("another"))
    with pytest.raises(ModuleNotFoundError):
        kernels.main([])


@pytest.mark.slow
def test_without_triton_the_command_says_so():
    run = command(before="sys.modules['triton'] = None")
    assert run.returncode == 2
    assert "radixmlp kernels: Triton is not installed" in run.stderr


@pytest.mark.slow
def test_the_interpreter_is_refused():
    run = command(TRITON_INTERPRET="1")
    assert run.returncode == 2
    assert "TRITON_INTERPRET is set, so there is no compiler" in run.stderr
