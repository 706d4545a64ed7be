"""Figure 8: dense, the paper's path, a prefix KV cache and the trie on one grid of shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..data import Data, Drawing, Point
from ..data_models import QWEN3
from ..roofline import Work, predicted_speedup
from ..roofline_cpu import cpu_device
from ..style import LOOKS, NAMES, absent, bar, key, legend_below, new_figure

MODEL = "qwen3-0.6b-width:1"  # one layer, a head of 16,384 rows
SHAPE = replace(QWEN3["0.6b"], vocab_size=16_384, layer_windows=(None,))
PATHS = ("scatter", "prefix-kv", "trie")
WIDTH = 0.26


def main(data: Data) -> Drawing:
    """Speed-up over the faster dense, a group of bars a shape."""
    series = {path: data.points("grid", path) for path in PATHS}
    figure, [[axes]] = new_figure(size=(9.0, 4.4))
    for offset, path in enumerate(PATHS):
        if not series[path]:
            absent(axes, NAMES[path], LOOKS[path])
            continue
        key(axes, path, f"measured: {NAMES[path]}")
        for point in series[path]:
            x = point.x + (offset - 1) * WIDTH
            bar(axes, x, point, path, WIDTH * 0.92)
            _ideal(axes, x, point)
    shapes = {p.x: p for p in series["trie"]}
    _predicted(axes, data, series)
    if shapes:
        axes.plot([], [], color="black", linewidth=2.2, label="FLOP ideal of that path")
    axes.axhline(1, color=LOOKS["dense"].color, linewidth=1.4, label="dense, the faster of padded and ragged")
    axes.set_xticks(list(shapes), [_label(point) for point in shapes.values()])
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("shared prefix + own tokens of each sequence")
    axes.set_ylabel("speed-up over dense (times)")
    axes.set_ylim(bottom=0)
    legend_below(figure, axes, columns=3)
    what = next((p.shape for p in series["trie"]), "")
    return Drawing(
        8, "grid", "Dense, the paper's path, prefix KV cache, the trie", _caption(data, what), figure
    )


def _predicted(axes: Any, data: Data, series: dict[str, list[Point]]) -> None:
    """Hollow diamonds: what this CPU's roofline gives, from its calibration alone."""
    calibration = None if data.cpu is None else data.cpu.calibrated()
    look = {"linestyle": "none", "marker": "D", "markersize": 6, "markerfacecolor": "white", "zorder": 7}
    label = "predicted: this CPU, from its calibration"
    if calibration is None:
        axes.plot([], [], color="black", label=f"{label}: not calibrated yet", **look)
        return
    device = cpu_device(calibration)
    for path in ("scatter", "trie"):
        points = [p for p in series[path] if p.details["model"] == MODEL]
        heights = [predicted_speedup(device, SHAPE, _work(point), path) for point in points]
        places = [point.x + (PATHS.index(path) - 1) * WIDTH for point in points]
        axes.plot(places, heights, color="black", label=label if path == "trie" else None, **look)


def _work(point: Point) -> Work:
    found = point.details
    return Work.shared_prefix(found["prefix"], found["suffix"], found["batch"])


def _ideal(axes: Any, x: float, point: Point) -> None:
    ideal = point.details.get("ideal")
    if ideal is not None:
        half = WIDTH * 0.46
        axes.plot([x - half, x + half], [ideal, ideal], color="white", linewidth=4.2, zorder=5)
        axes.plot([x - half, x + half], [ideal, ideal], color="black", linewidth=2.2, zorder=6)


def _label(point: Point) -> str:
    found = point.details
    return (
        f"{found['prefix']} + {found['suffix']}\nr = {found['r']:.1f}\ndense {found['against_seconds']:.2f} s"
    )


def _caption(data: Data, shape: str) -> str:
    where = shape.split(",")
    model = ", ".join(part.strip() for part in where[:2]) if shape else "no shape is measured yet"
    count = shape.split(" x ")[1].split(",")[0] if " x " in shape else ""
    batch = f", {count} sequences, bf16" if count else ""
    return (
        "Bars: measured, medians of paired runs, whiskers from the 20% to the 80% quantile "
        f"({model}{batch}). The prefix KV cache is Hugging Face's own: the prefix runs once, its cache is "
        "repeated for every sequence. A call builds the plan, runs the backbone and makes the last token's "
        f"logits. Diamonds: predicted for this CPU by the "
        f"roofline from its calibration, not measured. No number of it is published. {data.provenance()}"
    )
