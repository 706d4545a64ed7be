"""Figure 10: a training step, forward and backward: speed-up and peak memory."""

from __future__ import annotations

from typing import Any

from radixmlp.verify.training_variants import mask_prompts
from radixmlp.verify.workloads import make_workload

from ..data import Data, Drawing
from ..data_models import QWEN3
from ..roofline import DEVICES, Work, predicted_speedup
from ..style import INK, LOOKS, absent, bar, key, legend_below, new_figure

LOSSES = {"all tokens": "loss of all tokens", "completions": "loss of completions"}
PROMPT, COMPLETION, GROUP = 512, 64, 16


def main(data: Data) -> Drawing:
    """Left: measured, FLOP ideal and predicted speed-up. Right: peak memory."""
    figure, [[speed, memory]] = new_figure(2, size=(9.0, 4.3))
    _speed(speed, data)
    _memory(memory, data)
    legend_below(figure, [speed, memory], columns=3)
    caption = (
        f"Forward and backward of the mean next-token loss, {PROMPT} + {COMPLETION} tokens x {GROUP}; the "
        "plan is built within the step. Filled: measured with 4 layers of Qwen3-0.6B's width, bf16, whiskers "
        "from the 20% to the 80% quantile. Dashed and hollow: predicted for all of Qwen3-0.6B on an H100, "
        "not measured. The paper names training as an extension; no number of it is published. "
        f"{data.provenance()}"
    )
    return Drawing(10, "training", "A training step on the trie", caption, figure)


def _speed(axes: Any, data: Data) -> None:
    found = {name: data.bar(f"training: trie over dense, loss of {name}", x) for x, name in enumerate(LOSSES)}
    batch = make_workload(f"synthetic:{PROMPT}+{COMPLETION}x{GROUP}", None, 32_000).batch
    for x, name in enumerate(LOSSES):
        point = found[name]
        if point is not None:
            bar(axes, x - 0.2, point, "trie", 0.36)
            axes.plot([x - 0.38, x - 0.02], [point.details["ideal"]] * 2, color="white", linewidth=4.2)
            axes.plot([x - 0.38, x - 0.02], [point.details["ideal"]] * 2, color=INK, linewidth=2.2)
            axes.text(x - 0.2, 0.25, f"{point.y:.2f}×", ha="center", color="white", fontweight="bold")
        work = Work.of(batch, labels=mask_prompts(batch, PROMPT if name == "completions" else 0))
        height = predicted_speedup(DEVICES["h100"], QWEN3["0.6b"], work, "trie", training=True)
        axes.bar(x + 0.2, height, 0.36, facecolor="white", edgecolor=LOOKS["trie"].color, linestyle="--")
        axes.text(x + 0.2, 0.25, f"{height:.2f}×", ha="center", color=LOOKS["trie"].color)
    if any(point is not None for point in found.values()):
        key(axes, "trie", "measured: the trie over the faster dense")
        axes.plot([], [], color=INK, linewidth=2.2, label="FLOP ideal")
    else:
        absent(axes, "the trie over dense", LOOKS["trie"])
    key(axes, "trie", "predicted: the trie over dense, H100", "predicted")
    axes.set_xticks(range(len(LOSSES)), list(LOSSES.values()))
    axes.set_ylabel("speed-up of a step (times)")
    axes.axhline(1, color=LOOKS["dense"].color, linewidth=1)
    axes.grid(visible=False, axis="x")


def _memory(axes: Any, data: Data) -> None:
    rows = {name: data.bar(f"training: trie's peak memory over dense, loss of {name}") for name in LOSSES}
    for x, point in enumerate(rows.values()):
        if point is not None:
            peaks = point.details["peak_mb"]
            dense = min(value for name, value in peaks.items() if not name.startswith("trie"))
            for offset, (path, value) in enumerate((("dense", dense), ("trie", peaks["trie-sdpa"]))):
                look = LOOKS[path]
                axes.bar(
                    x + 0.38 * (offset - 0.5), value / 1e3, 0.34, facecolor=look.color, edgecolor="black"
                )
                axes.text(
                    x + 0.38 * (offset - 0.5), value / 1e3, f"{value / 1e3:.2f}", ha="center", va="bottom"
                )
    if any(point is not None for point in rows.values()):
        key(axes, "dense", "measured: the leaner dense")
        key(axes, "trie", "measured: the trie (memory: one run)")
    else:
        absent(axes, "peak memory", LOOKS["trie"])
    axes.set_xticks(range(len(LOSSES)), list(LOSSES.values()))
    axes.set_ylabel("peak above weights and gradients (GB)")
    axes.grid(visible=False, axis="x")
