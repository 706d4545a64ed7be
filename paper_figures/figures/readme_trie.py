"""The README's picture of a batch, its prefix trie and the attention mask, drawn from a real plan.

python -P paper_figures/figures/readme_trie.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

import radixmlp

SENTENCES = [
    ["rate", "this", "page", ":", "fleas", "live", "long"],
    ["rate", "this", "page", ":", "fleas", "bite"],
    ["rate", "this", "page", ":", "cats", "purr"],
    ["rate", "this", "query"],
]
SHARED, OWN, MASK, EDGE = "#0072B2", "#E69F00", "#4D4D4D", "#9A9A9A"
OUT = Path(__file__).parents[1] / "pictures" / "trie.svg"


def main() -> None:
    """Write `paper_figures/pictures/trie.svg`."""
    words = sorted({word for sentence in SENTENCES for word in sentence})
    batch = radixmlp.RaggedBatch.from_sequences([[words.index(w) for w in s] for s in SENTENCES])
    plan = radixmlp.build_plan(batch)
    uses = plan.scatter.bincount(minlength=plan.num_nodes).tolist()
    labels = [words[i] for i in plan.input_ids.tolist()]
    plt.rcParams.update({"font.size": 9, "svg.hashsalt": "radixmlp", "font.family": "DejaVu Sans"})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), width_ratios=[1.25, 1.35, 0.9])
    _draw_batch(left, plan, uses)
    _draw_trie(middle, plan, labels, uses)
    _draw_mask(right, plan, labels)
    figure.tight_layout()
    figure.savefig(OUT, metadata={"Date": None})


def _draw_batch(axes: Any, plan: radixmlp.TriePlan, uses: list[int]) -> None:
    rows = plan.scatter.tolist()
    bounds = plan.cu_seqlens.tolist()
    for b, sentence in enumerate(SENTENCES):
        for column, word in enumerate(sentence):
            _box(axes, column, -b, word, uses[rows[bounds[b] + column]] > 1)
    axes.set_title(f"the batch: N = {plan.num_tokens} rows")
    _frame(axes, (-0.6, 6.6), (-3.6, 0.6))


def _draw_trie(axes: Any, plan: radixmlp.TriePlan, labels: list[str], uses: list[int]) -> None:
    parent, depth = plan.parent.tolist(), plan.depth.tolist()
    height: list[float] = []
    lines = 0.0
    for node, above in enumerate(parent):  # depth-first: a first child stays on its parent's line
        if node and above != node - 1:
            lines -= 1
        height.append(lines)
    for node, above in enumerate(parent):
        if above >= 0:
            axes.plot([depth[above], depth[node]], [height[above], height[node]], color=EDGE, zorder=1)
    for node, label in enumerate(labels):
        _box(axes, depth[node], height[node], label, uses[node] > 1, str(node))
    ratio = f"r = N/N' = {plan.compression_ratio:.2f}"
    axes.set_title(f"its prefix trie: N' = {plan.num_nodes} rows, {ratio}")
    _frame(axes, (-0.6, 6.6), (-3.6, 0.6))


def _draw_mask(axes: Any, plan: radixmlp.TriePlan, labels: list[str]) -> None:
    n, end = plan.num_nodes, plan.subtree_end.tolist()
    for query in range(n):
        for key in range(n):
            seen = key <= query < end[key]
            color = MASK if seen else "#F2F2F2"
            axes.add_patch(plt.Rectangle((key, -query - 1), 0.92, 0.92, color=color))
    axes.set_yticks([-q - 0.5 for q in range(n)], [f"{label} {q}" for q, label in enumerate(labels)])
    axes.set_xticks([k + 0.5 for k in range(n)], [str(k) for k in range(n)])
    axes.tick_params(length=0, labelsize=8)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlim(0, n)
    axes.set_ylim(-n, 0)
    axes.set_aspect("equal")
    axes.set_title("query q sees key k iff\nk ≤ q < subtree_end[k]")


def _box(axes: Any, x: float, y: float, word: str, shared: bool, number: str = "") -> None:
    color = SHARED if shared else OWN
    axes.text(
        x,
        y,
        word,
        ha="center",
        va="center",
        color="white" if shared else "black",
        bbox={"boxstyle": "round,pad=0.35", "facecolor": color, "edgecolor": "black" if shared else color},
        zorder=2,
    )
    if number:
        axes.text(x, y + 0.42, number, ha="center", va="center", fontsize=7, color="#333333")


def _frame(axes: Any, x: tuple[float, float], y: tuple[float, float]) -> None:
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.axis("off")


if __name__ == "__main__":
    main()
