"""What `radixmlp figures --compare` prints."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from radixmlp.verify.environment import device_name, device_slug
from radixmlp.verify.measured import HOUSE_DEVICE, MeasuredFileError, measured_file
from radixmlp.verify.report import number

from .compare import (
    TOLERANCE,
    Difference,
    broken_claims,
    committed,
    compare,
    incomparable,
    still_missed,
    summary,
    verdicts,
)
from .compare_published import beside_published
from .data import Measured
from .measure import BUILD

_LOG_WIDTH = 140


def run(root: Path, new_file: str, against: Path | None) -> int:
    """Compare and print.

    Args:
        root: the checkout.
        new_file: of the new measurement; "": this machine's in `build/figures/`, or else the file in the tree.
        against: the file to compare with; the last commit's of the same device where omitted.

    Returns:
        0 if every claim holds, 1 if not.
    """
    console = Console(width=None if sys.stdout.isatty() else _LOG_WIDTH)
    new = Measured.read(Path(new_file) if new_file else _newest(root))
    old = _old(root, new, against)
    console.print(f"New: {escape(_title(new))}", highlight=False)
    if old is None:
        console.print("Committed: nothing of this device; held against published numbers and claims alone.")
    else:
        console.print(f"Old: {escape(_title(old))}", highlight=False)
        _print_differences(console, compare(new, old), incomparable(new, old))
    _print_published(console, new)
    broken = broken_claims(new, old)
    _print_claims(console, new, {verdict.name for verdict in broken})
    for verdict in still_missed(new, old):
        console.print(f"missed before, too: {escape(verdict.name)}: {escape(verdict.why)}", highlight=False)
    for verdict in broken:
        console.print(
            f"[bold red]broken[/bold red] {escape(verdict.name)}: {escape(verdict.why)}", highlight=False
        )
    console.print("Every claim holds." if not broken else f"{len(broken)} claims do not hold.")
    return 1 if broken else 0


def _newest(root: Path) -> Path:
    """This machine's new measurement; its file in the tree; the file that the README shows."""
    here = device_slug(device_name("cpu"))
    for path in (root / BUILD / f"{here}.json", measured_file(root, here), measured_file(root, HOUSE_DEVICE)):
        if path.is_file():
            return path
    raise MeasuredFileError("nothing is measured yet: `make reproduce-figures MEASURE=1`")


def _old(root: Path, new: Measured, against: Path | None) -> Measured | None:
    if against is not None:
        return Measured.read(against)
    try:
        return committed(root, measured_file(root, new.device))
    except MeasuredFileError:
        if measured_file(root, new.device).is_file():
            raise
        return None


def _print_differences(console: Console, found: list[Difference], machine: list[str]) -> None:
    console.print(
        "Two medians agree where each lies within the other's 20-80% range, or where they differ by at most "
        f"{TOLERANCE:.0%}; counts agree where they are equal."
    )
    if machine:
        console.print(f"[yellow]Measured under other conditions: {', '.join(machine)} differ.[/yellow]")
    differing = [difference for difference in found if difference.state != "agrees"]
    if differing:
        table = Table("", "what", "old", "new", "new / old", title="What differs")
        for one in differing:
            ratio = "–" if one.ratio is None else f"{one.ratio:.2f}"
            table.add_row(_mark(one.state), escape(one.name), number(one.old), number(one.new), ratio)
        console.print(table)
    counts = ", ".join(f"{count} {state}" for state, count in summary(found).items())
    console.print(f"{len(found)} numbers: {counts}.", highlight=False)


def _mark(state: str) -> str:
    color = {"worse": "red", "gone": "red", "better": "green"}.get(state, "dim")
    return f"[{color}]{state}[/{color}]"


def _print_published(console: Console, new: Measured) -> None:
    table = Table(
        "what", "published", "measured here", "on", title="Beside the published numbers (not judged)"
    )
    for row in beside_published(new):
        table.add_row(*(escape(cell) for cell in row))
    console.print(table)


def _print_claims(console: Console, new: Measured, broken: set[str]) -> None:
    table = Table("", "claim", "numbers", title="Claims besides the bars")
    for verdict in verdicts(new):
        known = "[dim]no data[/dim]" if verdict.holds is None else "[green]holds[/green]"
        state = "[bold red]broken[/bold red]" if verdict.name in broken else known
        table.add_row(state, escape(verdict.name), escape(verdict.why))
    console.print(table)


def _title(measured: Measured) -> str:
    where = measured.environment
    commit = str(where.get("commit"))[:10]
    return f"{measured.path.name}, {measured.device}, commit {commit}, torch {where.get('torch')}"
