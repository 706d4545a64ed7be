"""Figure 1: speed-up against the length of the shared prefix, for three models."""

from __future__ import annotations

from typing import Any

from ..data import Data, Drawing
from ..data_models import QWEN3, TITLES, WIDTHS
from ..published import synthetic
from ..roofline import DEVICES, Path, Work, predicted_speedup
from ..style import LOOKS, NAMES, absent, legend_below, measured, new_figure, plain_log, predicted, published

PATHS: tuple[Path, ...] = ("scatter", "trie")
SUFFIX, BATCH = 256, 32
LENGTHS = (128, 256, 512, 1024, 2048)
HEADLINE = "qwen3-8b: trie over dense"  # the bench's bar at 2,048 tokens


def main(data: Data) -> Drawing:
    """One panel a model: published, predicted for an H100, measured on the CPU, the FLOP ideals, r."""
    works = {length: Work.shared_prefix(length, SUFFIX, BATCH).without_head() for length in LENGTHS}
    figure, [panels] = new_figure(3, size=(12.4, 5.0))
    for axes, model in zip(panels, QWEN3, strict=True):
        _panel(axes, data, model, works)
        axes.set_title(TITLES[model])
        axes.set_xlabel(f"shared prefix (tokens); + {SUFFIX} own tokens, {BATCH} sequences")
    panels[0].set_ylabel("speed-up over dense (times)")
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(0, top)
    legend_below(figure, panels, columns=4)
    caption = (
        "Stars: published, H100, the paper's path. Dashed and hollow: predicted by the roofline for an H100, "
        "all layers, not measured. Filled: measured on the CPU with one layer of exactly that width, bf16, "
        "over the faster dense, medians of paired runs, whiskers from the 20% to the 80% quantile; the head "
        "of 16,384 rows on each last token is part of it. A CPU can pass the FLOP ideal, because dense's "
        "larger activations leave its caches. Fewer lengths were measured for the larger models, which take "
        f"a CPU minutes. {data.provenance()}"
    )
    return Drawing(1, "prefix", "Speed-up against the length of the shared prefix", caption, figure)


def _panel(axes: Any, data: Data, model: str, works: dict[int, Work]) -> None:
    axes.plot(LENGTHS, [work.r for work in works.values()], color="#999999", linewidth=1, label="r = N/N'")
    for path in PATHS:
        _ideal(axes, model, works, path)
    for path in PATHS:
        heights = [predicted_speedup(DEVICES["h100"], QWEN3[model], work, path) for work in works.values()]
        predicted(axes, LENGTHS, heights, path, f"{NAMES[path]}, H100")
    for path in PATHS:
        points = data.points("prefix", f"{WIDTHS[model]} {path}")
        if model == "8b" and path == "trie":
            headline = data.bar(HEADLINE, x=2048)
            points = [p for p in points if p.x != 2048] + ([headline] if headline else [])
        measured(axes, points, path, f"{NAMES[path]}, CPU", without=f"{TITLES[model]}, {NAMES[path]}")
        _gpu(axes, data, model, path)
    facts = [fact for fact in synthetic() if fact.model == TITLES[model]]
    published(
        axes, [f.prefix_tokens for f in facts], [f.speedup for f in facts], "the paper's path, H100 (up to)"
    )
    axes.axhline(1, color=LOOKS["dense"].color, linewidth=1)
    plain_log(axes, "x", LENGTHS)


def _gpu(axes: Any, data: Data, model: str, path: str) -> None:
    """All layers, on the first GPU that has the model."""
    names = {length: f"{WIDTHS[model]}: {path} over dense at prefix {length}" for length in LENGTHS}
    found = [found for length, name in names.items() if (found := data.gpu_bar(name, length)) is not None]
    if found:
        measured(axes, [point for _, point in found], f"{path}-gpu", f"{NAMES[path]}, {found[0][0]}")
    else:
        absent(axes, f"{NAMES[path]} on a GPU", LOOKS[f"{path}-gpu"], where="yet")


def _ideal(axes: Any, model: str, works: dict[int, Work], path: str) -> None:
    """The ratio of FLOPs, all layers, without a head."""
    shape, heights = QWEN3[model], []
    for work in works.values():
        pairs = work.trie.pairs if path == "trie" else work.dense.pairs
        dense = work.rows * shape.flops_per_row + work.dense.pairs * shape.flops_per_pair
        flops = work.compact_rows * shape.flops_per_row + pairs * shape.flops_per_pair
        heights.append(dense / flops)
    look = LOOKS[path]
    style = ":" if path == "trie" else "-."
    axes.plot(
        LENGTHS, heights, color=look.color, linewidth=1.0, linestyle=style, label=f"FLOP ideal, {NAMES[path]}"
    )
