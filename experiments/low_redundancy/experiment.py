"""Batches with almost nothing to share: what each path costs there, and from which ratio on it pays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import SCATTER, TRIE, wrong_outputs
from radixmlp.verify.ideal import DecoderShape, ideal_speedup
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.timing import time_interleaved
from radixmlp.verify.variants import DENSE, build_variants

from .batches import LAYOUTS

QUESTION = (
    "what do the trie, the paper's path and auto cost where r is 1.0 to 1.3, and from which r on do they pay?"
)
PATHS = (TRIE, SCATTER, "auto")


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Args:
        ratios: wanted r = N / N', ascending.
        rounds: timed calls of each path, interleaved.
    """

    model: str = "qwen3-0.6b-width:2"
    dtype: str = "bfloat16"
    sequences: int = 8
    length: int = 256
    ratios: tuple[float, ...] = (1.0, 1.05, 1.1, 1.2, 1.3)
    rounds: int = 5


QUICK = Settings("tiny-qwen3", "float32", 4, 40, (1.0, 1.25), 1)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Time every path on every ratio and layout, and find where the paths break even."""
    settings = QUICK if quick else Settings()
    loaded = load_model(settings.model, settings.dtype)
    shapes = []
    for layout, make in LAYOUTS.items():
        for ratio in settings.ratios:
            batch = make(settings.sequences, settings.length, ratio, loaded.vocab_size)
            progress(f"{layout}, r = {ratio}")
            shapes.append({"layout": layout, **_time(loaded, batch, settings.rounds)})
    return {
        "settings": asdict(settings),
        "shapes": shapes,
        "break_even": {
            layout: {
                path: break_even(
                    [(s["r"], s["over_dense"][path]["median"]) for s in shapes if s["layout"] == layout]
                )
                for path in PATHS
            }
            for layout in LAYOUTS
        },
    }


def break_even(points: list[tuple[float, float]]) -> float | None:
    """The ratio from which on no measured speed-up is below 1; None where the last one is.

    Args:
        points: (r, speed-up), r ascending; between the last point below 1 and the next one it is interpolated.
    """
    below = [index for index, (_, speedup) in enumerate(points) if speedup < 1]
    if not below:
        return points[0][0]
    last = below[-1]
    if last == len(points) - 1:
        return None
    (r0, s0), (r1, s1) = points[last], points[last + 1]
    return r0 + (r1 - r0) * (1 - s0) / (s1 - s0)


def _time(loaded: LoadedModel, batch: RaggedBatch, rounds: int) -> dict[str, Any]:
    model = loaded.model
    calls = build_variants(model, batch, [*DENSE, *PATHS])
    first = {name: call() for name, call in calls.items()}
    wrong = wrong_outputs(model, batch, first, [0, batch.num_sequences - 1])
    if wrong:
        raise ValueError(f"wrong values, so nothing was timed: {wrong}")
    timings = time_interleaved(calls, rounds, warmup=0)
    index = time_interleaved({"plan": lambda: radixmlp.build_plan(batch)}, rounds)
    plan = radixmlp.build_plan(batch)
    dense = timings.fastest([*DENSE])
    chosen = radixmlp.forward(model, batch, attention="auto", logits_to_keep=1).choice
    assert chosen is not None  # a call with "auto" always says what it chose
    flops = ideal_speedup(DecoderShape.from_config(model.config), batch, plan, batch.num_sequences)
    return {
        "r": plan.compression_ratio,
        "tokens": plan.num_tokens,
        "rows": plan.num_nodes,
        "auto_ran": chosen.attention,
        "fastest_dense": dense,
        "seconds": {name: timings.median(name) for name in calls},
        "over_dense": {path: asdict(timings.ratio(dense, path)) for path in PATHS},
        "ideal": {"trie": flops.speedup("trie"), "scatter": flops.speedup("scatter")},
        "plan_ms": 1e3 * index.median("plan"),
    }


def report(measured: dict[str, Any]) -> str:
    """Markdown: one table a layout, then where each path breaks even."""
    s = measured["settings"]
    lines = [
        f"{s['model']}, {s['dtype']}, {s['sequences']} sequences of {s['length']} tokens, wanted r "
        f"{', '.join(map(str, s['ratios']))}; whole call: plan, backbone, last-token logits. Speed-ups over the "
        f"faster dense, median and 20–80% of {s['rounds']} interleaved rounds.",
    ]
    for layout in measured["break_even"]:
        lines += [
            "",
            f"### {layout}",
            "",
            "| r | tokens | rows | trie | ideal | scatter | ideal | auto | auto ran | plan, ms | seconds |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for shape in measured["shapes"]:
            if shape["layout"] == layout:
                lines.append(_row(shape))
    lines += ["", "| layout | path | breaks even at r |", "|---|---|---|"]
    for layout, paths in measured["break_even"].items():
        for path, at in paths.items():
            lines.append(f"| {layout} | {path} | {'above all measured' if at is None else f'{at:.3f}'} |")
    return "\n".join(lines) + "\n"


def _row(shape: dict[str, Any]) -> str:
    over, ideal = shape["over_dense"], shape["ideal"]
    seconds = ", ".join(f"{name} {value:.4g}" for name, value in shape["seconds"].items())
    cells = [
        f"{shape['r']:.3f}",
        str(shape["tokens"]),
        str(shape["rows"]),
        _spread(over[TRIE]),
        f"{ideal['trie']:.3f}",
        _spread(over[SCATTER]),
        f"{ideal['scatter']:.3f}",
        _spread(over["auto"]),
        shape["auto_ran"],
        f"{shape['plan_ms']:.3g}",
        f"{seconds} (faster dense: {shape['fastest_dense']})",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['q20']:.3f}–{ratio['q80']:.3f})"
