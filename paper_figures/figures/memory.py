"""Figure 7: memory: what the paper's table prints, and the peak above the weights as measured here."""

from __future__ import annotations

from typing import Any

from ..data import Data, Drawing, Point
from ..published import reranking
from ..style import INK, LOOKS, NAMES, absent, bar, key, legend_below, new_figure

HEADLINE = "qwen3-8b: trie's peak memory over dense"
TRAINING = "training: trie's peak memory over dense, loss of all tokens"


def main(data: Data) -> Drawing:
    """Left: the paper's memory column. Right: what is left here, beside 1/r."""
    figure, [[left, right]] = new_figure(2, size=(9.6, 4.5))
    _published(left)
    _measured(right, data)
    legend_below(figure, [left, right], columns=3)
    caption = (
        "Left: published, MS MARCO on an H100: the memory column of the paper's table, as printed. Right: "
        "measured here, the peak of one pass above the weights (in training: and gradients) over the leaner "
        "dense's, each path in a fresh process, one run each, so without whiskers; line: 1/r, what "
        f"activations alone would shrink to. Nothing is predicted. {data.provenance()}"
    )
    return Drawing(7, "memory", "Memory saved", caption, figure)


def _published(axes: Any) -> None:
    facts = reranking()
    for x, fact in enumerate(facts):
        bar(axes, x, Point("", "", x, fact.memory_percent, "%", ""), "scatter", 0.55, "published")
        axes.text(x, fact.memory_percent, f"{fact.memory_percent:g}%", ha="center", va="bottom")
    key(axes, "scatter", "published: the paper's path, H100", "published")
    axes.set_xticks(range(len(facts)), [fact.model for fact in facts])
    axes.set_ylabel("memory, as the paper's table prints it (%)")
    axes.set_ylim(0, 60)
    axes.grid(visible=False, axis="x")


def _measured(axes: Any, data: Data) -> None:
    found: list[tuple[str, str, float, float | None]] = []  # label, path, share of dense, 1/r
    for path in ("scatter", "trie"):
        for point in data.points("memory", path):
            found.append(("0.6B width,\n512 + 64 x 16", path, point.y, point.details["one_over_r"]))
    for name, label in ((HEADLINE, "8B width,\n2048 + 256 x 32"), (TRAINING, "0.6B width,\ntraining step")):
        peak = data.bar(name)
        if peak is not None:
            found.append((label, "trie", peak.y, peak.details.get("one_over_r")))
    for x, (_, path, share, rest) in enumerate(found):
        look = LOOKS[path]
        axes.bar(x, 100 * share, 0.6, facecolor=look.color, edgecolor="black", hatch=look.hatch)
        axes.text(x, 100 * share, f"{share:.0%}", ha="center", va="bottom")
        if rest is not None:
            axes.plot([x - 0.3, x + 0.3], [100 * rest] * 2, color="white", linewidth=4.2)
            axes.plot([x - 0.3, x + 0.3], [100 * rest] * 2, color=INK, linewidth=2.0)
    for path in ("scatter", "trie"):
        if any(path == one[1] for one in found):
            key(axes, path, f"measured: {NAMES[path]}")
        else:
            absent(axes, f"{NAMES[path]}, memory", LOOKS[path])
    axes.plot([], [], color=INK, linewidth=2.0, label="1/r")
    axes.set_xticks(range(len(found)), [one[0] for one in found], fontsize=7.5)
    axes.set_ylabel("peak above the weights (% of dense)")
    axes.axhline(100, color=LOOKS["dense"].color, linewidth=1.4)
    axes.set_ylim(0, 112)
    axes.grid(visible=False, axis="x")
