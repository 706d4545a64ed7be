"""What a new measurement says against the committed one and the published numbers, and which claims still hold.

The rule: two medians agree where each lies between the other's 20% and 80% quantile, or where they differ by at most
`TOLERANCE`. Counts (gamma) agree where they are equal. Disagreement is shown; what fails is a claim: a bar with a
limit, or a row of `compare_claims.CLAIMS`. A bar that the old measurement misses too is no claim: it is shown.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from radixmlp.verify.measured import MeasuredFileError, differences, parse_document
from radixmlp.verify.report import number

from .compare_claims import CLAIMS, Verdict
from .data import Data, Measured, Point

TOLERANCE = 0.10
COUNTED = ("gamma",)  # figures whose numbers are counts
State = Literal["agrees", "better", "worse", "new", "gone"]


@dataclass(frozen=True)
class Difference:
    """One number in both measurements, or in one of them.

    `state`: "better" or "worse" where they disagree, "new" or "gone" where only one has it.
    """

    name: str
    state: State
    old: float | None
    new: float | None
    unit: str

    @property
    def ratio(self) -> float | None:
        return None if not self.old or self.new is None else self.new / self.old


def compare(new: Measured, old: Measured) -> list[Difference]:
    """Every bar and every point of both, by name."""
    news, olds = _numbers(new), _numbers(old)
    found = []
    for name in dict.fromkeys([*olds, *news]):
        before, after = olds.get(name), news.get(name)
        known = after or before
        assert known is not None
        state: State
        if before is None:
            state = "new"
        elif after is None:
            state = "gone"
        elif agree(before.point, after.point):
            state = "agrees"
        else:
            state = "better" if (after.point.y > before.point.y) == known.higher_is_better else "worse"
        y = [None if one is None else one.point.y for one in (before, after)]
        found.append(Difference(name, state, y[0], y[1], known.point.unit))
    return found


def agree(one: Point, other: Point) -> bool:
    """The rule of this module."""
    if one.figure in COUNTED:
        return math.isclose(one.y, other.y, rel_tol=1e-9)
    if one.y == other.y:
        return True
    if _within(one.y, other) and _within(other.y, one):
        return True
    return abs(one.y - other.y) <= TOLERANCE * min(abs(one.y), abs(other.y))


def broken_claims(new: Measured, old: Measured | None) -> list[Verdict]:
    """Claims that do not hold in the new measurement, or that it no longer has the data for."""
    before = {row["name"] for row in missed_bars(old)}
    broken = [_of_bar(row) for row in missed_bars(new) if row["name"] not in before]
    known = (
        set() if old is None else {claim.name for claim in CLAIMS if claim.judge(Data(old)).holds is not None}
    )
    judged = {row["name"] for row in new.bars if row["limit"] is not None}
    for row in [] if old is None else old.bars:
        if row["limit"] is not None and row["passed"] and row["name"] not in judged:
            broken.append(Verdict(f"bar: {row['name']}", False, "no longer measured"))
    for verdict in verdicts(new):
        if verdict.holds is False:
            broken.append(verdict)
        elif verdict.holds is None and verdict.name in known:
            broken.append(Verdict(verdict.name, False, "no longer measured"))
    return broken


def still_missed(new: Measured, old: Measured | None) -> list[Verdict]:
    """Bars that both measurements miss."""
    before = {row["name"] for row in missed_bars(old)}
    return [_of_bar(row) for row in missed_bars(new) if row["name"] in before]


def missed_bars(measured: Measured | None) -> list[dict[str, Any]]:
    """Rows of bars that are below their limit, or wrong."""
    return [] if measured is None else [row for row in measured.bars if not row["passed"]]


def _of_bar(row: dict[str, Any]) -> Verdict:
    value, limit = (number(row[key]) for key in ("value", "limit"))
    return Verdict(f"bar: {row['name']}", False, row["wrong"] or f"{value}, limit {limit}")


def verdicts(new: Measured) -> list[Verdict]:
    """Every stated claim, judged."""
    data = Data(new)
    return [claim.judge(data) for claim in CLAIMS]


def incomparable(new: Measured, old: Measured) -> list[str]:
    """What makes the two measurements differ besides the code; empty where nothing does."""
    return differences(old.environment, new.environment)


def committed(root: Path, path: Path) -> Measured:
    """The measurement at `path` as the last commit has it; the file itself where git does not know it.

    Raises:
        MeasuredFileError: neither can be read.
    """
    try:
        place = path.resolve().relative_to(root.resolve())
        shown = subprocess.run(
            ["git", "-C", str(root), "show", f"HEAD:{place.as_posix()}"], capture_output=True, timeout=30
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return Measured.read(path)
    if shown.returncode != 0:
        return Measured.read(path)
    try:
        text = shown.stdout.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MeasuredFileError(f"HEAD:{place}: not UTF-8 ({error})") from None
    return Measured.of(parse_document(text, f"HEAD:{place}"), path)


@dataclass(frozen=True)
class _Number:
    point: Point
    higher_is_better: bool


def _numbers(measured: Measured) -> dict[str, _Number]:
    numbers = {}
    for row in measured.bars:
        if row["value"] is not None:
            low, high = row["quantiles"] or (None, None)
            point = Point("bars", row["name"], 0, row["value"], "", row["shape"], low, high)
            numbers[f"bar: {row['name']}"] = _Number(point, row["better"] == "higher")
    for point in measured.points:
        name = f"{point.figure}: {point.series} at {point.x:g} ({point.unit})"
        numbers[name] = _Number(point, point.unit == "times")
    return numbers


def _within(value: float, point: Point) -> bool:
    return point.q20 is not None and point.q80 is not None and point.q20 <= value <= point.q80


def summary(differences_found: Sequence[Difference]) -> dict[str, int]:
    """How many numbers are in each state."""
    counts: dict[str, Any] = {}
    for difference in differences_found:
        counts[difference.state] = counts.get(difference.state, 0) + 1
    return counts
