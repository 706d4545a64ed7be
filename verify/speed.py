"""Speed: every backend against the fastest dense alternative, interleaved in one process, beside its ideal.

Run it only on paths whose parity is green: a wrong answer has no speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

import radixmlp
from radixmlp.optimized.attention import get_attention, shares_prefixes
from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.reference import trie as reference_trie
from radixmlp.reference.plan import Order
from radixmlp.verify.ideal import DecoderShape, ideal_speedup, path_of
from radixmlp.verify.records import Record, Workload
from radixmlp.verify.timing import Ratio, Timings, time_interleaved
from radixmlp.verify.variants import DENSE, DENSE_PADDED, PREFIX_KV, build_variants, output_head, warm_up

LARGE_SHARING = 3.0  # from this r on a path must reach a share of its ideal
SHARE_OF_IDEAL = 0.5
NEVER_BELOW = 0.9  # of dense
JUDGED_SECONDS = 0.05  # a dense call that is shorter is mostly fixed costs, which no path can save
JUDGED_INDEX_TOKENS = 1024  # below this, building a plan is all call overhead
ORDERS: tuple[Order, ...] = get_args(Order)


@dataclass(frozen=True)
class SpeedComparison:
    """All variants timed on one batch, and what the batch is like.

    Args:
        timings: seconds of `dense-padded`, `dense-sdpa` and the other variants.
        plan: the trie of the batch.
        ideal: FLOP ratio per path ("dense", "scatter", "trie"), or None where the config does not say.
        plan_seconds: median time to build the plan alone.
        outputs: what each variant returned in its warm-up call, [B, vocab] or [B, hidden].
    """

    timings: Timings
    plan: TriePlan
    ideal: dict[str, float] | None
    plan_seconds: float
    outputs: dict[str, Tensor]

    @property
    def fastest_dense(self) -> str:
        """The faster of dense padded and dense ragged, among those timed."""
        return self.timings.fastest([name for name in DENSE if name in self.timings.seconds])

    def speedup(self, variant: str) -> Ratio:
        """Over the fastest dense, from paired rounds."""
        return self.timings.ratio(self.fastest_dense, variant)

    def ideal_of(self, variant: str) -> float | None:
        """The FLOP ratio that bounds a backend's speed-up; prefix-KV reuse has none of its own."""
        return None if self.ideal is None or variant == PREFIX_KV else self.ideal[path_of(variant)]


def compare(
    model: nn.Module,
    batch: RaggedBatch,
    variants: list[str],
    rounds: int,
    progress: Callable[[str], None] | None = None,
    screen_dense: bool = False,
) -> SpeedComparison:
    """Time `variants` beside both dense alternatives on one batch.

    Each timed call is backbone plus last-token logits (see `variants.py`), and builds its own plan. One
    call of each on a tiny batch and one on this batch come first.

    Args:
        rounds: timed rounds after that.
        screen_dense: let the first call on this batch decide which dense is the faster, and time only that one:
            for batches on which a dense call is long.
    """
    names = list(dict.fromkeys([*DENSE, *variants]))
    warm_up(model, names)
    calls = build_variants(model, batch, names)
    device = next(model.parameters()).device
    synchronize = torch.cuda.synchronize if device.type == "cuda" else None
    outputs: dict[str, Tensor] = {}

    def first_call(name: str) -> None:
        if progress is not None:
            progress(f"first call: {name}")
        outputs[name] = calls[name]()

    first = time_interleaved({n: partial(first_call, n) for n in calls}, 1, warmup=0, synchronize=synchronize)
    if screen_dense:
        calls = {
            name: call for name, call in calls.items() if name not in DENSE or name == first.fastest([*DENSE])
        }
    timings = time_interleaved(calls, rounds, warmup=0, synchronize=synchronize, progress=progress)
    plan = radixmlp.build_plan(batch)
    build = time_interleaved({"plan": lambda: radixmlp.build_plan(batch)}, rounds=3)
    return SpeedComparison(timings, plan, _ideal(model, batch, plan), build.median("plan"), outputs)


def measure_speed(
    model: nn.Module,
    model_name: str,
    workload: Workload,
    attentions: list[str],
    dtype: str,
    device: str,
    pairs: int,
) -> list[Record]:
    """One `speedup` record per backend, and one for Hugging Face's prefix KV-cache reuse where it applies.

    The value is the median of the paired ratios over the faster of dense padded and dense ragged. A backend
    that misses its limit gets twice, then four times as many rounds more, pooled with the first, before it is
    called slow: a busy machine disturbs single rounds, a slow path all of them.
    Dense backends and prefix KV-cache reuse are reported, not judged; nothing is judged where the dense call
    takes less than 50 ms.

    Args:
        model: in eval mode, already in `dtype` on `device`.
        attentions: names of backends.
        pairs: timed rounds.

    Raises:
        ValueError: the workload has an empty sequence, or a backend is unknown.
    """
    variants = [*attentions, PREFIX_KV]
    comparison = compare(model, workload.batch, variants, pairs)
    records = _records(comparison, model_name, workload, dtype, device)
    for more in (2 * pairs, 4 * pairs):
        if all(record.passed for record in records):
            break
        again = compare(model, workload.batch, variants, more)
        comparison = replace(comparison, timings=comparison.timings.extended(again.timings))
        records = _records(comparison, model_name, workload, dtype, device)
    return records


def speed_limit(ideal: float | None, compression_ratio: float) -> float:
    """What a speed-up may not fall below in `verify`: conservative, so that red means broken, not noisy."""
    if ideal is None or compression_ratio < LARGE_SHARING:
        return NEVER_BELOW
    return max(NEVER_BELOW, SHARE_OF_IDEAL * ideal)


def promises_speed(variant: str) -> bool:
    """Whether a variant has a limit to meet: backends that share prefixes do, their rivals do not."""
    if variant in (DENSE_PADDED, PREFIX_KV):
        return False
    return variant == "auto" or shares_prefixes(get_attention(variant))


def measure_index(workload: Workload) -> list[Record]:
    """How much faster the fast index builder is than the readable one on a workload, both orders.

    On batches of 1,024 tokens and more the fast builder must not lose; on smaller ones the ratio is reported.
    """
    return [_index_record(workload, order) for order in ORDERS]


def _index_record(workload: Workload, order: Order) -> Record:
    batch = workload.batch
    builders = {"reference": reference_trie.build_plan, "fast": radixmlp.build_plan}
    calls = {name: partial(build, batch, order=order) for name, build in builders.items()}
    timings = time_interleaved(calls, rounds=3)
    ratio, seconds = timings.ratio("reference", "fast"), timings.median("fast")
    limit = 1.0 if batch.num_tokens >= JUDGED_INDEX_TOKENS else None
    passed = limit is None or ratio.median >= limit
    details = {
        "q20": ratio.q20,
        "q80": ratio.q80,
        "fast_ms": seconds * 1e3,
        "reference_ms": timings.median("reference") * 1e3,
        "mtok_per_s": batch.num_tokens / seconds / 1e6,
        "tokens": batch.num_tokens,
    }
    labels = ("none", workload.name, "none", "int32", "cpu", f"build_speedup_{order}")
    return Record("index", *labels, ratio.median, limit, passed, details)


def _records(
    comparison: SpeedComparison, model_name: str, workload: Workload, dtype: str, device: str
) -> list[Record]:
    names = [name for name in comparison.timings.seconds if name != comparison.fastest_dense]
    return [_record(comparison, name, model_name, workload, dtype, device) for name in names]


def _record(
    comparison: SpeedComparison, name: str, model_name: str, workload: Workload, dtype: str, device: str
) -> Record:
    ratio = comparison.speedup(name)
    ideal = comparison.ideal_of(name)
    long_enough = comparison.timings.median(comparison.fastest_dense) >= JUDGED_SECONDS
    judged = promises_speed(name) and long_enough
    limit = speed_limit(ideal, comparison.plan.compression_ratio) if judged else None
    passed = limit is None or ratio.median >= limit
    details = {
        "q20": ratio.q20,
        "q80": ratio.q80,
        **_ideal_details(ratio.median, ideal),
        **_batch_details(comparison, workload),
        "seconds": comparison.timings.median(name),
        "dense_seconds": comparison.timings.median(comparison.fastest_dense),
        "rounds": comparison.timings.rounds,
    }
    if promises_speed(name):
        details["judged"] = judged
        details["plan_share_of_forward"] = comparison.plan_seconds / comparison.timings.median(name)
    return Record(
        "speed",
        model_name,
        workload.name,
        name,
        dtype,
        device,
        "speedup",
        ratio.median,
        limit,
        passed,
        details,
    )


def _ideal_details(speedup: float, ideal: float | None) -> dict[str, Any]:
    return {"ideal": ideal, "share_of_ideal": None if ideal is None else speedup / ideal}


def _batch_details(comparison: SpeedComparison, workload: Workload) -> dict[str, Any]:
    plan = comparison.plan
    return {
        "r": plan.compression_ratio,
        "gamma": plan.gamma,
        "tokens": plan.num_tokens,
        "sequences": workload.batch.num_sequences,
        "prefix_length": workload.prefix_length,
        "fastest_dense": comparison.fastest_dense,
    }


def _ideal(model: nn.Module, batch: RaggedBatch, plan: TriePlan) -> dict[str, float] | None:
    try:
        shape = DecoderShape.from_config(model.config)
    except ValueError:
        return None
    rows = batch.num_sequences if output_head(model) is not None else 0
    flops = ideal_speedup(shape, batch, plan, rows)
    return {path: flops.speedup(path) for path in ("dense", "scatter", "trie")}
