"""How a point is measured: interleaved, against the faster dense, and only where outputs are right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import radixmlp
from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify.bars import wrong_outputs
from radixmlp.verify.ideal import DecoderShape, ideal_speedup, path_of
from radixmlp.verify.timing import Timings, time_interleaved
from radixmlp.verify.variants import DENSE, PREFIX_KV, build_variants, warm_up

from .data import Point

Progress = Callable[[str], None]
SCREEN_SHARE = 8  # the faster dense is found on an eighth of the sequences
CHECKED_TOKENS, CHECKED_SEQUENCES = (
    8_192,
    4,
)  # all sequences of a batch of so many tokens are checked, else so many


class WrongOutputError(RuntimeError):
    """A variant's outputs do not agree with the model in fp32: it has no speed."""


@dataclass(frozen=True)
class Timed:
    """One batch, timed.

    Args:
        dense: the faster of dense padded and dense ragged.
        timings: seconds of it and of the other variants.
        plan: the batch's trie.
        ideal: FLOP ratio of each variant that has one.
    """

    dense: str
    timings: Timings
    plan: TriePlan
    ideal: dict[str, float]

    def point(self, figure: str, series: str, variant: str, x: float, shape: str, **details: Any) -> Point:
        """The variant's speed-up over dense: median and quantiles of the paired ratios."""
        ratio = self.timings.ratio(self.dense, variant)
        found = {
            "seconds": self.timings.median(variant),
            "against": self.dense,
            "against_seconds": self.timings.median(self.dense),
            "rounds": self.timings.rounds,
            "r": self.plan.compression_ratio,
            "ideal": self.ideal.get(variant),
            **details,
        }
        return Point(figure, series, x, ratio.median, "times", shape, ratio.q20, ratio.q80, details=found)


def time_batch(
    model: Any,
    batch: RaggedBatch,
    variants: Sequence[str],
    rounds: int,
    progress: Progress,
    check: bool = True,
) -> Timed:
    """Time variants and the faster dense on one batch; each call builds its plan and makes last-token logits.

    An eighth of the sequences runs first: it warms every path up and finds the faster dense. What the first timed
    round returned is then checked against the model in fp32, each sequence alone.

    Args:
        variants: names as `verify.variants` knows them; "dense-*" need not be among them.
        rounds: timed rounds of the whole batch, at least 2 for quantiles that say something.

        check: False where another batch of the same model was checked just before.

    Raises:
        WrongOutputError: a variant or the dense it is compared with is wrong.
    """
    names = list(dict.fromkeys([*DENSE, *variants]))
    warm_up(model, names)
    small = _first_sequences(batch, max(2, batch.num_sequences // SCREEN_SHARE))
    progress("screening on a part of the batch")
    screened = time_interleaved(build_variants(model, small, names), rounds=2, warmup=1)
    dense = screened.fastest([*DENSE])
    kept = [name for name in names if name not in DENSE or name == dense]
    outputs: dict[str, Tensor] = {}

    def call_and_keep(name: str, call: Callable[[], Tensor]) -> None:
        outputs[name] = call()

    calls = build_variants(model, batch, kept)
    timings = time_interleaved(
        {name: partial(call_and_keep, name, call) for name, call in calls.items()},
        rounds,
        warmup=0,
        progress=progress,
    )
    if check:
        progress("checking outputs against fp32, each sequence alone")
        _check(model, batch, outputs, dense)
    plan = radixmlp.build_plan(batch)
    flops = ideal_speedup(DecoderShape.from_config(model.config), batch, plan, batch.num_sequences)
    ideal = {name: flops.speedup(path_of(name)) for name in calls if name != PREFIX_KV}
    return Timed(dense, timings, plan, ideal)


def _check(model: Any, batch: RaggedBatch, outputs: dict[str, Tensor], dense: str) -> None:
    """Both dense paths set the scale of a legitimate error; the one that was not timed runs on the sample alone."""
    count = batch.num_sequences
    few = batch.num_tokens > CHECKED_TOKENS and count > CHECKED_SEQUENCES
    sample = list(range(0, count, count // CHECKED_SEQUENCES if few else 1))
    part = _sequences(batch, sample)
    picked = {name: output[sample] for name, output in outputs.items()}
    for name in DENSE:
        if name != dense:
            picked[name] = build_variants(model, part, [name])[name]()
    wrong = wrong_outputs(model, part, picked, list(range(len(sample))))
    if wrong:
        raise WrongOutputError("; ".join(f"{name}: {why}" for name, why in wrong.items()))


def _first_sequences(batch: RaggedBatch, count: int) -> RaggedBatch:
    return _sequences(batch, range(min(count, batch.num_sequences)))


def _sequences(batch: RaggedBatch, picked: Sequence[int]) -> RaggedBatch:
    """Some sequences of a batch, with their positions."""
    bounds = list(itertools.pairwise(batch.cu_seqlens.tolist()))
    ids = [batch.input_ids[bounds[b][0] : bounds[b][1]].tolist() for b in picked]
    positions = [batch.position_ids[bounds[b][0] : bounds[b][1]].tolist() for b in picked]
    return RaggedBatch.from_sequences(ids, positions)
