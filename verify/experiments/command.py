"""`radixmlp experiment new|run|list`: ideas that plug into the harness, one folder each.

A folder `experiments/NAME/` holds `experiment.py` with `QUESTION` and one or both of `backends()` (attention
backends, which the harness puts through parity, planted faults, speed and memory) and `measure(quick, progress)`
(anything else; `report(measured)` makes Markdown of it).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from radixmlp.verify.checkout import NoCheckoutError
from radixmlp.verify.console import Watch
from radixmlp.verify.environment import environment
from radixmlp.verify.experiments.files import (
    ExperimentError,
    MeasureError,
    Summary,
    experiments_folder,
    load_experiment,
    summaries,
    where_raised,
)
from radixmlp.verify.experiments.new import create
from radixmlp.verify.experiments.result import document_of, record_line, write_result
from radixmlp.verify.experiments.trial import Trial, TrialSettings, run_trial, steps
from radixmlp.verify.models import check_model_name
from radixmlp.verify.report import number
from radixmlp.verify.workloads import is_workload, workload_names

_WORST_SHOWN = 5
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None, root: Path | None = None) -> int:
    """Run one of the three commands.

    Args:
        argv: command line without the program's name; None: the process's own.
        root: the folder of experiments; None: the checkout's.

    Returns:
        0; 1: parity, a planted fault or `measure()` failed (then nothing is written); 2: wrong use, an
        experiment that does not load, or no checkout; 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        folder = experiments_folder(f"radixmlp experiment {arguments.command}") if root is None else root
        return int(arguments.run(arguments, folder))
    except (ExperimentError, NoCheckoutError) as error:
        print(f"radixmlp experiment: {error}", file=sys.stderr)
        return EXIT_FAILED if isinstance(error, MeasureError) else EXIT_USAGE
    except KeyboardInterrupt:
        print("interrupted: nothing is written", file=sys.stderr)
        return EXIT_INTERRUPTED


def _new(arguments: argparse.Namespace, root: Path) -> int:
    files = create(arguments.name, root)
    print("\n".join(f"wrote {_shown(path)}" for path in files))
    print(f"next: radixmlp experiment run {arguments.name} --quick")
    return 0


def _list(arguments: argparse.Namespace, root: Path) -> int:
    found = list(summaries(root))
    if arguments.markdown:
        print(markdown_table(found))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", "question", "status", "result")
    for each in found:
        result = each.result or "none yet"
        table.add_row(
            each.name, each.question, each.status, result if each.harness else f"{result} (own run.py)"
        )
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table, markup=False)
    return 0


def markdown_table(found: Sequence[Summary]) -> str:
    """The table of `experiments/README.md`."""
    lines = ["| experiment | question | status |", "|---|---|---|"]
    for each in found:
        cells = (f"[`{each.name}`]({each.name}/README.md)", each.question, each.status)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _run(arguments: argparse.Namespace, root: Path) -> int:
    module = load_experiment(arguments.name, root=root)
    folder = root / arguments.name
    settings = _settings(arguments)
    question = _question(module, arguments.name)
    backends = _call(module, "backends", folder) if hasattr(module, "backends") else None
    measure = getattr(module, "measure", None)
    if not backends and measure is None:
        raise ExperimentError(
            f"{arguments.name}/experiment.py needs backends() that returns some, or measure()"
        )
    if not backends and (settings.model or settings.workload):
        raise ExperimentError(f"{arguments.name} has no backends here for --model and --workload to time")
    trial, measured = None, None
    with Watch(steps(backends or (), settings) + (measure is not None)) as watch:
        if backends:
            try:
                trial = run_trial(backends, settings, watch, folder)
            except ValueError as error:
                raise ExperimentError(f"{arguments.name}: {error}") from error
        if measure is not None and (trial is None or trial.passed):
            watch.start("measure()")
            measured = _measured(measure, settings.quick, watch.say, folder)
            watch.finish([])
    return _conclude(arguments, settings, module, question, trial, measured, root)


def _conclude(
    arguments: argparse.Namespace,
    settings: TrialSettings,
    module: ModuleType,
    question: str,
    trial: Trial | None,
    measured: dict[str, Any] | None,
    root: Path,
) -> int:
    """Print the result; write it where everything passed."""
    out = _out(arguments, settings, root)
    try:
        document = document_of(
            arguments.name, question, settings.quick, environment(settings.device), trial, measured
        )
    except ValueError as error:
        raise MeasureError(f"{arguments.name}: {error}") from error
    report = _reported(module, measured, root / arguments.name, document, out)
    if trial is not None:
        _show(trial)
        for name, line in document["verdicts"].items():
            print(f"{name}: {line}")
        if not trial.passed:
            for record in [red for name in trial.backends for red in trial.red(name)][:_WORST_SHOWN]:
                print(f"FAILED {record.attention}: {record_line(record)}")
            print("NOT PASSED: nothing is written", file=sys.stderr)
            return EXIT_FAILED
    if report:
        print(report.strip())
    for path in write_result(out, document, trial, report):
        print(f"wrote {_shown(path)}")
    return 0


def _reported(
    module: ModuleType, measured: dict[str, Any] | None, folder: Path, document: dict[str, Any], out: Path
) -> str:
    """What `report()` makes of the measured numbers; where it raises, they are kept beside the result."""
    if measured is None or not hasattr(module, "report"):
        return ""
    try:
        return str(_call(module, "report", folder, measured))
    except ExperimentError as error:
        out.mkdir(parents=True, exist_ok=True)
        kept = out / "unreported.json"
        kept.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        raise MeasureError(f"{error}; the numbers are kept in {_shown(kept)}") from error


def _out(arguments: argparse.Namespace, settings: TrialSettings, root: Path) -> Path:
    """Beside the README for a whole run on the standard batches; under build/ for any other."""
    if arguments.out is not None:
        return Path(arguments.out)
    standard = not (settings.quick or settings.model or settings.workload)
    return root / arguments.name if standard else root.parent / "build" / "experiments" / arguments.name


def _question(module: ModuleType, name: str) -> str:
    question = getattr(module, "QUESTION", None)
    if not isinstance(question, str) or not question.strip():
        raise ExperimentError(f"{name}/experiment.py has no QUESTION: one line that says what it asks")
    return question


def _call(module: ModuleType, function: str, folder: Path, *arguments: Any) -> Any:
    try:
        return getattr(module, function)(*arguments)
    except Exception as error:
        raise ExperimentError(
            f"{function}() of {folder.name} failed: {where_raised(error, folder)}"
        ) from error


def _measured(
    measure: Callable[..., dict[str, Any]], quick: bool, progress: Callable[[str], None], folder: Path
) -> dict[str, Any]:
    try:
        measured = measure(quick, progress)
    except Exception as error:
        raise MeasureError(f"measure() of {folder.name} failed: {where_raised(error, folder)}") from error
    if not isinstance(measured, dict):
        raise MeasureError(f"measure() of {folder.name} returned {type(measured).__name__}: return a dict")
    return measured


def _show(trial: Trial) -> None:
    """The numbers as a table on the console."""
    from rich.console import Console
    from rich.table import Table

    if not trial.speed:
        return
    table = Table(
        "workload", "variant", "seconds", "over dense", "over scatter-sdpa", "over trie-sdpa", "peak MB"
    )
    peaks = {(row["workload"], row["variant"]): row["peak_mb"] for row in trial.memory}
    for row in trial.speed:
        ratios = [number(row[f"over {rival}"]["median"]) for rival in ("dense", "scatter-sdpa", "trie-sdpa")]
        peak = number(peaks.get((row["workload"], row["variant"])))
        table.add_row(row["workload"], row["variant"], number(row["seconds"]), *ratios, peak)
    (Console() if sys.stdout.isatty() else Console(width=140)).print(table)


def _settings(arguments: argparse.Namespace) -> TrialSettings:
    if arguments.model is not None:
        try:
            check_model_name(arguments.model)
        except ValueError as error:
            raise ExperimentError(str(error)) from error
    if arguments.workload is not None and not is_workload(arguments.workload):
        known = ", ".join(workload_names())
        raise ExperimentError(
            f"unknown workload {arguments.workload!r}: known are {known}, synthetic:PREFIX+SUFFIXxBATCH"
        )
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ExperimentError("--device cuda: PyTorch finds no CUDA device here")
    return TrialSettings(arguments.quick, arguments.model, arguments.workload, device)


def _shown(path: Path) -> str:
    """The path from here, where it is below."""
    try:
        return str(path.resolve().relative_to(Path.cwd().resolve()))
    except ValueError:
        return str(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixmlp experiment", description="New ideas through the whole harness, one folder each."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="new|run|list")
    new = commands.add_parser(
        "new", help="make experiments/NAME with a backend that works, its README and its test"
    )
    new.add_argument("name", metavar="NAME", help="lower-case letters, digits and underscores")
    new.set_defaults(run=_new)
    run = commands.add_parser(
        "run", help="parity, planted faults, speed, memory and what the experiment measures"
    )
    run.add_argument("name", metavar="NAME")
    run.add_argument("--quick", action="store_true", help="small sizes; writes to build/experiments/NAME")
    run.add_argument("--model", help="time on this model (result goes to build/experiments/NAME)")
    run.add_argument("--workload", help="time on this batch (result goes to build/experiments/NAME)")
    run.add_argument("--device", choices=("cpu", "cuda"), help="CUDA where there is one")
    run.add_argument("--out", type=Path, metavar="DIR", help="write the result here instead")
    run.set_defaults(run=_run)
    shown = commands.add_parser("list", help="every experiment with its question, status and result")
    shown.add_argument("--markdown", action="store_true", help="as the table of experiments/README.md")
    shown.set_defaults(run=_list)
    return parser


if __name__ == "__main__":
    sys.exit(main())
