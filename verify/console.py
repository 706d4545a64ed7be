"""What a person sees: progress (plain lines where there is no terminal), a table, the report's place."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from radixmlp.verify.records import Record

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_WORST_SHOWN = 20


class Watch:
    """Progress over a number of cells; a context manager."""

    def __init__(self, total: int, interactive: bool | None = None) -> None:
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        self.cell = ""
        self._bar: Progress | None = (
            _rich_bar() if (sys.stdout.isatty() if interactive is None else interactive) else None
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start(self, cell: str) -> None:
        """A cell begins."""
        self.cell = cell
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=cell)

    def say(self, what: str) -> None:
        """What the cell is doing now; terminals only."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=f"{self.cell} · {what}")

    def finish(self, records: Sequence[Record]) -> None:
        """The cell is over."""
        self.done += 1
        failed = sum(not record.passed for record in records)
        line = f"{'FAILED' if failed else 'ok':>6}  {self.cell}" + (
            f"  ({failed} of {len(records)} failed)" if failed else ""
        )
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)
            if failed:
                self._bar.console.print(line, style="red", markup=False, highlight=False)
            return
        elapsed = time.monotonic() - self.started
        print(f"[{self.done:>3}/{self.total} {elapsed:5.0f} s] {line}", flush=True)


def show_result(
    records: Sequence[Record], failed: Sequence[Record], passed: bool, paths: Mapping[str, Path]
) -> None:
    """The table by kind, the failures, the verdict and the report's place."""
    from rich.console import Console
    from rich.table import Table

    console = Console() if sys.stdout.isatty() else Console(width=140)
    table = Table("kind", "judged", "failed", "reported only", title="radixmlp verify")
    for kind in dict.fromkeys(record.kind for record in records):
        group = [record for record in records if record.kind == kind]
        judged = sum(record.limit is not None for record in group)
        red = sum(record.kind == kind for record in failed)
        table.add_row(kind, str(judged), f"[red]{red}[/red]" if red else "0", str(len(group) - judged))
    console.print(table)
    _show_speed(console, records)
    for record in failed[:_WORST_SHOWN]:
        console.print(f"FAILED {_line(record)}", style="red", markup=False, highlight=False, soft_wrap=True)
    if len(failed) > _WORST_SHOWN:
        console.print(f"... and {len(failed) - _WORST_SHOWN} more in the report", style="red")
    console.print(
        "every check passed" if passed else "NOT VERIFIED", style="bold green" if passed else "bold red"
    )
    console.print(f"report: {paths['html']}", highlight=False, soft_wrap=True)


def _show_speed(console: object, records: Sequence[Record]) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    speed = [record for record in records if record.kind == "speed"]
    if not speed:
        return
    table = Table(
        "model", "workload", "dtype", "r", "attention", "speed-up", "ideal", title="over the fastest dense"
    )
    for record in speed:
        ideal, ratio = record.details.get("ideal"), record.details.get("r")
        shown = [
            f"{value:.2f}" if isinstance(value, float) else "–" for value in (ratio, record.value, ideal)
        ]
        table.add_row(
            record.model, record.workload, record.dtype, shown[0], record.attention, shown[1], shown[2]
        )
    console.print(table)


def _line(record: Record) -> str:
    limit = "" if record.limit is None else f" (limit {record.limit:.3g})"
    where = ", ".join(
        part for part in (record.model, record.workload, record.attention, record.dtype) if part != "none"
    )
    details = ", ".join(f"{key}={value}" for key, value in record.details.items())
    return f"{record.kind} {record.metric}: {record.value:.4g}{limit} at {where}; {details}"[:600]


def _rich_bar() -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns)
