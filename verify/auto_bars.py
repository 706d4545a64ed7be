"""Whether `"auto"` chooses well: against the best fixed choice and against dense, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import radixmlp
from radixmlp.optimized.cost import CostModel
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import SCATTER, TIMED, TRIE, Bar, Progress
from radixmlp.verify.models import SMOLLM2, LoadedModel, load_model
from radixmlp.verify.timing import Ratio, Timings, time_interleaved
from radixmlp.verify.variants import DENSE_PADDED, DENSE_RAGGED, build_variants, warm_up
from radixmlp.verify.workloads import make_workload

PAIRS = 15
OF_BEST = 0.05  # slower than the best fixed choice by at most this share
OF_DENSE = 0.02  # and than dense
LARGEST_SPREAD = 0.10  # of dense against itself, beyond which nothing is judged
AUTO, DENSE_AGAIN = "auto", "dense again"
FIXED = (DENSE_RAGGED, SCATTER, TRIE)
# Batches of every kind of the workload grid, small enough to time seven variants of each: much, some, hardly any and
# nothing to share, trees, texts, and a call that is mostly fixed costs.
_TEXTS = ("rerank-query-first", "rerank-document-first")
_SHAPES = (
    "synthetic:4+8x4",
    "synthetic:8+32x4",
    "synthetic:16+64x8",
    "synthetic:64+32x8",
    "synthetic:128+8x8",
)
_TREE = {"prefix_length": 24, "suffix_length": 8, "batch_size": 2}
_TEXT = {"passages": 5, "max_length": 88}
# "-width:2": two layers of the published width, one after the other as in the whole model.
_GRID = (
    (SMOLLM2, "bfloat16", (*_TEXTS, *_SHAPES, "tree", "nothing-shared")),
    ("qwen3-0.6b-width:2", "bfloat16", (*_SHAPES, "synthetic:256+32x8", "tree", "nothing-shared")),
)
_TINY = ("tiny-qwen3", "float32", ("synthetic:4+8x4", "synthetic:64+32x8", "tree", "nothing-shared"))


@dataclass(frozen=True)
class AutoTimings:
    """One batch: dense twice, the other fixed choices, padded dense, and auto, interleaved.

    Args:
        choice: the attention that auto ran.
        predicted: seconds in the layers, by candidate (empty where the rule decided).
    """

    workload: str
    timings: Timings
    choice: str
    predicted: dict[str, float]
    gamma: float

    @property
    def best(self) -> str:
        """The fastest fixed choice by medians."""
        return self.timings.fastest([*FIXED])

    @property
    def over_best(self) -> float:
        """Median share by which auto is slower than the best fixed choice (negative: faster)."""
        return self.timings.ratio(AUTO, self.best).median - 1

    @property
    def over_dense(self) -> Ratio:
        """Paired ratios auto / dense."""
        return self.timings.ratio(AUTO, DENSE_RAGGED)

    @property
    def spread(self) -> float:
        """How far dense lies from itself: the larger of the 20% and 80% quantiles of its paired ratios."""
        own = self.timings.ratio(DENSE_AGAIN, DENSE_RAGGED)
        return max(abs(own.q20 - 1), abs(own.q80 - 1))

    @property
    def excess_over_best(self) -> float:
        """What is beyond the limit for the best fixed choice, or beyond dense's own spread; negative: within."""
        return self.over_best - max(OF_BEST, self.spread)

    @property
    def excess_over_dense(self) -> float:
        """What is beyond the limit for dense, or beyond its own spread; negative: within."""
        return self.over_dense.median - 1 - max(OF_DENSE, self.spread)

    def row(self) -> dict[str, Any]:
        """The batch's numbers, as the JSON keeps them."""
        padded = self.timings.seconds.get(DENSE_PADDED)
        return {
            "workload": self.workload,
            "gamma": self.gamma,
            "choice": self.choice,
            "best": self.best,
            "over_best": self.over_best,
            "over_dense": self.over_dense.median - 1,
            "spread": self.spread,
            "over_padded": None if padded is None else self.timings.ratio(AUTO, DENSE_PADDED).median - 1,
            "seconds": {name: self.timings.median(name) for name in self.timings.seconds},
            "predicted": self.predicted,
        }


def auto_bars(progress: Progress) -> list[Bar]:
    """`"auto"` over the workload grid: two bars a model, and what a tiny model shows, which is not judged."""
    bars = []
    for name, dtype, workloads in _GRID:
        bars += bars_of(load_model(name, dtype), dtype, workloads, PAIRS, progress)
    tiny, tiny_dtype, few = _TINY
    return bars + bars_of(load_model(tiny, tiny_dtype), tiny_dtype, few, PAIRS, progress, judged=False)


def bars_of(
    loaded: LoadedModel,
    dtype: str,
    workloads: Sequence[str],
    rounds: int,
    progress: Progress,
    judged: bool = True,
) -> list[Bar]:
    """The worst batch against the best fixed choice, and the worst one against dense.

    A batch that is beyond a limit is timed once more, with twice the rounds, before it counts.
    """
    progress(f"{loaded.name}: calibrating")
    cost = CostModel.for_model(loaded.model, refresh=True)
    measured = []
    for workload in workloads:
        batch = _batch(workload, loaded)
        result = time_auto(loaded, workload, batch, rounds, progress)
        if judged and max(result.excess_over_best, result.excess_over_dense) > 0:
            again = time_auto(loaded, workload, batch, 2 * rounds, progress)
            result = AutoTimings(
                workload,
                result.timings.extended(again.timings),
                again.choice,
                again.predicted,
                again.gamma,
            )
        measured.append(result)
    return [_best_bar(loaded, dtype, cost, measured, judged), _dense_bar(loaded, dtype, measured, judged)]


def time_auto(
    loaded: LoadedModel, workload: str, batch: RaggedBatch, rounds: int, progress: Progress
) -> AutoTimings:
    """All variants of one batch, each call with its own plan, backbone and last-token logits."""
    names = [DENSE_RAGGED, DENSE_PADDED, SCATTER, TRIE, AUTO]
    warm_up(loaded.model, names)
    calls = build_variants(loaded.model, batch, names)
    calls[DENSE_AGAIN] = calls[DENSE_RAGGED]
    timings = time_interleaved(calls, rounds, progress=lambda text: progress(f"{workload}, {text}"))
    out = radixmlp.forward(loaded.model, batch, attention=AUTO, logits_to_keep=1)
    assert out.choice is not None
    gamma = radixmlp.build_plan(batch).gamma
    return AutoTimings(workload, timings, out.choice.attention, out.choice.predicted, gamma)


def _batch(workload: str, loaded: LoadedModel) -> RaggedBatch:
    options = _TEXT if workload in _TEXTS else _TREE if workload == "tree" else {}
    return make_workload(workload, loaded.tokenizer, loaded.vocab_size, **options).batch


def _best_bar(
    loaded: LoadedModel, dtype: str, cost: CostModel, measured: list[AutoTimings], judged: bool
) -> Bar:
    worst = max(measured, key=lambda m: m.excess_over_best)
    limit = max(OF_BEST, worst.spread)
    details = {
        "batches": [m.row() for m in measured],
        "calibration": cost.to_dict(),
        "calibration_unusable": cost.unusable,
    }
    return Bar(
        f"auto: {loaded.name}, slower than the best fixed choice",
        worst.over_best,
        limit if judged else None,
        "lower",
        f"{_shape(loaded, dtype, measured, worst)}; best there: {worst.best}",
        wrong=_invalid(cost, measured, judged),
        details=details,
    )


def _dense_bar(loaded: LoadedModel, dtype: str, measured: list[AutoTimings], judged: bool) -> Bar:
    worst = max(measured, key=lambda m: m.excess_over_dense)
    ratio = worst.over_dense
    return Bar(
        f"auto: {loaded.name}, slower than dense",
        ratio.median - 1,
        max(OF_DENSE, worst.spread) if judged else None,
        "lower",
        _shape(loaded, dtype, measured, worst),
        (ratio.q20 - 1, ratio.q80 - 1),
        wrong=_invalid(None, measured, judged),
        details={"spreads": {m.workload: m.spread for m in measured}},
    )


def _shape(loaded: LoadedModel, dtype: str, measured: list[AutoTimings], worst: AutoTimings) -> str:
    return (
        f"{loaded.name}, {dtype}, worst of {len(measured)} batches: {worst.workload}, gamma = {worst.gamma:.2f}, "
        f"auto ran {worst.choice}, dense against itself {worst.spread:.1%}; {TIMED}, {worst.timings.rounds} rounds"
    )


def _invalid(cost: CostModel | None, measured: list[AutoTimings], judged: bool) -> str | None:
    """Why nothing was shown: no prediction was asked for, or the machine was too busy for any limit to mean much."""
    if not judged:
        return None
    if cost is not None and cost.unusable:
        return f"nothing was predicted: {cost.unusable}"
    restless = max(measured, key=lambda m: m.spread)
    if restless.spread > LARGEST_SPREAD:
        return (
            f"on {restless.workload} dense differs from itself by {restless.spread:.0%}: the machine is busy"
        )
    return None
