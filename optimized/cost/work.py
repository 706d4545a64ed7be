"""What an attention backend has to do for a plan, counted without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from radixmlp.optimized.attention.partial import Mask, chunks
from radixmlp.optimized.attention.schedule import Call, schedule_of
from radixmlp.optimized.attention.sdpa import ragged_plan, sequence_bounds
from radixmlp.reference import TriePlan

TRIE, SCATTER, DENSE, TRITON = "trie-sdpa", "scatter-sdpa", "dense-sdpa", "trie-triton"
# The engines that do the work: one cost for each.
PARTS, FUSED = "parts", "fused"


@dataclass(frozen=True)
class Work:
    """One layer's attention.

    Args:
        rounds: times that a fixed series of operations is started.
        scores: (query, key) pairs computed over all heads, padding and masked pairs included.
        moved: head rows of queries, keys and values that are gathered, copied or merged around the products.
    """

    rounds: int
    scores: int
    moved: int

    def __add__(self, other: Work) -> Work:
        return Work(self.rounds + other.rounds, self.scores + other.scores, self.moved + other.moved)

    @property
    def features(self) -> tuple[float, float, float]:
        """As a row of a linear model."""
        return float(self.rounds), float(self.scores), float(self.moved)


NOTHING = Work(0, 0, 0)


def engine_of(name: str, device_type: str) -> str:
    """What computes the attention of the backend called `name`: on the CPU all of ours share one engine."""
    if name == TRIE or (device_type == "cpu" and name in (DENSE, SCATTER)):
        return PARTS
    return FUSED if name in (DENSE, SCATTER) else name


def work_of(name: str, plan: TriePlan, query_heads: int, kv_heads: int, device_type: str) -> Work:
    """The work of the backend called `name` on a batch's `plan`, in depth-first order.

    For `scatter-sdpa` it is that of `dense-sdpa`; `copied_rows` come on top.
    """
    if name == TRITON:
        return _kernel_work(plan, query_heads)
    if name == TRIE:
        return _parts_work(plan, query_heads, kv_heads)
    if engine_of(name, device_type) == PARTS:
        return _parts_work(ragged_plan(plan), query_heads, kv_heads)
    return _fused_work(sequence_bounds(plan), query_heads)


def copied_rows(plan: TriePlan, query_heads: int, kv_heads: int) -> int:
    """Head rows that `scatter-sdpa` copies: Q, K and V to the ragged layout, the result back."""
    return plan.num_tokens * (query_heads + 2 * kv_heads) + plan.num_nodes * query_heads


def _parts_work(plan: TriePlan, query_heads: int, kv_heads: int) -> Work:
    """The calls of the plan's schedule, chunk by chunk as `partial.py` runs them."""
    known = plan.memo.get(("work", query_heads, kv_heads))
    if known is None:
        schedule = schedule_of(plan)
        known = sum((_call_work(call, query_heads, kv_heads, 1) for call in schedule.first), NOTHING)
        known += sum((_call_work(call, query_heads, kv_heads, 2) for call in schedule.merged), NOTHING)
        plan.memo["work", query_heads, kv_heads] = known
    return known


def _call_work(call: Call, query_heads: int, kv_heads: int, passes: int) -> Work:
    n, length, keys = call.queries.n, call.queries.length, call.keys.length
    q = torch.empty(n, kv_heads, query_heads // kv_heads, length, 0, device="meta")
    k = torch.empty(n, kv_heads, keys, 0, device="meta")
    rounds = scores = 0
    for chunk in chunks(q, k, Mask(call.causal, call.lead, call.visible)):
        rounds += 1
        panels, rows, seen = (part.stop - part.start for part in (chunk.panels, chunk.rows, chunk.keys))
        scores += panels * query_heads * rows * seen
    return Work(rounds, scores, n * (passes * length * query_heads + 2 * keys * kv_heads))


def _fused_work(bounds: Sequence[int], query_heads: int) -> Work:
    """One fused call for each run of equal lengths, which leaves masked pairs out."""
    lengths = [stop - start for start, stop in pairwise(bounds)]
    rounds = sum(1 for length, _ in groupby(lengths) if length)
    scores = sum(length * (length + 1) // 2 for length in lengths)
    return Work(rounds, scores * query_heads, bounds[-1] * query_heads)


def _kernel_work(plan: TriePlan, query_heads: int) -> Work:
    """One kernel over the visible pairs."""
    pairs = int((plan.depth.to(torch.int64) + 1).sum())
    return Work(1, pairs * query_heads, plan.num_nodes * query_heads)
