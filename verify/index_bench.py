"""The index builder against the published Rust package, in one process, and its work as batches grow.

Run alone: `python -P -m radixmlp.verify.index_bench`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixmlp.optimized.index import build_plan, count_work
from radixmlp.reference import TriePlan
from radixmlp.verify.index_shapes import WORK_FAMILIES, IndexShape, Rows, index_shapes, ragged_batch
from radixmlp.verify.records import Record
from radixmlp.verify.timing import Call, Ratio, Timings, quantile, time_interleaved

MEAN_LIMIT = 8.0
WORK_LIMIT_PER_DOUBLING = 2.05
WORK_SIZES = (200, 400, 800)
SECONDS_PER_ROUND, SECONDS_PER_SHAPE = 0.002, 0.8
CALLS_PER_ROUND = 5
SPEEDUP = "index_speedup_vs_radix_mlp"
OURS, OURS_TRIE, PEER = "order=input", "order=trie", "radix-mlp"

Progress = Callable[[str], None]


class MissingPeerError(RuntimeError):
    """The package to compare with is not installed."""


def run_index_bench(progress: Progress | None = None) -> list[Record]:
    """Measure every bar of the index builder.

    Each side gets what it takes, made beforehand: the peer uint32 arrays, the builder a `RaggedBatch` of
    int64 tensors. A shape is timed only after both gave the same maps.

    Raises:
        MissingPeerError: the peer is not installed.
    """
    peer = _peer()
    say = progress or (lambda what: None)
    records: list[Record] = []
    speedups: list[float] = []
    for shape in index_shapes():
        say(shape.name)
        measured = _measure(shape, peer)
        records += measured
        if shape.in_mean:
            speedups.append(measured[0].value)
    mean = math.exp(sum(math.log(max(speedup, 1e-9)) for speedup in speedups) / len(speedups))
    details = {"order": "input", "shapes": len(speedups)}
    records.append(_record("geometric mean, 25% shared", SPEEDUP, mean, MEAN_LIMIT, details))
    for name, rows in WORK_FAMILIES.items():
        say(f"work: {name}")
        records.append(_work_record(name, rows))
    return records


def _peer() -> Callable[..., Any]:
    try:
        from radix_mlp import compute_fold_and_scatter
    except ImportError as error:
        raise MissingPeerError("radix-mlp is not installed: pip install 'radixmlp[bench]'") from error
    return compute_fold_and_scatter


def _measure(shape: IndexShape, peer: Callable[..., Any]) -> list[Record]:
    """The shape's speed-up in the peer's order, and, reported only, depth-first."""
    batch = ragged_batch(shape.rows())
    arrays = [t.numpy().astype(np.uint32) for t in (batch.input_ids, batch.position_ids, batch.cu_seqlens)]
    calls: dict[str, Call] = {
        OURS: partial(build_plan, batch, "input"),
        OURS_TRIE: partial(build_plan, batch, "trie"),
        PEER: partial(peer, *arrays),
    }
    sizes = {"num_tokens": batch.num_tokens, "num_nodes": build_plan(batch).num_nodes}
    wrong = _difference(build_plan(batch, "input"), build_plan(batch, "trie"), peer(*arrays))
    if wrong is not None:
        return [_record(shape.name, SPEEDUP, 0.0, shape.limit, {**sizes, "order": "input", "wrong": wrong})]
    timings, repeats = _time(calls)
    records = []
    for name, metric, limit in ((OURS, SPEEDUP, shape.limit), (OURS_TRIE, f"{SPEEDUP}_trie_order", None)):
        ratio = timings.ratio(PEER, name)
        details = {"order": name.removeprefix("order="), **sizes, **_spread(timings, name, ratio, repeats)}
        records.append(_record(shape.name, metric, ratio.median, limit, details))
    return records


def _difference(ours: TriePlan, depth_first: TriePlan, theirs: Sequence[NDArray[np.uint32]]) -> str | None:
    """Which map differs from the peer's, or None. Depth-first: each row must have the same first row."""
    compact = (ours.input_ids, ours.position_ids, ours.scatter, ours.gather)
    for name, got, want in zip(("ids", "positions", "scatter", "gather"), compact, theirs, strict=True):
        if not np.array_equal(got.numpy(), want):
            return f"{name} differ from the peer's"
    if not torch.equal(depth_first.gather[depth_first.scatter], ours.gather[ours.scatter]):
        return "the two orders merge different rows"
    return None


def _time(calls: dict[str, Call]) -> tuple[Timings, int]:
    """Interleaved rounds of several calls: the first after another builder's pays for memory that one gave back."""
    slowest = time_interleaved(calls, rounds=3, warmup=2).median(PEER)
    repeats = max(CALLS_PER_ROUND, round(SECONDS_PER_ROUND / slowest))
    rounds = max(15, min(101, round(SECONDS_PER_SHAPE / (slowest * repeats))))
    return time_interleaved({n: partial(_repeat, c, repeats) for n, c in calls.items()}, rounds), repeats


def _repeat(call: Call, times: int) -> None:
    for _ in range(times):
        call()


def _spread(timings: Timings, name: str, ratio: Ratio, repeats: int) -> dict[str, Any]:
    def quantiles(which: str) -> list[float]:
        return [1e6 * quantile(timings.seconds[which], share) / repeats for share in (0.2, 0.8)]

    return {
        "q20": ratio.q20,
        "q80": ratio.q80,
        "microseconds": 1e6 * timings.median(name) / repeats,
        "microseconds_q20_q80": quantiles(name),
        "peer_microseconds": 1e6 * timings.median(PEER) / repeats,
        "peer_microseconds_q20_q80": quantiles(PEER),
        "rounds": timings.rounds,
    }


def _work_record(name: str, rows: Callable[[int], Rows]) -> Record:
    """The largest growth of probes plus compares per doubling of the tokens."""
    batches = [ragged_batch(rows(n)) for n in WORK_SIZES]
    work = [count_work(batch).total for batch in batches]
    tokens = [batch.num_tokens for batch in batches]
    growths = [
        (after / before) ** (1 / math.log2(larger / smaller))
        for before, after, smaller, larger in zip(work, work[1:], tokens, tokens[1:], strict=False)
    ]
    details = {"num_tokens": tokens, "work": work, "better": "lower"}
    value, limit = max(growths), WORK_LIMIT_PER_DOUBLING
    return _record(name, "index_work_growth_per_doubling", value, limit, details, value <= limit)


def _record(
    workload: str,
    metric: str,
    value: float,
    limit: float | None,
    details: dict[str, Any],
    passed: bool | None = None,
) -> Record:
    if passed is None:
        passed = limit is None or value >= limit
    return Record("index", "none", workload, "none", "int64", "cpu", metric, value, limit, passed, details)


def lines(records: Sequence[Record]) -> Iterator[str]:
    """One line per record."""
    for record in records:
        details = record.details
        cells = [f"{record.workload:28} {record.metric.removeprefix('index_'):36} {record.value:7.2f}"]
        cells.append("" if record.limit is None else f"limit {record.limit:g}")
        cells.append("ok" if record.passed else f"FAILED {details.get('wrong', '')}")
        if "q20" in details:
            cells.append(f"20-80% {details['q20']:.2f}-{details['q80']:.2f}")
            cells.append(f"{details['peer_microseconds']:.0f} us -> {details['microseconds']:.0f} us")
        yield "  ".join(cells)


def main() -> int:
    """Print every bar; 0 if all passed, 1 if one failed, 2 if the peer is missing."""
    try:
        records = run_index_bench(lambda what: print(what, file=sys.stderr))
    except MissingPeerError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(lines(records)))
    return 0 if all(record.passed for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
