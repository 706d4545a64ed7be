"""Running the cells of a measurement in turn, with a progress bar; each is kept as soon as it is finished."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from radixmlp.verify.report import finite

from .measure_store import CellStore

_LOG_WIDTH = 140
Run = Callable[[Callable[[str], None]], dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Args:
        name: of its file, and what a person sees.
        seconds: how long it takes on two cores, roughly; for the progress bar.
        run: measures; returns {"bars": rows}, {"series": rows} or {"roofline": calibration}.
    """

    name: str
    seconds: float
    run: Run


def run_cells(cells: Sequence[Cell], store: CellStore) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Results by cell, and why the others have none. A cell that raises does not stop those after it."""
    results: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    with _watch(console) as watch:
        task = watch.add_task("", total=sum(cell.seconds for cell in cells), done=0, cells=len(cells))
        for number, cell in enumerate(cells, start=1):
            watch.update(task, description=cell.name, done=number - 1)
            result = store.load(cell.name)
            started = time.monotonic()
            if result is None:
                try:
                    result = finite(cell.run(_teller(watch, task, cell.name)))
                except Exception as error:
                    failed[cell.name] = f"{type(error).__name__}: {error}"
                else:
                    store.save(cell.name, result, time.monotonic() - started)
                gc.collect()
                _say(console, watch, cell.name, failed.get(cell.name), time.monotonic() - started)
            if result is not None:
                results[cell.name] = result
            watch.update(task, advance=cell.seconds, done=number)
    return results, failed


def _watch(console: Console) -> Progress:
    columns = (
        BarColumn(bar_width=30),
        TextColumn("{task.fields[done]}/{task.fields[cells]}"),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    # Once a second: redrawing takes a core from what is being timed.
    return Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=1)


def _teller(watch: Progress, task: Any, cell: str) -> Callable[[str], None]:
    return lambda what: watch.update(task, description=f"{cell}: {what}")


def _say(console: Console, watch: Progress, cell: str, failed: str | None, seconds: float) -> None:
    mark = "ok" if failed is None else "FAILED"
    line = f"{mark:>6}  {cell}  {seconds:.0f} s" + ("" if failed is None else f"  {failed[:500]}")
    (watch.console if console.is_terminal else console).print(
        line, markup=False, highlight=False, style=None if failed is None else "red", soft_wrap=True
    )
