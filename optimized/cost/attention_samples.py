"""What attention costs on a device: its backends timed on a handful of plans, and a linear cost fitted to each."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.attention import get_attention
from radixmlp.optimized.cost.fit import fit_costs
from radixmlp.optimized.cost.work import DENSE, SCATTER, TRIE, TRITON, Work, engine_of, work_of
from radixmlp.optimized.errors import UnsupportedAttentionError
from radixmlp.optimized.index import build_plan
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

_ROWS = 512  # of the longest sample
_LEAST, _MOST = 3, 7  # repetitions
_BUDGET = 0.12  # seconds, after which no repetition begins that need not
_CALM = 1.5  # median over minimum of the repetitions


def agree(times: Sequence[float]) -> bool:
    """Whether repetitions of one call were left undisturbed."""
    return statistics.median(times) <= _CALM * min(times)


def attention_costs(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, wait: Callable[[], None]
) -> dict[str, Any]:
    """Time the backends with heads, dtype and spec of one attention call.

    Args:
        q, k, v: [n, Hq, D], [n, Hkv, D], [n, Hkv, Dv], the call's inputs; repeated to as many rows as are needed.
        spec: the call's.
        wait: returns once the device is idle.

    Returns:
        {"candidates": (name, ...), "costs": {engine: seconds a round, a score and a moved head row}, "copy_seconds",
        "calm"}.
    """
    q, k, v = (_stretched(x) for x in (q, k, v))
    device = q.device
    heads = q.shape[1], k.shape[1]
    names = [TRIE, DENSE] + ([TRITON] if device.type == "cuda" else [])
    serving = [
        n for n in (*names, SCATTER) if get_attention(n).unsupported(spec, device, q.dtype, False) is None
    ]
    samples = [
        (name, plan, work_of(name, plan, *heads, device.type))
        for name in names
        if name in serving
        for plan in _plans(name, device)
    ]
    runs, calm = _timed(samples, q, k, v, spec, wait)
    features: dict[str, list[Sequence[float]]] = defaultdict(list)
    seconds: dict[str, list[float]] = defaultdict(list)
    for (name, _, work), taken in zip(samples, runs, strict=True):
        if taken is None:
            serving = [n for n in serving if n != name]
            continue
        engine = engine_of(name, device.type)
        features[engine].append(work.features)
        seconds[engine].append(taken)
    if DENSE not in serving:  # what attends in the ragged layout was not timed
        serving = [name for name in serving if name != SCATTER]
    costs = {engine: fit_costs(features[engine], seconds[engine]) for engine in features}
    return {
        "candidates": tuple(serving),
        "costs": costs,
        "copy_seconds": _copy_seconds(q, wait),
        "calm": calm,
    }


def _timed(
    samples: list[tuple[str, TriePlan, Work]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    wait: Callable[[], None],
) -> tuple[list[float | None], bool]:
    """The least time of each sample, interleaved; None for a backend that refused. And whether they were calm."""
    refused: set[str] = set()
    runs: list[list[float]] = [[] for _ in samples]
    begun = time.perf_counter()
    for repetition in range(-1, _MOST):  # the first builds schedules and compiles kernels
        if repetition >= _LEAST and time.perf_counter() - begun > _BUDGET:
            break
        for (name, plan, _), times in zip(samples, runs, strict=True):
            if name in refused:
                continue
            rows = slice(plan.num_nodes)
            wait()
            before = time.perf_counter()
            try:
                get_attention(name)(q[rows], k[rows], v[rows], plan, spec)
            except UnsupportedAttentionError:
                refused.add(name)
                continue
            wait()
            if repetition >= 0:
                times.append(time.perf_counter() - before)
    calm = all(agree(times) for times in runs if times)
    return [None if name in refused else min(t) for (name, _, _), t in zip(samples, runs, strict=True)], calm


def _copy_seconds(q: Tensor, wait: Callable[[], None]) -> float:
    """Seconds a head row of an `index_select`."""
    index = torch.arange(q.shape[0], device=q.device).flip(0)
    times = []
    for _ in range(_LEAST + 1):
        wait()
        before = time.perf_counter()
        q.index_select(0, index)
        wait()
        times.append(time.perf_counter() - before)
    return min(times) / (q.shape[0] * q.shape[1])


def _stretched(x: Tensor) -> Tensor:
    """[n, H, D] -> [_ROWS, H, D] with the strides of a layer's: heads outside, rows inside."""
    copies = -(-_ROWS // x.shape[0])
    return x.transpose(0, 1).repeat(1, copies, 1)[:, :_ROWS].transpose(0, 1)


def _plans(name: str, device: torch.device) -> list[TriePlan]:
    """Plans of at most `_ROWS` rows. Dense ones are identity plans, of one chain a sequence."""
    if name == DENSE:
        shapes = ((512, 1), (128, 4), (32, 8), (8, 2))
        plans = [TriePlan.identity(_batch([[_own(i, length)] for i in range(n)])) for length, n in shapes]
    else:
        stem = range(160)
        shared = [[stem, _own(i, 24)] for i in range(8)]  # a chain, short chains, a broad call merged in
        short = [[range(24), _own(i, 8)] for i in range(2)]  # a bush
        deep = [[range(96), _own(i, 48), _own(10 * i + j, 8)] for i in range(1, 4) for j in range(4)]
        plans = [build_plan(_batch(rows)) for rows in (shared, short, deep)]
    return [plan.to(device) for plan in plans]


def _own(which: int, length: int) -> range:
    """Token ids that no other `which` has."""
    return range(1000 * (which + 1), 1000 * (which + 1) + length)


def _batch(rows: list[list[range]]) -> RaggedBatch:
    return RaggedBatch.from_sequences([[token for part in row for token in part] for row in rows])
