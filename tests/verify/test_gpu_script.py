"""`radixmlp gpu`: what survives a crash, a hang and the end of the time; bars that cannot pass on wrong results."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from radixmlp import (
    AttentionSpec,
    TriePlan,
    attention_backends,
    cli,
    register_attention,
    unregister_attention,
)
from radixmlp.optimized.attention.sdpa import DenseSdpa, ScatterSdpa
from radixmlp.optimized.attention.trie_sdpa import TrieSdpa
from radixmlp.verify import gpu, gpu_attention, gpu_copies, gpu_models, gpu_timing
from radixmlp.verify.bars import Bar
from radixmlp.verify.gpu_sections import SECTIONS
from radixmlp.verify.gpu_setting import DENSE_FLASH, FLEX, SCATTER, TRIE, Setting, share_of_allowed
from radixmlp.verify.timing import Timings

CPU = torch.device("cpu")
GROUPS = tuple(SECTIONS)

CHILD = """
import json, os, sys, time

section, events, what = sys.argv[1:]
with open(events, "a") as file:
    def write(**event):
        file.write(json.dumps({"section": section, **event}) + "\\n")
        file.flush()

    write(event="start")
    row = {"name": section, "value": 1.0, "limit": None, "better": "higher", "passed": True, "ideal": None,
           "wrong": None}
    write(event="bar", row=row)
    if what == "crash":
        print("a kernel did something illegal", flush=True)
        os.abort()
    if what == "hang":
        time.sleep(600)
    write(event="end", seconds=1.5, error="ValueError: no" if what == "raise" else None)
"""


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Sections run `CHILD` instead: what each of them does, "measure" where nothing is said."""
    what: dict[str, str] = {}

    def command(names: list[str], events: Path, seconds: float, dry: bool) -> list[str]:
        assert len(names) == 1
        return [sys.executable, "-c", CHILD, names[0], str(events), what.get(names[0], "measure")]

    monkeypatch.setattr(gpu, "child_command", command)
    return what


def run_of(names: tuple[str, ...] = GROUPS) -> gpu.Run:
    run = gpu.Run.of(names, dry=True)
    run.dry = False  # as on a GPU: a process for each section
    return run


def test_a_crash_a_hang_and_an_error_lose_nothing(
    children: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children.update({"values": "crash", "attention": "hang", "qwen3-8b": "raise"})
    monkeypatch.setitem(SECTIONS, "attention", SECTIONS["attention"]._replace(seconds=2.0))
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(gpu, "write_atomically", lambda path, document: written.append(document))
    run = run_of()
    started = time.monotonic()
    gpu.measure(run, time.monotonic() + 100, tmp_path / "out.json")
    assert time.monotonic() - started < 30
    states = {name: state["state"] for name, state in run.states.items()}
    assert states == dict.fromkeys(GROUPS, "done") | {
        "values": "crashed",
        "attention": "stopped",
        "qwen3-8b": "failed",
    }
    assert "illegal" in run.states["values"]["error"]
    assert run.states["qwen3-8b"]["error"] == "ValueError: no"
    assert [row["name"] for row in run.rows] == list(GROUPS)
    assert [len(document["bars"]) for document in written] == list(range(1, len(GROUPS) + 1))
    assert not written[-1]["complete"]


def test_no_section_starts_without_time(children: dict[str, str], tmp_path: Path) -> None:
    run = run_of()
    gpu.measure(run, time.monotonic() + gpu.LEAST_SECONDS - 1, tmp_path / "out.json")
    assert {state["state"] for state in run.states.values()} == {"not run"}
    document = json.loads((tmp_path / "out.json").read_text())
    assert "no time" in document["sections"][0]["error"]


@pytest.mark.parametrize(("passed", "what", "code"), [(True, "", 0), (False, "", 1), (True, "crash", 1)])
def test_exit_codes(
    passed: bool, what: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def measure(run: gpu.Run, deadline: float, out: Path) -> None:
        run.rows.append(Bar("fast", 1.0, 0.5 if passed else 2.0, "higher", "a shape").row())
        for state in run.states.values():
            state["state"] = "crashed" if what else "done"

    monkeypatch.setattr(gpu, "measure", measure)
    assert gpu.main(["--dry", "--out", str(tmp_path / "out.json")]) == code
    assert "bars met" in capsys.readouterr().out


def test_requests_that_cannot_be_met(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["gpu"]) == 2
    assert "--dry" in capsys.readouterr().err
    for arguments in (["--minutes", "0"], ["--only", "everything"]):
        with pytest.raises(SystemExit):
            gpu.main(arguments)
    part = run_of(("copies",))
    assert gpu._default_file(part, whole=False) is None


def test_a_number_that_json_cannot_hold_becomes_null(tmp_path: Path) -> None:
    run = run_of(("copies",))
    run.rows.append(Bar("odd", math.nan, None, "higher", "", (1.0, math.inf), wrong="it raised").row())
    gpu.write_atomically(tmp_path / "out.json", run.document())
    row = json.loads((tmp_path / "out.json").read_text())["bars"][0]
    assert row["value"] is None
    assert row["quantiles"] == [1.0, None]
    assert row["passed"] is False


def run_dry(out: Path, *arguments: str) -> dict[str, Any]:
    code = gpu.main(["--dry", "--out", str(out), *arguments])
    document = json.loads(out.read_text())
    failed = [row for row in document["bars"] if not row["passed"]]
    assert code == 0, (document["sections"], failed)
    assert document["dry"] is True
    assert document["complete"] is True
    assert {"commit", "device", "torch", "triton", "transformers"} <= set(document["environment"])
    return document


def test_a_dry_section(tmp_path: Path) -> None:
    document = run_dry(tmp_path / "dry.json", "--only", "copies")
    names = [row["name"] for row in document["bars"]]
    assert len(names) == 4 * len(gpu_copies.DRY_SHAPES) + 2
    assert all(row["limit"] is None for row in document["bars"])


@pytest.mark.slow
def test_every_section_dry(tmp_path: Path) -> None:
    document = run_dry(tmp_path / "dry.json")
    assert [section["name"] for section in document["sections"]] == list(SECTIONS)
    for section in SECTIONS:
        assert [row for row in document["bars"] if row["name"].startswith(f"{section}:")]
    judged = [row for row in document["bars"] if row["limit"] is not None]
    assert {row["name"].split(":")[0] for row in judged} == {"values", "qwen3-8b", "qwen3-0.6b", "qwen3-4b"}


class Named:
    """A backend under another's name; `spoil` changes its result."""

    def __init__(self, name: str, backend: Any, spoil: Any = None) -> None:
        self.name, self._backend, self._spoil = name, backend, spoil or (lambda out: out)
        self.shares_prefixes = getattr(backend, "shares_prefixes", True)

    def unsupported(self, spec: AttentionSpec, device: Any, dtype: Any, training: bool) -> str | None:
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        return self._spoil(self._backend(q, k, v, plan, spec))


def refuse(out: Tensor) -> Tensor:
    raise ValueError("no kernel for this")


def shifted(out: Tensor) -> Tensor:
    return out.roll(1, 0)


@pytest.fixture
def backends() -> Iterator[dict[str, Named]]:
    """Stand-ins for all that is measured, by name; replace one to plant a fault."""
    stand_ins = {
        TRIE: Named(TRIE, TrieSdpa()),
        FLEX: Named(FLEX, TrieSdpa()),
        SCATTER: Named(SCATTER, ScatterSdpa()),
        DENSE_FLASH: Named(DENSE_FLASH, DenseSdpa()),
    }
    before = {name: backend for name, backend in attention_backends().items() if name in stand_ins}
    for name in before:
        unregister_attention(name)
    for backend in stand_ins.values():
        register_attention(backend)
    yield stand_ins
    for name in stand_ins:
        unregister_attention(name)
    for backend in before.values():
        register_attention(backend)


def dry_setting(bars: list[Bar]) -> Setting:
    return Setting(dry=True, deadline=time.monotonic() + 60, emit=bars.append)


@pytest.mark.parametrize("fault", [None, TRIE, SCATTER, FLEX])
def test_wrong_attention_has_no_speed(fault: str | None, backends: dict[str, Named]) -> None:
    if fault is not None:
        backends[fault]._spoil = shifted
    bars: list[Bar] = []
    gpu_attention.run(dry_setting(bars))
    red = {bar.name for bar in bars if not bar.passed}
    judged = {bar.name for bar in bars[1:]}
    assert red == {
        None: set(),
        TRIE: judged,
        SCATTER: {f"attention: trie over {SCATTER} at prefix 32"},
        FLEX: {f"attention: trie over {FLEX} at prefix 32"},
    }.get(fault)


@pytest.mark.parametrize("refusing", [TRIE, FLEX])
def test_attention_that_refuses_says_why(refusing: str, backends: dict[str, Named]) -> None:
    backends[refusing]._spoil = refuse
    bars: list[Bar] = []
    gpu_attention.run(dry_setting(bars))
    reasons = [bar.wrong for bar in bars if not bar.passed]
    assert reasons
    assert all("no kernel for this" in (reason or "") for reason in reasons)
    assert any(bar.name.startswith(f"attention: trie over {SCATTER}") for bar in bars) == (refusing != TRIE)


@pytest.mark.parametrize(
    ("fault", "spoil"),
    [
        (None, None),
        (TRIE, shifted),
        pytest.param(SCATTER, shifted, marks=pytest.mark.slow),
        pytest.param(TRIE, refuse, marks=pytest.mark.slow),
    ],
)
def test_wrong_models_have_no_speed(fault: str | None, spoil: Any, backends: dict[str, Named]) -> None:
    if fault is not None:
        backends[fault]._spoil = spoil
    bars: list[Bar] = []
    gpu_models.run(dry_setting(bars), "qwen3-0.6b")
    speeds = {bar.name: bar for bar in bars if " over dense" in bar.name and "memory" not in bar.name}
    assert len(speeds) == 2
    red = {name for name, bar in speeds.items() if not bar.passed}
    path = {TRIE: "trie", SCATTER: "scatter"}.get(fault or "")
    assert red == ({f"qwen3-0.6b: {path} over dense at prefix 32"} if path else set())
    errors = [bar for bar in bars if "error of" in bar.name]
    assert {bar.name.split()[3].split("'")[0] for bar in errors if not bar.passed} == (
        {fault} if spoil is shifted else set()
    )


def test_models_keep_their_rotary_tables_in_fp32() -> None:
    model = gpu_models.make_model(gpu_models.SIZES["qwen3-4b"], 1, dry_setting([]))
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_the_bars_are_those_we_aim_at(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Setting(dry=False, deadline=math.inf, emit=lambda bar: None)
    assert measured.speed_limit(0.85) == 0.85
    assert dry_setting([]).speed_limit(0.85) is None
    assert gpu_models.SIZES["qwen3-8b"].bars == {"trie": 6.5, "scatter": 4.5}
    assert (gpu_attention.SHARE_OF_GEMM, gpu_attention.JUDGED_PREFIX) == (0.45, 2048)
    timings = Timings({"copy": [1.0], "gather_rows": [1.1], "index_select": [4.0]})
    share, over = gpu_copies._bars(measured, (16_000, 1024), "gather_rows", timings, None)
    assert share.limit == 0.85
    assert share.passed
    assert share.value == pytest.approx(1 / 1.1, rel=1e-2)
    assert over.value == pytest.approx(4 / 1.1)
    slow = Timings({"copy": [1.0], "gather_rows": [1.25], "index_select": [4.0]})
    assert not gpu_copies._bars(measured, (16_000, 1024), "gather_rows", slow, None)[0].passed
    assert not gpu_copies._bars(measured, (16_000, 1024), "gather_rows", timings, "rows differ")[0].passed


def test_wrong_copies_have_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ModuleType("radixmlp.kernels.rows")
    rows.gather_rows = lambda x, index: x[index.long()].roll(1, 0)  # type: ignore[attr-defined]
    rows.scatter_rows = lambda x, index, count: x.new_zeros(x.shape).index_copy_(0, index.long(), x)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "radixmlp.kernels.rows", rows)
    bars = gpu_copies.measure(dry_setting([]), (40, 64))
    assert [bar.passed for bar in bars] == [False, False, True, True]


def test_share_of_allowed() -> None:
    truth = torch.randn(100, 4, 8, dtype=torch.float64)
    rounded = truth.half()
    assert share_of_allowed(rounded, truth, [rounded])[0] == pytest.approx(1 / 1.1)
    assert share_of_allowed(truth.float(), truth, [truth.float()])[0] < 0.1
    for wrong in (rounded.roll(1, 0), torch.zeros_like(rounded), rounded * math.nan, rounded * 1.01):
        assert share_of_allowed(wrong, truth, [rounded])[0] > 1
        assert share_of_allowed(wrong.float(), truth, [truth.float()])[0] > 1


def test_kernels_are_timed_in_turn() -> None:
    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = gpu_timing.time_kernels(calls, 2, CPU, warmup=1)
    assert order == [*"abc", *"abc", *"bca"]
    assert timings.rounds == 2
