"""The report's plots, as SVG text that stands inside a page."""

from __future__ import annotations

import io
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from radixmlp.verify.records import Record

matplotlib.use("Agg")


class Plot(NamedTuple):
    """One figure: its title, a sentence that says how to read it, and the SVG element."""

    title: str
    caption: str
    svg: str


class Style(NamedTuple):
    """Colour from the Okabe-Ito palette (told apart by colour-blind readers) and a marker of its own."""

    color: str
    marker: str


_STYLES = {
    "trie": Style("#0072B2", "o"),
    "scatter": Style("#D55E00", "s"),
    "prefix": Style("#009E73", "^"),
    "dense": Style("#666666", "D"),
}
_OTHER_STYLES = (Style("#CC79A7", "v"), Style("#E69F00", "P"), Style("#56B4E9", "X"), Style("#000000", "*"))
_SIZE = (5.6, 4.3)  # inches


def speed_plots(records: Iterable[Record]) -> list[Plot]:
    """Speed-up against compression ratio, then one plot per model over prefix length; none without speed."""
    speed = [
        r
        for r in records
        if r.metric == "speedup" and "r" in r.details and not r.attention.startswith("dense")
    ]
    if not speed:
        return []
    plots = [_over_ratio(speed)]
    by_model: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in speed:
        if record.details.get("prefix_length") is not None:
            by_model[record.model, record.dtype].append(record)
    lengths = {key: {r.details["prefix_length"] for r in group} for key, group in by_model.items()}
    return plots + [_over_prefix(*key, group) for key, group in by_model.items() if len(lengths[key]) > 1]


def _over_ratio(records: list[Record]) -> Plot:
    figure, axes = _new_figure()
    styles = _styles_of(records)
    largest = max(record.details["r"] for record in records)
    axes.plot([1, largest], [1, largest], color="#999999", linewidth=1, linestyle=":", label="speed-up = r")
    for place, (attention, group) in enumerate(_by_attention(records).items()):
        style = styles[attention]
        aside = 1 + 0.025 * (place - len(styles) / 2 + 0.5)  # so that whiskers at one r stand side by side
        _ideal_line(axes, attention, group, style, lambda r: r.details["r"])
        _points(axes, attention, group, style, lambda r, by=aside: by * r.details["r"], linestyle="none")
    _log_axis(axes, "x", "compression ratio r = N/N' (tokens per trie node)")
    _log_axis(axes, "y", "speed-up over the fastest dense (times)")
    axes.axhline(1, color="#333333", linewidth=0.8)
    axes.margins(y=0.08)
    _legend(figure, axes)
    caption = (
        "Points: median of paired runs, whiskers from the 20% to the 80% quantile. Thin lines: the FLOP "
        "ratio, the ideal of that path (the mean where several models share an r)."
    )
    return Plot("Speed-up against compression ratio", caption, _svg(figure))


def _over_prefix(model: str, dtype: str, records: list[Record]) -> Plot:
    figure, axes = _new_figure()
    styles = _styles_of(records)
    for attention, group in _by_attention(records).items():
        group.sort(key=lambda r: r.details["prefix_length"])
        style = styles[attention]
        _ideal_line(axes, attention, group, style, lambda r: r.details["prefix_length"])
        _points(axes, attention, group, style, lambda r: r.details["prefix_length"], linestyle="-")
    ticks = sorted({r.details["prefix_length"] for r in records})
    if ticks[0] > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("shared prefix (tokens)")
    axes.set_ylabel("speed-up over the fastest dense (times)")
    axes.set_ylim(bottom=0)
    axes.axhline(1, color="#333333", linewidth=0.8)
    _legend(figure, axes)
    caption = "Solid: measured. Thin: the FLOP ratio, the ideal of that path."
    return Plot(f"Speed-up against prefix length: {model}, {dtype}", caption, _svg(figure))


def _points(axes: Axes, attention: str, records: list[Record], style: Style, x: Any, linestyle: str) -> None:
    values = [r.value for r in records]
    below = [max(0.0, r.value - r.details.get("q20", r.value)) for r in records]
    above = [max(0.0, r.details.get("q80", r.value) - r.value) for r in records]
    axes.errorbar(
        [x(r) for r in records],
        values,
        yerr=[below, above],
        label=attention,
        color=style.color,
        marker=style.marker,
        markersize=6,
        markeredgecolor="white",
        markeredgewidth=0.6,
        linestyle=linestyle,
        linewidth=1.6,
        elinewidth=0.9,
        capsize=2,
    )


def _ideal_line(axes: Axes, attention: str, records: list[Record], style: Style, x: Any) -> None:
    ideals: dict[float, list[float]] = defaultdict(list)
    for record in records:
        if record.details.get("ideal") is not None:
            ideals[x(record)].append(record.details["ideal"])
    if ideals:
        places = sorted(ideals)
        heights = [statistics.mean(ideals[place]) for place in places]
        dashes = (0, (5, 2)) if attention.startswith("scatter") else "-"
        axes.plot(
            places,
            heights,
            color=style.color,
            linewidth=0.9,
            alpha=0.75,
            linestyle=dashes,
            label=f"ideal, {attention}",
        )


def _by_attention(records: list[Record]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.attention].append(record)
    return dict(groups)


def _styles_of(records: list[Record]) -> dict[str, Style]:
    """The family's style for its first backend, then a style of its own for every further one."""
    styles: dict[str, Style] = {}
    others = 0
    for attention in _by_attention(records):
        family = _STYLES.get(attention.split("-")[0])
        if family is not None and family not in styles.values():
            styles[attention] = family
        else:
            styles[attention] = _OTHER_STYLES[others % len(_OTHER_STYLES)]
            others += 1
    return styles


def _new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=_SIZE, layout="constrained")
    axes = figure.add_subplot()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _log_axis(axes: Axes, which: str, label: str) -> None:
    """Logarithmic, but with plain numbers as ticks."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log", base=2)
    axis.set_major_locator(LogLocator(base=2, subs=(1.0, 1.5) if which == "x" else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _position: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(label)


def _legend(figure: Figure, axes: Axes) -> None:
    """Below the plot, where it hides no point."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _svg(figure: Figure) -> str:
    """The <svg> element alone: without the XML prologue, and with a fixed seed for its ids."""
    buffer = io.StringIO()
    with matplotlib.rc_context(
        {"svg.hashsalt": "radixmlp", "svg.fonttype": "none", "font.family": "sans-serif"}
    ):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
