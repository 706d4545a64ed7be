"""`radixmlp figures`: draw, measure and compare what `paper_figures/` holds; works on a checkout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from radixmlp.verify.checkout import NoCheckoutError, load_module, require_checkout
from radixmlp.verify.environment import device_name, device_slug
from radixmlp.verify.measured import MeasuredFileError

PACKAGE = "radixmlp_paper_figures"
INTERRUPTED = 130


class UsageError(ValueError):
    """The command line asks for something that there is not."""


def main(argv: Sequence[str] | None = None) -> int:
    """Draw every table and figure of the paper: published, predicted and measured.

    Returns:
        0 if all went well, 1 if a measurement failed or a claim does not hold, 2 for a bad request or outside a
        checkout, 130 if interrupted.
    """
    arguments = _parse(argv)
    try:
        root = require_checkout("radixmlp figures")
        if arguments.compare is not None and not arguments.measure:
            return _compare(root, arguments)
        return _measure_and_draw(root, arguments)
    except (NoCheckoutError, MeasuredFileError, UsageError) as error:
        print(f"radixmlp figures: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("radixmlp"):
            raise
        print(
            f"radixmlp figures needs the package {missing.name!r}: pip install 'radixmlp[report,bench]'",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("Interrupted: finished cells are kept, and the next --measure goes on.", file=sys.stderr)
        return INTERRUPTED


def paper_figures(root: Path, module: str) -> ModuleType:
    """A module of the checkout's `paper_figures/`."""
    return load_module(root / "paper_figures", PACKAGE, module)


def _measure_and_draw(root: Path, arguments: argparse.Namespace) -> int:
    reproduce = paper_figures(root, "reproduce")
    unknown = [number for number in arguments.only if number not in reproduce.FIGURES]
    if unknown:
        raise UsageError(f"there is no figure {unknown[0]}: they are 1 to {max(reproduce.FIGURES)}")
    device, new_file = arguments.device, None
    if arguments.measure or arguments.calibrate:
        measure = paper_figures(root, "measure")
        outcome = (
            measure.measure(root, arguments.quick, arguments.fresh, arguments.every_bar)
            if arguments.measure
            else measure.recalibrate(root)
        )
        for cell, reason in outcome.failed.items():
            print(f"FAILED {cell}: {reason}", file=sys.stderr)
        if outcome.failed:
            print("Nothing was written: the finished cells are kept, and the next --measure goes on.")
            return 1
        print(f"Measured: {outcome.file}")
        print(f"Replaced: {outcome.kept}" if outcome.kept else f"Not put in place: {outcome.reason}")
        if outcome.kept:
            print("The READMEs and ROOFLINE.md show the old numbers until: radixmlp figures --readme")
        device = device_slug(device_name("cpu"))
        new_file = None if outcome.kept or not arguments.measure else outcome.file
    out = _out(root, arguments, reproduce.OUT, new_file)
    data = paper_figures(root, "data")
    drawn = data.load_data(root, device) if new_file is None else data.Data(data.Measured.read(new_file))
    page = reproduce.reproduce(drawn, out, arguments.only or None)
    print(f"Page: {page}")
    if arguments.readme:
        for path in paper_figures(root, "reproduce_readme").redraw(root):
            print(f"Redrawn: {path}")
    return _compare(root, arguments) if arguments.compare is not None else 0


def _compare(root: Path, arguments: argparse.Namespace) -> int:
    return int(paper_figures(root, "compare_command").run(root, arguments.compare, arguments.against))


def _out(root: Path, arguments: argparse.Namespace, default: Path, new_file: Path | None) -> Path:
    """Figures of a measurement that was not put in place do not take the place of the committed ones' either."""
    if arguments.out is not None:
        return Path(arguments.out)
    return root / default if new_file is None else new_file.parent / "out"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="radixmlp figures", description=(main.__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "--only", action="append", type=int, default=[], metavar="N", help="one figure (repeatable)"
    )
    parser.add_argument("--out", type=Path, help="folder (default: paper_figures/out of the checkout)")
    parser.add_argument("--device", help="whose measurements: a file's name in paper_figures/measured/")
    parser.add_argument(
        "--readme",
        action="store_true",
        help="also rewrite the pictures and tables of the READMEs and of ROOFLINE.md",
    )
    parser.add_argument("--measure", action="store_true", help="measure this machine first (resumable)")
    parser.add_argument("--calibrate", action="store_true", help="measure the roofline's calibration alone")
    parser.add_argument("--fresh", action="store_true", help="with --measure: forget finished cells")
    parser.add_argument(
        "--every-bar",
        action="store_true",
        help="with --measure: all groups of the bench, not the figures' alone",
    )
    parser.add_argument("--quick", action="store_true", help="with --measure: tiny models, below build/ only")
    parser.add_argument(
        "--compare",
        nargs="?",
        const="",
        metavar="FILE",
        help="say how the new measurement (FILE, or this machine's) differs from the committed one",
    )
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="with --compare: instead of the committed"
    )
    arguments = parser.parse_args(argv)
    if (arguments.fresh or arguments.quick or arguments.every_bar) and not arguments.measure:
        parser.error("--fresh, --quick and --every-bar go with --measure")
    if arguments.against is not None and arguments.compare is None:
        parser.error("--against goes with --compare")
    if arguments.device is not None and arguments.measure:
        parser.error("--measure measures this machine: leave out --device")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
