"""`radixmlp gpu`: kernels and whole models measured on one GPU, in at most `--minutes`, without a network.

The sections run one after another, each in a process of its own. The JSON is written anew after each, so that a
crash, a hang or the end of the time loses nothing that was measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from radixmlp.verify.environment import device_slug, environment
from radixmlp.verify.gpu_sections import SECTIONS

DRY_FILE = Path("build", "gpu-dry.json")
LEAST_SECONDS = 15.0  # a section with less left is not started
_RESERVE = 3.0  # of the time, for writing
_POLL = 0.1
Event = dict[str, Any]


@dataclass
class Run:
    """What was measured so far.

    Args:
        states: section -> {"name", "state", "seconds", "error"}; state is "done", "failed" (it raised), "stopped"
            (its time was up), "crashed" or "not run".
        rows: `Bar.row()` of every bar, as they came.
    """

    environment: dict[str, Any]
    dry: bool
    states: dict[str, dict[str, Any]]
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, names: Sequence[str], dry: bool) -> Run:
        """Nothing measured yet."""
        device = "cpu" if dry else "cuda"
        where = environment(device)
        if not dry:
            properties = torch.cuda.get_device_properties(0)
            where["cuda"] = torch.version.cuda
            where["capability"] = f"{properties.major}.{properties.minor}"
            where["memory_gb"] = properties.total_memory / 1e9
        state = {"state": "not run", "seconds": None, "error": None}
        return cls(where, dry, {name: {"name": name, **state} for name in names})

    @property
    def complete(self) -> bool:
        return all(state["state"] == "done" for state in self.states.values())

    def document(self) -> dict[str, Any]:
        """As it is written: `environment` and `bars` as `radixmlp bench` has them, and how each section ended."""
        return _finite(
            {
                "environment": self.environment,
                "dry": self.dry,
                "complete": self.complete,
                "sections": list(self.states.values()),
                "bars": self.rows,
            }
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure kernels and models on one GPU.

    Returns:
        0 if every section ran and every bar is met, 1 if not, 2 for a bad request.
    """
    arguments = _parse(argv)
    names = list(dict.fromkeys(arguments.only)) or list(SECTIONS)
    if not arguments.dry and not torch.cuda.is_available():
        print(
            "radixmlp gpu: PyTorch finds no CUDA device here; --dry runs the same on the CPU", file=sys.stderr
        )
        return 2
    run = Run.of(names, arguments.dry)
    out = arguments.out or _default_file(run, whole=not arguments.only)
    if out is None:
        print("radixmlp gpu: say where the results go with --out FILE", file=sys.stderr)
        return 2
    print(
        f"{run.environment['device']}, torch {run.environment['torch']}, triton {run.environment['triton']}"
    )
    deadline = time.monotonic() + 60 * arguments.minutes - _RESERVE
    measure(run, deadline, out)
    _print_verdict(run, out)
    return 0 if run.complete and all(row["passed"] for row in run.rows) else 1


def measure(run: Run, deadline: float, out: Path) -> None:
    """Run the sections until the deadline (`time.monotonic()`), writing `out` after each."""
    # A dry run's sections share a process: what they save is imports, what they share is no GPU.
    groups = [list(run.states)] if run.dry else [[name] for name in run.states]
    for group in groups:
        left = deadline - time.monotonic()
        seconds = left if run.dry else min(left, SECTIONS[group[0]].seconds)
        if left < LEAST_SECONDS and not run.dry:
            run.states[group[0]]["error"] = "no time was left"
        else:
            _run_group(run, group, seconds)
        write_atomically(out, run.document())


def _run_group(run: Run, names: list[str], seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="radixmlp-gpu-") as folder:
        events, log = Path(folder) / "events.jsonl", Path(folder) / "log.txt"
        events.touch()
        command = child_command(names, events, seconds, run.dry)
        ended = _watch(command, _child_environment(run.dry), seconds, log, _follow(events, run))
        for name in names:
            state = run.states[name]
            if state["state"] == "running":
                state["state"] = "stopped" if ended is None else "crashed"
                state["error"] = _why(ended, seconds, log)
                print(f"{name}: {state['state']}: {state['error']}")
            elif state["state"] == "not run":
                state["error"] = f"the process ended before it: {_why(ended, seconds, log)}"


def child_command(names: list[str], events: Path, seconds: float, dry: bool) -> list[str]:
    """What runs sections in a process of their own."""
    command = [sys.executable, "-P", "-m", "radixmlp.verify.gpu_sections", "--events", str(events)]
    return [*command, "--seconds", str(seconds), *(["--dry"] if dry else []), *names]


def _watch(
    command: list[str], env: Mapping[str, str], seconds: float, log: Path, follow: Callable[[], None]
) -> int | None:
    """Run `command`, calling `follow` now and then; its exit code, None where it was stopped after `seconds`."""
    stop_at = time.monotonic() + seconds
    with log.open("wb") as output:
        # A group of its own, so that the compilers it starts are stopped with it.
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None and time.monotonic() < stop_at:
                follow()
                time.sleep(_POLL)
            return process.poll()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            follow()


def _follow(events: Path, run: Run) -> Callable[[], None]:
    """Reads on from where it stopped: prints each event and enters it into `run`."""
    file = events.open(encoding="utf-8")
    rest = ""

    def follow() -> None:
        nonlocal rest
        *lines, rest = (rest + file.read()).split("\n")
        for line in lines:
            _enter(run, json.loads(line))

    return follow


def _enter(run: Run, event: Event) -> None:
    state = run.states[event["section"]]
    if event["event"] == "start":
        state["state"] = "running"
        print(f"{state['name']}: {SECTIONS[state['name']].shows}")
    elif event["event"] == "bar":
        run.rows.append(event["row"])
        _print_row(event["row"])
    else:
        state["state"] = "failed" if event["error"] else "done"
        state["seconds"], state["error"] = event["seconds"], event["error"]
        print(f"  {event['seconds']:.0f} s" + (f", failed: {event['error']}" if event["error"] else ""))


def _child_environment(dry: bool) -> dict[str, str]:
    """Triton reads its switch to the interpreter when it is imported; nothing is looked for on the hub."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["HF_HUB_OFFLINE"] = "1"
    return {**env, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if dry else env


def _why(ended: int | None, seconds: float, log: Path) -> str:
    if ended is None:
        return f"its {seconds:.0f} s were up"
    return f"exit code {ended}; it printed: {log.read_text(errors='replace')[-1500:].strip()}"


def _default_file(run: Run, whole: bool) -> Path | None:
    """Where results go unless `--out` says otherwise; None: nowhere, for a part of the sections or no source tree."""
    root = Path(__file__).resolve().parents[1]
    in_tree = (root / "pyproject.toml").is_file() and (
        root / "paper_figures"
    ).is_dir()  # a copy may have no .git
    if run.dry:
        return (root if in_tree else Path()) / DRY_FILE
    if not (in_tree and whole):
        return None
    return root / "paper_figures" / "measured" / f"{device_slug(run.environment['device'])}.json"


def write_atomically(path: Path, document: Any) -> None:
    """Write JSON beside its place and move it there: the old file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False, default=str) + "\n", encoding="utf-8")
    os.replace(part, path)


def _finite(value: Any) -> Any:
    """The same structure with every float that JSON cannot hold replaced by None."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _print_row(row: dict[str, Any]) -> None:
    judged = row["limit"] is not None or row["wrong"] is not None
    verdict = ("met" if row["passed"] else "NOT MET") if judged else "reported"
    sign = ">=" if row["better"] == "higher" else "<="
    limit = "" if row["limit"] is None else f" ({sign} {row['limit']:g})"
    ideal = "" if row["ideal"] is None else f", ideal {row['ideal']:.3g}"
    reason = "" if row["wrong"] is None else f": {row['wrong']}"
    print(f"  {verdict:8} {row['name']}: {row['value']:.4g}{limit}{ideal}{reason}")


def _print_verdict(run: Run, out: Path) -> None:
    judged = [row for row in run.rows if row["limit"] is not None or row["wrong"] is not None]
    missed = [row for row in judged if not row["passed"]]
    for row in missed:
        _print_row(row)
    unfinished = [name for name, state in run.states.items() if state["state"] != "done"]
    if unfinished:
        print(f"Unfinished: {', '.join(unfinished)}")
    if run.dry:
        print("A dry run: the code ran on the CPU, no speed was judged.")
    print(f"{len(judged) - len(missed)} of {len(judged)} bars met. Written to {out}")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="radixmlp gpu", description="Measure kernels and models on one GPU."
    )
    parser.add_argument(
        "--dry", action="store_true", help="the same code on the CPU, tiny, in the interpreter"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help=f"JSON file (default: paper_figures/measured/<device>.json of a checkout; dry: {DRY_FILE})",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument(
        "--only", action="append", default=[], choices=list(SECTIONS), help="one section (repeatable)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.minutes > 0:
        parser.error(f"--minutes is {arguments.minutes}: expected a positive number")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
