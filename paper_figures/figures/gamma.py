"""Figure 6: the share of rows that is left, by workload and by the order of query and document."""

from __future__ import annotations

from ..data import Data, Drawing
from ..style import INK, LOOKS, key, legend_below, new_figure

TITLES = {
    "embed-system-prompt": "embedding, one system prompt",
    "few-shot": "few-shot classification",
    "tree": "rollouts, a tree of steps",
    "synthetic:512+64x16": "synthetic, 512 + 64 tokens x 16",
    "synthetic:2048+256x32": "synthetic, 2048 + 256 tokens x 32",
    "nothing-shared": "nothing shared",
}


def main(data: Data) -> Drawing:
    """Horizontal bars of gamma = N'/N: shorter is more to gain."""
    figure, [[axes]] = new_figure(size=(8.2, 4.0))
    names = data.series_of("gamma")
    points = [data.points("gamma", name)[0] for name in names]
    for row, point in enumerate(points):
        texts = point.series.startswith("rerank") or point.series in ("embed-system-prompt", "few-shot")
        look = LOOKS["trie"] if texts else LOOKS["scatter"]
        whiskers = {}
        if point.q20 is not None and point.q80 is not None:
            below, above = max(0.0, point.y - point.q20), max(0.0, point.q80 - point.y)
            whiskers = {"xerr": [[below], [above]], "ecolor": "black", "capsize": 3}
        hatch = "" if texts else "////"
        axes.barh(-row, point.y, 0.62, facecolor=look.color, edgecolor="black", hatch=hatch, **whiskers)
        end = point.y if point.q80 is None else max(point.y, point.q80)
        label = f"{point.y:.2f} (r = {1 / point.y:.2f})"
        axes.text(end + 0.015, -row, label, va="center", color=INK, fontsize=8)
    if points:
        key(axes, "trie", "counted: text, SmolLM2's tokens")
        key(axes, "scatter", "counted: synthetic")
    else:
        axes.plot([], [], linestyle="none", marker="o", markerfacecolor="white", color=INK,
                  label="gamma by workload: not measured on this device")  # fmt: skip
    axes.axvline(
        0.9, color=INK, linestyle="--", linewidth=1, label="threshold: above it the batch runs densely"
    )
    axes.set_yticks([-row for row in range(len(points))], [TITLES.get(p.series, p.series) for p in points])
    axes.set_xlim(0, 1.25)
    axes.set_xlabel("gamma = N'/N (rows left to compute, as a share; less is better)")
    axes.grid(visible=False, axis="y")
    legend_below(figure, axes, columns=3)
    source = next((point.shape.split(",")[0] for point in points if point.series.startswith("rerank")), "")
    caption = (
        "Counted, not timed: distinct paths of (token, position) over tokens, one batch a query in reranking "
        f"(median over queries, whiskers from the 20% to the 80% quantile{'; ' + source if source else ''}). "
        "Query first, all that stands before the passage is shared; document first, only the system message "
        "is; figure 5 has the published times of both. Measured means counted here; nothing is predicted. "
        f"{data.provenance()}"
    )
    return Drawing(6, "gamma", "gamma by workload and by the order of query and document", caption, figure)
