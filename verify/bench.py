"""`radixmlp bench`: measure the figures to reach, print them, keep them with the machine they came from."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixmlp.verify.bars import Bar
from radixmlp.verify.environment import environment, find_checkout
from radixmlp.verify.figures import GROUPS
from radixmlp.verify.measured import measured_file, replace_groups, whole_document, write_atomically
from radixmlp.verify.report import finite, number

INTERRUPTED = 130  # what shells expect after Ctrl-C
_LOG_WIDTH = 140  # where no terminal says how wide it is


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the figures to reach.

    Returns:
        0 if every bar passed, 1 if one failed, 2 for a bad request, 130 if interrupted. JSON is written in
        one step, and only when the run came to its end. A run of some groups replaces theirs in the device's file
        of a checkout, where the tree is clean and the machine and its versions are the same.
    """
    arguments = _parse(argv)
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    names = list(dict.fromkeys(arguments.only)) or list(GROUPS)
    where = environment("cpu")
    out = _out_file(arguments.out, names, where["device"])
    if out is None and not arguments.only:
        console.print("This is no checkout: say where the results go with --out FILE.")
        return 2
    console.print(f"{where['device']}, torch {where['torch']}, {where['threads']} threads")
    try:
        bars = run_groups(names, console)
    except KeyboardInterrupt:
        console.print("Interrupted: nothing was written.")
        return INTERRUPTED
    console.print(_table(bars))
    if out is None:
        root = find_checkout()
        path = None if root is None else measured_file(root, where["device"])
        console.print(replace_groups(path, names, bars, where))
    elif arguments.out is None and any(bar.broken for bar in bars):
        console.print("Not written: a group did not run (--out FILE keeps the rest).")
    else:
        write_atomically(out, finite(whole_document(out, bars, where)))
        console.print(f"Written to {out}")
    judged = [bar for bar in bars if bar.limit is not None or not bar.passed]
    reached = sum(bar.passed for bar in judged)
    console.print(f"{reached} of {len(judged)} bars reached." if judged else "No bar was measured.")
    return 0 if judged and reached == len(judged) else 1


def run_groups(names: Sequence[str], console: Console) -> list[Bar]:
    """Measure the named groups in turn. A group that raises becomes one failed bar; the others still run."""
    bars: list[Bar] = []
    for name in names:
        started = time.perf_counter()
        console.print(f"[bold]{name}[/bold]: {_first_line(GROUPS[name])}")
        with console.status(name) as status:
            try:
                group = GROUPS[name](_progress(console, status.update))
            except Exception as error:
                group = [_broken(name, error)]
        bars += group
        for bar in group:
            _show(bar, console)
        console.print(f"  {time.perf_counter() - started:.0f} s", style="dim", highlight=False)
    return bars


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="radixmlp bench", description=_first_line(main))
    parser.add_argument(
        "--only", action="append", default=[], choices=list(GROUPS), help="one group (repeatable)"
    )
    parser.add_argument(
        "--out", type=Path, help="JSON file (default: paper_figures/measured/<device>.json of a checkout)"
    )
    return parser.parse_args(argv)


def _out_file(asked: Path | None, names: Sequence[str], device: str) -> Path | None:
    if asked is not None:
        return asked
    root = find_checkout()
    if root is None or set(names) != set(GROUPS):
        return None
    return measured_file(root, device)


def _progress(console: Console, update: Callable[[str], None]) -> Callable[[str], None]:
    """A spinner for a person who watches; a line for a log."""
    if console.is_terminal:
        return update
    return lambda what: console.print(f"  {what}", highlight=False)


def _broken(name: str, error: Exception) -> Bar:
    reason = f"{type(error).__name__}: {error}"
    return Bar(f"{name}: did not run", math.nan, None, "higher", "", wrong=reason[:500], broken=True)


def _table(bars: Sequence[Bar]) -> Table:
    table = Table(title="Figures to reach")
    table.add_column("")
    table.add_column("bar", overflow="fold")
    for heading in ("value", "limit", "20–80%", "ideal", "of ideal"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bar in bars:
        row = bar.row()
        sign = "≥" if bar.better == "higher" else "≤"
        limit = "–" if bar.limit is None else f"{sign} {number(bar.limit)}"
        spread = "–" if bar.quantiles is None else "–".join(map(number, bar.quantiles))
        share = "–" if row["share_of_ideal"] is None else f"{100 * row['share_of_ideal']:.0f}%"
        table.add_row(
            _mark(bar), escape(bar.name), number(bar.value), limit, spread, number(bar.ideal), share
        )
    return table


def _show(bar: Bar, console: Console) -> None:
    """A bar as soon as it is measured, and what was measured."""
    console.print(f"  {_mark(bar)} {escape(bar.name)}: {number(bar.value)}", highlight=False)
    if bar.shape and bar.shape not in bar.name:
        console.print(f"    [dim]{escape(bar.shape)}[/dim]", highlight=False)
    if bar.wrong is not None:
        console.print(f"    [red]no valid result: {escape(bar.wrong)}[/red]", highlight=False)


def _mark(bar: Bar) -> str:
    if not bar.passed:
        return "[bold red]failed[/bold red]"
    return "[dim]reported[/dim]" if bar.limit is None else "[green]passed[/green]"


def _first_line(item: Callable[..., Any]) -> str:
    return (item.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    sys.exit(main())
