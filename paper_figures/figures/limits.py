"""Figure 9: where the gain ends: long contexts, little to share, few sequences."""

from __future__ import annotations

from typing import Any

from ..data import Data, Drawing
from ..data_models import QWEN3
from ..roofline import DEVICES, Path, Work, predicted_speedup
from ..style import LOOKS, NAMES, absent, ideal, legend_below, measured, new_figure, plain_log, predicted

CONTEXTS = (1024, 4096, 8192, 16_384, 32_768, 65_536)
PATHS: tuple[Path, ...] = ("scatter", "trie")
SUFFIX, BATCH = 64, 4


def main(data: Data) -> Drawing:
    """Three panels: the prefix grows, the shared share shrinks, the batch shrinks."""
    figure, [[long, low, small]] = new_figure(3, size=(12.4, 4.6))
    _long(long, data)
    _panel(low, data, "low", "shared part of each sequence (%)")
    _panel(small, data, "small", "sequences in the batch")
    counts = sorted({p.x for p in data.points("small", "trie")})
    if counts:
        plain_log(small, "x", counts)
    small.set_title("few sequences")
    low.set_title("little to share")
    legend_below(figure, [long, low, small], columns=4)
    caption = (
        "Solid: measured with one layer of Qwen3-0.6B's width on the CPU, medians of paired runs over the "
        "faster dense, whiskers from the 20% to the 80% quantile. Dashed and hollow: predicted for an H100 "
        f"({SUFFIX} own tokens, {BATCH} sequences; Qwen3-0.6B, no head), not measured. Thin: the ratio of "
        "FLOPs. Decoding is not helped at all and is not shown. The paper names these limits; no number of them "
        f"is published. {data.provenance()}"
    )
    return Drawing(9, "limits", "Limits: long contexts, little redundancy, few sequences", caption, figure)


def _long(axes: Any, data: Data) -> None:
    for path in PATHS:
        points = data.points("long", path)
        measured(axes, points, path, NAMES[path])
        known = [p for p in points if p.details.get("ideal") is not None]
        if known:
            ideal(axes, [p.x for p in known], [p.details["ideal"] for p in known], path)
    works = [Work.shared_prefix(length, SUFFIX, BATCH).without_head() for length in CONTEXTS]
    for path in PATHS:
        heights = [predicted_speedup(DEVICES["h100"], QWEN3["0.6b"], work, path) for work in works]
        predicted(axes, CONTEXTS, heights, path, f"{NAMES[path]}, H100")
    plain_log(axes, "x", CONTEXTS)
    axes.set_xlabel("shared prefix (tokens)")
    axes.set_ylabel("speed-up over dense (times)")
    axes.set_ylim(bottom=0)
    axes.axhline(1, color=LOOKS["dense"].color, linewidth=1)
    axes.set_title("long contexts")


def _panel(axes: Any, data: Data, figure: str, label: str) -> None:
    for path in ("scatter", "trie", "auto"):
        points = data.points(figure, path)
        if points:
            measured(axes, points, path, NAMES[path])
        else:
            absent(axes, NAMES[path], LOOKS[path])
    known = [p for p in data.points(figure, "trie") if p.details.get("ideal") is not None]
    if known:
        ideal(axes, [p.x for p in known], [p.details["ideal"] for p in known], "trie")
    axes.axhline(1, color=LOOKS["dense"].color, linewidth=1)
    axes.set_xlabel(label)
    axes.set_ylabel("speed-up over dense (times)")
    axes.set_ylim(bottom=0)
