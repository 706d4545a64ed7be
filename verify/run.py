"""`radixmlp verify`: run the matrix, show the result, write the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from radixmlp.optimized.attention import attention_backends
from radixmlp.verify.console import Watch, show_result
from radixmlp.verify.matrix import Settings, plan_cells
from radixmlp.verify.models import DTYPES, check_model_name, model_names
from radixmlp.verify.passages import load_passages
from radixmlp.verify.report import environment, failures, verdict, write_report
from radixmlp.verify.runner import Runner
from radixmlp.verify.subject import Subject, fast_path
from radixmlp.verify.workloads import is_workload, workload_names

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None, subject: Subject | None = None) -> int:
    """Verify.

    Args:
        argv: command line without the program's name; None: the process's own.
        subject: what is on trial; None: what users call.

    Returns:
        0 only when every check passed; 1: one failed; 2: an unknown name or unreadable data; 130: interrupted
        (the report holds what was measured until then).
    """
    arguments = build_parser().parse_args(argv)
    try:
        settings = read_settings(arguments)
    except (ValueError, OSError) as error:
        print(f"radixmlp verify: {error}", file=sys.stderr)
        return EXIT_USAGE
    return verify(settings, subject or fast_path())


def verify(settings: Settings, subject: Subject) -> int:
    """Run the matrix of `settings` on `subject`; the exit code."""
    cells = plan_cells(settings)
    runner = Runner(settings, subject)
    interrupted = False
    with Watch(len(cells)) as watch:
        try:
            for cell in cells:
                watch.start(str(cell))
                watch.finish(runner.run(cell, watch.say))
        except KeyboardInterrupt:
            interrupted = True
    records = runner.records
    paths = write_report(settings.out, environment(settings.device), records)
    passed = verdict(records) and not interrupted
    show_result(records, failures(records), passed, paths)
    if interrupted:
        print(f"interrupted after {watch.done} of {watch.total} steps", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0 if passed else EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    """The options of `radixmlp verify`."""
    parser = argparse.ArgumentParser(
        prog="radixmlp verify",
        description="Prove the fast path equal to the truth, measure it, write a report.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="the short matrix: every kind of check, small sizes"
    )
    repeated: dict[str, Any] = {"action": "append", "default": [], "metavar": "NAME"}
    parser.add_argument(
        "--model", **repeated, help=f"{', '.join(model_names())}; a folder; a Hugging Face name"
    )
    parser.add_argument(
        "--workload", **repeated, help=f"{', '.join(workload_names())}, synthetic:PREFIX+SUFFIXxBATCH"
    )
    parser.add_argument("--attention", **repeated, help=f"{', '.join(attention_backends())}, auto")
    parser.add_argument("--dtype", **repeated, help=", ".join(DTYPES))
    parser.add_argument(
        "--data", type=Path, metavar="FILE.jsonl", help="`query` and `passages` for the text workloads"
    )
    parser.add_argument("--prefix-lengths", metavar="256,512", default="", help="more synthetic workloads")
    parser.add_argument("--device", help="cpu or cuda; CUDA where there is one")
    parser.add_argument(
        "--out", type=Path, default=Path("build/verify"), metavar="DIR", help="folder of the report"
    )
    return parser


def read_settings(arguments: argparse.Namespace) -> Settings:
    """Check every name before anything is computed.

    Raises:
        ValueError: an unknown name (the message lists the known ones) or unreadable data.
        FileNotFoundError: no such data file.
    """
    for model in arguments.model:
        check_model_name(model)
    for workload in arguments.workload:
        if not is_workload(workload):
            known = ", ".join(workload_names())
            raise ValueError(
                f"unknown workload {workload!r}: known are {known}, synthetic:PREFIX+SUFFIXxBATCH"
            )
    _check_names("attention", arguments.attention, [*attention_backends(), "auto"])
    _check_names("dtype", arguments.dtype, list(DTYPES))
    if arguments.data is not None:
        load_passages(arguments.data)
    return Settings(
        quick=arguments.quick,
        models=tuple(arguments.model),
        workloads=tuple(arguments.workload),
        attentions=tuple(arguments.attention),
        dtypes=tuple(arguments.dtype),
        data=arguments.data,
        prefix_lengths=_lengths(arguments.prefix_lengths),
        device=_device(arguments.device),
        out=arguments.out,
    )


def _check_names(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}: known are {', '.join(known)}")


def _lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"--prefix-lengths {text!r}: expected numbers such as 256,512") from None
    if any(length < 1 for length in lengths):
        raise ValueError(f"--prefix-lengths {text!r}: every length must be at least 1")
    return lengths


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: PyTorch finds no CUDA device here")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}: known are cpu, cuda")
    return name
