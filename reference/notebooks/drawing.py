"""What the notebooks draw with: one palette, batches, tries, masks and bars.

The colours are those of Okabe and Ito, told apart by colour-blind readers; what matters also differs in lightness, in
hatching or by a mark, so that a black-and-white print still reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from radixmlp.reference import TriePlan

SHARED, OWN, EDGE, INK = "#0072B2", "#F5C04A", "#9A9A9A", "#333333"
DENSE, PAPER, TRIE = "#666666", "#D55E00", "#0072B2"
SEEN, UNSEEN, TOO_MUCH, MISSED = "#4D4D4D", "#F2F2F2", "#E69F00", "#56B4E9"
PATHS: Mapping[str, tuple[str, str]] = {
    "dense": (DENSE, ""),
    "paper": (PAPER, "//"),
    "trie": (TRIE, ".."),
}  # colour and hatch of the three ways to run a batch

plt.rcParams.update(
    {
        "figure.dpi": 80,
        "font.size": 9,
        "font.family": "DejaVu Sans",
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
    }
)


def new_figure(
    width: float, height: float, columns: int = 1, width_ratios: Sequence[float] | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches with `columns` axes side by side."""
    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), width_ratios=width_ratios, layout="constrained", squeeze=False
    )
    return figure, list(axes[0])


def draw_batch(axes: Axes, plan: TriePlan, words: Sequence[str], title: str = "") -> None:
    """The ragged batch, one line a sequence; dark boxes are rows that some other sequence shares.

    Args:
        words: one label for each compact row.
    """
    rows, bounds = plan.scatter.tolist(), plan.cu_seqlens.tolist()
    shared = _uses(plan) > 1
    longest = int(plan.cu_seqlens.diff().max())
    for b in range(len(bounds) - 1):
        for column, row in enumerate(range(bounds[b], bounds[b + 1])):
            _box(axes, column, -b, words[rows[row]], bool(shared[rows[row]]), str(row))
    _frame(axes, longest, len(bounds) - 1, title or f"the batch: N = {plan.num_tokens} rows")


def draw_trie(
    axes: Axes,
    plan: TriePlan,
    words: Sequence[str],
    title: str = "",
    edges: Mapping[tuple[int, int], str] | None = None,
    widths: Mapping[tuple[int, int], float] | None = None,
) -> None:
    """The trie from left to right; a first child stays on its parent's line.

    Args:
        words: one label for each compact row.
        edges: text for the edge (parent, child).
        widths: line width in points for the edge (parent, child).
    """
    height, lines = trie_lines(plan)
    parent, depth = plan.parent.tolist(), plan.depth.tolist()
    shared = _uses(plan) > 1
    for node, above in enumerate(parent):
        if above < 0:
            continue
        x, y = (depth[above], depth[node]), (height[above], height[node])
        width = 1.2 if widths is None else widths.get((above, node), 1.2)
        axes.plot(x, y, color=EDGE, linewidth=width, zorder=1)
        if edges and (above, node) in edges:
            _edge_text(axes, sum(x) / 2, sum(y) / 2, edges[above, node])
    for node, word in enumerate(words):
        _box(axes, depth[node], height[node], word, bool(shared[node]), str(node))
    ratio = f"r = N/N' = {plan.compression_ratio:.2f}"
    _frame(axes, max(depth) + 1, lines, title or f"its trie: N' = {plan.num_nodes} rows, {ratio}")


def trie_lines(plan: TriePlan) -> tuple[list[float], int]:
    """The line each node is drawn on (0, -1, -2, ...), and how many lines there are."""
    parent = plan.parent.tolist()
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(above, []).append(node)
    line = [0.0] * len(parent)
    waiting, last = children.get(-1, [])[::-1], -1
    open_above: dict[int, bool] = {}
    while waiting:
        node = waiting.pop()
        above = parent[node]
        if above >= 0 and not open_above.get(above):
            line[node] = line[above]
            open_above[above] = True
        else:
            last += 1
            line[node] = -float(last)
        waiting += children.get(node, [])[::-1]
    return line, last + 1


def draw_mask(
    axes: Axes, seen: Tensor, words: Sequence[str], title: str = "", truth: Tensor | None = None
) -> None:
    """Who sees whom: queries downwards, keys to the right.

    Args:
        seen: [rows, rows] bool, `seen[q, k]`.
        words: one label for each row.
        truth: [rows, rows] bool; cells where `seen` differs from it are marked: x for a key seen though it is none of
            the query's, o for one that is missed.
    """
    rows = seen.shape[0]
    right = seen if truth is None else truth
    for q, k in torch.cartesian_prod(torch.arange(rows), torch.arange(rows)).tolist():
        mark = ""
        color = SEEN if seen[q, k] else UNSEEN
        if seen[q, k] != right[q, k]:
            color, mark = (TOO_MUCH, "x") if seen[q, k] else (MISSED, "o")
        axes.add_patch(Rectangle((k, -q - 1), 0.92, 0.92, color=color))
        if mark:
            axes.text(k + 0.46, -q - 0.54, mark, ha="center", va="center", fontsize=9, fontweight="bold")
    axes.set_yticks([-q - 0.5 for q in range(rows)], [f"{word} {q}" for q, word in enumerate(words)])
    axes.set_xticks([k + 0.5 for k in range(rows)], [str(k) for k in range(rows)])
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlim(-0.1, rows)
    axes.set_ylim(-rows, 0.1)
    axes.set_aspect("equal")
    axes.set_title(title)


def mask_legend(axes: Axes, seen: Tensor, truth: Tensor) -> None:
    """Says what the colours of `draw_mask` mean, below it; only those that occur."""
    patches = [
        Patch(facecolor=color, label=label)
        for color, label, occurs in (
            (SEEN, "seen", True),
            (TOO_MUCH, "x: seen, but wrong", bool((seen & ~truth).any())),
            (MISSED, "o: missed", bool((truth & ~seen).any())),
        )
        if occurs
    ]
    axes.legend(
        handles=patches,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.06),
        ncols=3,
        frameon=False,
        fontsize=8,
    )


def draw_bars(
    axes: Axes, names: Sequence[str], values: Mapping[str, Sequence[float]], unit: str, title: str = ""
) -> None:
    """Grouped horizontal bars, one group a name (downwards) and one bar a path.

    Args:
        values: for each of "dense", "paper", "trie", one value a name.
    """
    thick = 0.8 / len(values)
    for place, (path, heights) in enumerate(values.items()):
        color, hatch = PATHS[path]
        y = [n + (place - (len(values) - 1) / 2) * thick for n in range(len(names))]
        axes.barh(y, heights, thick * 0.92, color=color, hatch=hatch, edgecolor="white", label=path)
    axes.set_yticks(range(len(names)), list(names))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.set_title(title)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _uses(plan: TriePlan) -> Tensor:
    """[N'] how many ragged rows each node stands for."""
    return plan.scatter.bincount(minlength=plan.num_nodes)


def _edge_text(axes: Axes, x: float, y: float, text: str) -> None:
    white = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color=INK, bbox=white, zorder=1.5)


def _box(axes: Axes, x: float, y: float, word: str, shared: bool, number: str) -> None:
    axes.text(
        x,
        y,
        word,
        ha="center",
        va="center",
        color="white" if shared else "black",
        bbox={
            "boxstyle": "round,pad=0.35",
            "facecolor": SHARED if shared else OWN,
            "edgecolor": "black" if shared else OWN,
        },
        zorder=2,
    )
    axes.text(x, y + 0.3, number, ha="center", va="bottom", fontsize=7, color=INK, zorder=3)


def _frame(axes: Axes, columns: int, lines: int, title: str) -> None:
    axes.set_xlim(-0.6, columns - 0.4)
    axes.set_ylim(-lines + 0.4, 0.75)
    axes.set_title(title)
    axes.axis("off")
