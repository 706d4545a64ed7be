"""What the figures are drawn from: measurements of this project, chosen by device, and what was published."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from radixmlp.verify.environment import device_slug
from radixmlp.verify.measured import HOUSE_DEVICE, MeasuredFileError, is_gpu, measured_file, read_document

_SHORT = 10  # characters of a commit


@dataclass(frozen=True)
class Point:
    """One measured point of a figure, as it stands under `series` in a file of measurements.

    Args:
        figure, series: which figure it is for, and which line of it.
        x, y: where it lies; `y` is a median where `q20` and `q80` are given.
        q20, q80: quantiles of what `y` is the median of.
        unit: of `y` ("times", "s", "us", "share").
        shape: what was run, in words.
        commit: of the code that was measured.
        details: whatever else is worth keeping, as plain JSON.
    """

    figure: str
    series: str
    x: float
    y: float
    unit: str
    shape: str
    q20: float | None = None
    q80: float | None = None
    commit: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_row(cls, row: dict[str, Any], commit: str | None) -> Point:
        """A row of the file; `commit` where the row names none."""
        known = {key: row[key] for key in cls.__dataclass_fields__ if key in row}
        return cls(**{"shape": "", "details": {}, **known, "commit": row.get("commit") or commit})


@dataclass(frozen=True)
class Measured:
    """One file of `paper_figures/measured/`."""

    path: Path
    environment: dict[str, Any]
    bars: list[dict[str, Any]]
    points: list[Point]
    roofline: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raises MeasuredFileError where the file cannot be read as measurements."""
        return cls.of(read_document(path), path)

    @classmethod
    def of(cls, document: dict[str, Any], path: Path) -> Measured:
        """A document as `read_document` gives it."""
        environment = document["environment"]
        points = [Point.of_row(row, environment.get("commit")) for row in document.get("series", [])]
        return cls(path, environment, document["bars"], points, document.get("roofline"))

    def calibrated(self) -> dict[str, Any] | None:
        """What `roofline.cpu_device` takes; None where this machine is not calibrated."""
        if not self.roofline:
            return None
        return {"environment": self.environment, "roofline": self.roofline}

    @property
    def device(self) -> str:
        return str(self.environment["device"])


class Data:
    """What a figure asks for its numbers. It remembers what it gave away, for the caption.

    Args:
        cpu: measurements of a CPU, or None.
        gpus: measurements of GPUs.
    """

    def __init__(self, cpu: Measured | None, gpus: Iterable[Measured] = ()) -> None:
        self.cpu = cpu
        self.gpus = list(gpus)
        self._given: dict[str, set[str]] = {}

    def points(self, figure: str, series: str) -> list[Point]:
        """The measured points of one line of a figure, by x; none where it was not measured."""
        if self.cpu is None:
            return []
        found = [p for p in self.cpu.points if (p.figure, p.series) == (figure, series)]
        self._remember(self.cpu, [p.commit for p in found])
        return sorted(found, key=lambda p: p.x)

    def series_of(self, figure: str) -> list[str]:
        """The names of a figure's measured lines, in the order of the file."""
        points = [] if self.cpu is None else self.cpu.points
        return list(dict.fromkeys(p.series for p in points if p.figure == figure))

    def bar(self, name: str, x: float = 0.0) -> Point | None:
        """The CPU's bar called `name`, as a point at `x`; None where it was not measured or came out wrong."""
        return None if self.cpu is None else self._bar(self.cpu, name, x)

    def gpu_bar(self, name: str, x: float = 0.0) -> tuple[str, Point] | None:
        """(device, point) of the first GPU that has the bar."""
        for gpu in self.gpus:
            point = self._bar(gpu, name, x)
            if point is not None:
                return gpu.device, point
        return None

    def bars(self, start: str) -> list[Point]:
        """All bars whose name starts with `start`."""
        rows = [] if self.cpu is None else self.cpu.bars
        found = [self.bar(row["name"]) for row in rows if row["name"].startswith(start)]
        return [point for point in found if point is not None]

    def provenance(self) -> str:
        """Whose measurements were used since the last call, for a caption."""
        given, self._given = self._given, {}
        if not given:
            return "Nothing in it is measured by this project."
        parts = [f"{device} (commit {', '.join(sorted(commits))})" for device, commits in given.items()]
        return f"Measured on {'; '.join(parts)}."

    def _bar(self, source: Measured, name: str, x: float) -> Point | None:
        row = next((row for row in source.bars if row["name"] == name), None)
        if row is None or row["value"] is None or row["wrong"] is not None:
            return None
        low, high = row["quantiles"] or (None, None)
        commit = row.get("commit") or source.environment.get("commit")
        details = {**row["details"], "ideal": row["ideal"], "limit": row["limit"]}
        self._remember(source, [commit])
        return Point("bars", name, x, row["value"], "times", row["shape"], low, high, commit, details)

    def _remember(self, source: Measured, commits: Iterable[str | None]) -> None:
        for commit in commits:
            self._given.setdefault(source.device, set()).add((commit or "unknown")[:_SHORT])


class Drawing(NamedTuple):
    """What a figure's script returns: one picture or one table, or both.

    `caption` says what is published, what predicted and what measured; `name` is the files' name.
    """

    number: int
    name: str
    title: str
    caption: str
    figure: Any = None
    table: Any = None


def load_data(root: Path, device: str | None = None) -> Data:
    """The committed measurements of a checkout.

    Args:
        device: a CPU's name, or the name of its file without `.json`; `HOUSE_DEVICE` where omitted.

    Raises:
        MeasuredFileError: that device has no file, or one of the files cannot be read.
    """
    path = measured_file(root, device or HOUSE_DEVICE)
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.json"))) or "none"
        raise MeasuredFileError(
            f"{device_slug(device or HOUSE_DEVICE)} has no measurements in {path.parent} (there: {known}); "
            "`make reproduce-figures MEASURE=1` measures this machine"
        )
    chosen = Measured.read(path)
    if is_gpu(chosen.environment):
        raise MeasuredFileError(
            f"{path} is of a GPU: those are drawn anyway; name the CPU to draw beside them"
        )
    others = [Measured.read(file) for file in sorted(path.parent.glob("*.json")) if file != path]
    return Data(chosen, [other for other in others if is_gpu(other.environment)])
