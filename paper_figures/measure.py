"""Measure what the figures show on this machine: cell by cell, each kept as soon as it is finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from radixmlp.verify.environment import device_slug, environment
from radixmlp.verify.figures import GROUPS
from radixmlp.verify.measured import (
    MeasuredFileError,
    differences,
    measured_file,
    read_document,
    write_atomically,
)
from radixmlp.verify.report import finite

from .measure_cells import FIGURE_GROUPS, QUICK, Sizes, all_cells, calibration
from .measure_run import Cell, run_cells
from .measure_store import CellStore, fingerprint

BUILD = Path("build", "figures")  # below the checkout


@dataclass
class Outcome:
    """How a run ended.

    Args:
        file: the new measurement, in `build/figures/`; None where a cell failed.
        kept: where it was put in place of the committed one; None where it was not.
        reason: why it was not.
        failed: cell -> why it has no result.
        document: what was measured.
    """

    file: Path | None = None
    kept: Path | None = None
    reason: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    document: dict[str, Any] = field(default_factory=dict)


def measure(
    root: Path,
    quick: bool = False,
    fresh: bool = False,
    every_bar: bool = False,
    cells: Sequence[Cell] | None = None,
) -> Outcome:
    """Measure every cell that has no result yet, then write the whole.

    A finished cell lies in `build/figures/<device>/`; a run that was killed goes on there, as long as code, machine
    and versions are the same. The whole is written to `build/figures/<device>.json`, and, from a clean tree and with
    every cell, also in place of `paper_figures/measured/<device>.json`. Bars that were not measured stay as they are
    in that file, each with its commit, if it is of the same machine and versions.

    Args:
        root: the checkout.
        quick: tiny models, no bench: a smoke test that writes below `build/figures/quick/` only.
        fresh: forget the finished cells first.
        every_bar: run all groups of the bench, not only those whose bars the figures show.
        cells: what to measure; all of the figures' where omitted.
    """
    where = environment("cpu")
    sizes = QUICK if quick else Sizes()
    slug = device_slug(where["device"])
    folder = root / BUILD / ("quick" if quick else "")
    key = fingerprint(root, where, sizes.name)
    store = CellStore(folder / slug, key)
    if fresh:
        store.clear()
    if cells is None:
        groups = tuple(GROUPS) if every_bar else tuple(FIGURE_GROUPS)
        cells = all_cells(sizes, () if quick else groups)
    results, failed = run_cells(cells, store)
    if failed:
        return Outcome(failed=failed)
    place = measured_file(root, where["device"])
    document = assemble(list(results.values()), where, None if quick else _comparable(place, where))
    file = folder / f"{slug}.json"
    write_atomically(file, document)
    outcome = Outcome(file=file, document=document)
    if quick:
        outcome.reason = "this was a quick run"
    elif where["dirty"] is not False:
        outcome.reason = "the tree is not clean: commit, and run again (nothing is measured twice)"
    elif fingerprint(root, where, sizes.name) != key:
        outcome.reason = "the code changed while it was measured: run again"
    else:
        outcome.kept = place
        write_atomically(place, document)
        store.clear()
    return outcome


def recalibrate(root: Path) -> Outcome:
    """Make the calibration alone anew, in the place of the one in this device's file."""
    where = environment("cpu")
    results, failed = run_cells(
        [Cell("roofline", 40, calibration)], CellStore(root / BUILD / "calibration", "")
    )
    if failed:
        return Outcome(failed=failed)
    place = measured_file(root, where["device"])
    old = _comparable(place, where)
    file = root / BUILD / "calibration.json"
    outcome = Outcome(file=file, document=results["roofline"])
    write_atomically(file, outcome.document)
    if old is None:
        outcome.reason = f"{place.name} is not of this machine and these versions: measure all of it"
    elif where["dirty"] is not False:
        outcome.reason = "the tree is not clean: commit, and run again"
    else:
        outcome.kept = place
        write_atomically(place, old | results["roofline"])
    CellStore(root / BUILD / "calibration", "").clear()
    return outcome


def assemble(
    results: Sequence[dict[str, Any]], where: dict[str, Any], old: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The document of a device: every cell was measured with the code of this commit, so all points carry it.

    Args:
        old: the document whose bars stay where their group was not measured.
    """
    commit = where["commit"]
    bars = [row for result in results for row in result.get("bars", [])]
    new_groups = {_group_of(row) for row in bars}
    if old is not None:
        before = old["environment"].get("commit")
        kept = [row for row in old["bars"] if _group_of(row) not in new_groups]
        bars += [row | {"commit": row.get("commit") or before} for row in kept]
    order = list(GROUPS)
    bars.sort(key=lambda row: order.index(_group_of(row)) if _group_of(row) in order else len(order))
    document: dict[str, Any] = {
        "environment": where,
        "bars": bars,
        "series": [row | {"commit": commit} for result in results for row in result.get("series", [])],
    }
    for result in results:
        if "roofline" in result:
            document["roofline"] = result["roofline"]
    return finite(document)


def _group_of(row: dict[str, Any]) -> str:
    return str(row["name"]).split(":")[0]


def _comparable(place: Path, where: dict[str, Any]) -> dict[str, Any] | None:
    """The document there, if it is of this machine and these versions."""
    try:
        old = read_document(place)
    except MeasuredFileError:
        return None
    return None if differences(old["environment"], where) else old
