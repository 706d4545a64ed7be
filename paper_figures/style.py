"""How figures look: colours, markers and dashes that a colour-blind reader or a black-and-white print tells apart.

Three kinds of numbers never look alike: published ones are black-edged and grey, predicted ones are dashed and
hollow, measured ones are solid and filled, with whiskers from the 20% to the 80% quantile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

matplotlib.use("Agg")

FORMATS = ("svg", "pdf", "png")
SETTINGS = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "svg.hashsalt": "radixmlp",
    "svg.fonttype": "path",
    "hatch.linewidth": 0.6,
    "axes.axisbelow": True,
}
GRID = "#DDDDDD"
INK = "#222222"


class Look(NamedTuple):
    """One path's colour (Okabe-Ito), marker, dashes and hatch."""

    color: str
    marker: str
    linestyle: Any
    hatch: str


LOOKS = {
    "dense": Look("#666666", "D", "-", ""),
    "scatter": Look("#D55E00", "s", "-", "////"),
    "trie": Look("#0072B2", "o", "-", ""),
    "prefix-kv": Look("#009E73", "^", "-", "...."),
    "auto": Look("#CC79A7", "v", "-", "xxxx"),
    "scatter-gpu": Look("#E69F00", "X", "-", "////"),
    "trie-gpu": Look("#56B4E9", "P", "-", ""),
    "rust": Look("#E69F00", "<", "-", "\\\\\\\\"),
    "other": Look("#56B4E9", "X", "-", "oo"),
}
NAMES = {
    "dense": "dense",
    "scatter": "the paper's path",
    "trie": "the trie",
    "prefix-kv": "prefix KV cache",
    "auto": "auto",
}


def new_figure(columns: int = 1, rows: int = 1, size: tuple[float, float] | None = None) -> Any:
    """A figure and its axes [rows][columns] (always a list of lists)."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=size or (4.1 * columns, 3.4 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
    for one in axes.flat:
        one.grid(color=GRID, linewidth=0.6)
        for side in ("top", "right"):
            one.spines[side].set_visible(False)
    return figure, [list(row) for row in axes]


def measured(
    axes: Axes, points: Sequence[Any], path: str, label: str, line: bool = True, without: str = ""
) -> None:
    """Filled markers with 20/80% whiskers; where there are no points the legend says so, of `without` or `label`."""
    look = LOOKS[path]
    if not points:
        absent(axes, without or label, look)
        return
    ordered = sorted(points, key=lambda point: point.x)
    axes.errorbar(
        [p.x for p in ordered],
        [p.y for p in ordered],
        yerr=spread(ordered),
        label=f"measured: {label}",
        color=look.color,
        marker=look.marker,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linestyle=look.linestyle if line else "none",
        linewidth=1.6,
        ecolor=look.color,
        elinewidth=1.1,
        capsize=3,
        zorder=4,
    )


def predicted(axes: Axes, x: Sequence[float], y: Sequence[float], path: str, label: str) -> None:
    """Dashed, with hollow markers."""
    look = LOOKS[path]
    axes.plot(
        x,
        y,
        label=f"predicted: {label}",
        color=look.color,
        linestyle=(0, (4, 2)),
        linewidth=1.2,
        marker=look.marker,
        markersize=4.5,
        markerfacecolor="white",
        zorder=3,
    )


def published(axes: Axes, x: Sequence[float], y: Sequence[float], label: str) -> None:
    """Grey stars with a black edge."""
    if not len(x):
        axes.plot([], [], linestyle="none", marker="*", color="white", label=f"published: {label}: no number")
        return
    axes.plot(
        x,
        y,
        linestyle="none",
        marker="*",
        markersize=13,
        markerfacecolor="#BBBBBB",
        markeredgecolor="black",
        markeredgewidth=1.0,
        label=f"published: {label}",
        zorder=5,
    )


def ideal(axes: Axes, x: Sequence[float], y: Sequence[float], path: str) -> None:
    """A thin dotted line: the FLOP ratio."""
    look = LOOKS[path]
    axes.plot(
        x,
        y,
        color=look.color,
        linewidth=1.0,
        linestyle=":" if path == "trie" else "-.",
        label=f"FLOP ideal, {NAMES[path]}",
    )


def absent(axes: Axes, label: str, look: Look | None = None, where: str = "on this device") -> None:
    """A legend entry for a series that has no data, instead of leaving it out."""
    look = look or LOOKS["other"]
    axes.plot(
        [],
        [],
        linestyle="none",
        marker=look.marker,
        color=look.color,
        markerfacecolor="white",
        label=f"{label}: not measured {where}".strip(),
    )


def spread(points: Sequence[Any]) -> list[list[float]]:
    """[below, above] of points with `y`, `q20`, `q80`; 0 where a point has no quantiles."""
    below = [0.0 if p.q20 is None else max(0.0, p.y - p.q20) for p in points]
    above = [0.0 if p.q80 is None else max(0.0, p.q80 - p.y) for p in points]
    return [below, above]


def bar(axes: Axes, x: float, point: Any, path: str, width: float, kind: str = "measured") -> None:
    """One upright bar: filled with the path's hatch where measured, dashed and hollow where predicted."""
    look = LOOKS[path]
    if kind == "predicted":
        axes.bar(x, point.y, width, facecolor="white", edgecolor=look.color, linestyle="--", hatch=look.hatch)
    elif kind == "published":
        axes.bar(x, point.y, width, facecolor="#DDDDDD", edgecolor="black", hatch=look.hatch)
    else:
        error: dict[str, Any] = (
            {"yerr": spread([point]), "ecolor": "black", "capsize": 3} if point.q20 is not None else {}
        )
        axes.bar(x, point.y, width, facecolor=look.color, edgecolor="black", hatch=look.hatch, **error)


def key(axes: Axes, path: str, label: str, kind: str = "measured") -> None:
    """A legend entry for what `bar` draws."""
    look = LOOKS[path]
    face = {"measured": look.color, "predicted": "white", "published": "#DDDDDD"}[kind]
    edge = look.color if kind == "predicted" else "black"
    axes.fill_between(
        [math.nan],
        [math.nan],
        facecolor=face,
        edgecolor=edge,
        linestyle="--" if kind == "predicted" else "-",
        hatch=look.hatch,
        label=label,
    )


def plain_log(axes: Axes, which: str, ticks: Sequence[float]) -> None:
    """A logarithmic axis with these ticks, written as plain numbers."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_ticks(list(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: _plain(value)))
    axis.set_minor_formatter(NullFormatter())
    axis.set_minor_locator(NullLocator())


def _plain(value: float) -> str:
    """As people write it: powers of two from 1,024 on as 1K, 64K, 1M."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def legend_below(figure: Figure, axes: Axes | Sequence[Axes], columns: int = 3) -> None:
    """One legend under the panels, each label once."""
    seen: dict[str, Any] = {}
    for one in [axes] if isinstance(axes, Axes) else axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    figure.legend(
        seen.values(), seen.keys(), loc="outside lower center", ncols=columns, fontsize=8, frameon=False
    )


def save(figure: Figure, folder: Path, name: str, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write the figure in each format; the same figure gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata: dict[str, dict[str, Any]] = {
        "svg": {"Date": None, "Creator": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
        "png": {"Software": None},
    }
    paths = []
    with matplotlib.rc_context(SETTINGS):
        for suffix in formats:
            path = folder / f"{name}.{suffix}"
            figure.savefig(path, format=suffix, metadata=metadata[suffix], dpi=160)
            paths.append(path)
    return paths
