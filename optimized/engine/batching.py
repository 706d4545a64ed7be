"""Prefix-aware batching: requests in the trie's order, cut where few rows are computed twice.

In depth-first order a request adds to those before it exactly the trie nodes between its last row and theirs, and
a batch that begins at a request pays for its whole path anew. So the rows of any batch of consecutive requests are
known from two numbers a request, and the best places to cut are found in one pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal, get_args

import numpy as np
from torch import Tensor

from radixmlp.optimized.engine.errors import RequestError
from radixmlp.optimized.index import build_plan
from radixmlp.reference import RaggedBatch, TriePlan

Policy = Literal["prefix", "fifo"]
# A batch's ragged tokens over its budget of compact rows: index maps of N entries exist beside the N' rows.
MOST_SHARING = 64
_BATCH = 1 << 48  # one batch more weighs more than any number of rows


@dataclass(frozen=True)
class Batch:
    """Requests that run together.

    Args:
        requests: their indices, in the order of the batch.
        rows: compact rows they take together, N'.
        tokens: ragged rows, N.
    """

    requests: list[int]
    rows: int
    tokens: int


@dataclass(frozen=True)
class Walk:
    """Requests in depth-first order of their trie: prefixes before what continues them, duplicates side by side.

    Args:
        order: [B] the requests' indices.
        lengths: [B] tokens of each, in that order.
        added: [B] rows each adds to those before it.
    """

    order: list[int]
    lengths: list[int]
    added: list[int]

    @classmethod
    def of(cls, plan: TriePlan) -> Walk:
        """The walk through a plan in depth-first order."""
        if plan.order != "trie":
            raise ValueError(f"the plan is in order={plan.order!r}: build_plan(batch, order='trie')")
        last = last_rows(plan)
        order = last.argsort(stable=True)
        ends = last[order]
        added = ends.diff(prepend=ends.new_full((1,), -1))  # every node lies on some request's path
        return cls(order.tolist(), plan.cu_seqlens.diff()[order].tolist(), added.tolist())


def last_rows(plan: TriePlan) -> Tensor:
    """[B] int64 the compact row of each sequence's last token, -1 for an empty sequence."""
    ends = plan.cu_seqlens[1:].long()
    filled = plan.cu_seqlens.diff() > 0
    last = ends.new_full(ends.shape, -1)
    last[filled] = plan.scatter[ends[filled] - 1].long()
    return last


def trie_order(batch: RaggedBatch) -> list[int]:
    """The indices of `batch`'s sequences in depth-first order of its trie; empty ones first."""
    return Walk.of(build_plan(batch)).order


def plan_batches(
    batch: RaggedBatch,
    max_batch_tokens: int,
    policy: Policy = "prefix",
    *,
    max_ragged_tokens: int | None = None,
) -> list[Batch]:
    """Divide the requests of `batch` into batches of at most `max_batch_tokens` compact rows each.

    Args:
        batch: one sequence a request.
        max_batch_tokens: the budget, in computed rows.
        policy: "prefix": along the trie, the fewest batches and among those the fewest rows; "fifo": as they come.
        max_ragged_tokens: the most tokens of one batch before sharing (default: 64 budgets).

    Raises:
        RequestError: a request is longer than a budget.
        ValueError: an unknown policy, or a budget below 1.

    Time is linear in the tokens of `batch`.
    """
    if max_batch_tokens < 1:
        raise ValueError(f"max_batch_tokens is {max_batch_tokens}: expected 1 or more")
    limit = MOST_SHARING * max_batch_tokens if max_ragged_tokens is None else max_ragged_tokens
    _check_lengths(batch, min(max_batch_tokens, limit))
    if policy == "fifo":
        return _in_turn(batch, max_batch_tokens, limit)
    if policy != "prefix":
        raise ValueError(f"policy is {policy!r}: expected one of {', '.join(get_args(Policy))}")
    walk = Walk.of(build_plan(batch))
    cuts = best_cuts(walk.lengths, walk.added, max_batch_tokens, limit)
    return [between(walk, first, end) for first, end in pairwise([0, *cuts, len(walk.order)]) if end > first]


def best_cuts(
    lengths: Sequence[int],
    added: Sequence[int],
    budget: int,
    ragged_budget: int,
    more_to_come: bool = False,
) -> list[int]:
    """Where to begin a new batch: positions in a walk, ascending, without 0.

    Fewest batches first, then fewest rows. A batch first .. end-1 takes lengths[first] + sum(added[first+1:end])
    rows. That grows with every earlier `first` and every later `end`, so the beginnings that fit an end are a window
    that only moves on, and the best of a window is kept in a queue: linear in the requests.

    Args:
        lengths, added: of a `Walk`.
        budget, ragged_budget: most rows and most tokens of a batch; no request is longer than either.
        more_to_come: what follows the last cut is the beginning of a batch that later requests will fill: the
            batches before it are as full as they can be, or a little less where that saves rows.
    """
    n = len(lengths)
    cost = [0] * (n + 1)  # of the best division of the first i requests: batches * _BATCH + repeated rows
    begin = [0] * (n + 1)  # where the last batch of that division begins
    rows, tokens = [0, *accumulate(added)], [0, *accumulate(lengths)]
    repeated = [length - new for length, new in zip(lengths, added, strict=True)]  # where a batch begins here
    window: deque[int] = deque()  # beginnings that still fit, from the best on
    for end in range(1, n + 1):
        newest = end - 1
        while window and cost[window[-1]] + repeated[window[-1]] >= cost[newest] + repeated[newest]:
            window.pop()
        window.append(newest)
        while (
            rows[end] - rows[window[0]] + repeated[window[0]] > budget
            or tokens[end] - tokens[window[0]] > ragged_budget
        ):
            window.popleft()
        begin[end] = window[0]
        cost[end] = cost[window[0]] + repeated[window[0]] + _BATCH
    last = _open_end(cost, rows, repeated, budget) if more_to_come and n else begin[n]
    cuts = []
    while last:
        cuts.append(last)
        last = begin[last]
    return cuts[::-1]


def _open_end(cost: list[int], rows: list[int], repeated: list[int], budget: int) -> int:
    """Where to begin the batch that is not full yet, with one batch fewer before it than there are in all."""
    full = cost[-1] // _BATCH - 1
    furthest = bisect_left(cost, (full + 1) * _BATCH) - 1
    earliest = bisect_left(cost, full * _BATCH)
    least = rows[furthest] - budget // 4
    ends = range(max(earliest, bisect_left(rows, least)), furthest + 1)
    return min(ends, key=lambda end: (cost[end] + repeated[end], -end))


def between(walk: Walk, first: int, end: int) -> Batch:
    """The batch of requests first .. end-1 of a walk."""
    repeated = walk.lengths[first] - walk.added[first]
    rows = repeated + sum(walk.added[first:end])
    return Batch(walk.order[first:end], rows, sum(walk.lengths[first:end]))


def _in_turn(batch: RaggedBatch, budget: int, ragged_budget: int) -> list[Batch]:
    """First in, first out: a batch takes requests until the next one does not fit."""
    scatter = build_plan(batch).scatter.cpu().numpy()
    bounds = batch.cu_seqlens.tolist()
    taken_by = np.full(
        int(scatter.max()) + 1 if scatter.size else 0, -1, np.int64
    )  # the batch that last had a row
    batches: list[Batch] = []
    requests, rows, tokens = list[int](), 0, 0
    for request, (start, end) in enumerate(pairwise(bounds)):
        path = scatter[start:end]
        new = int((taken_by[path] != len(batches)).sum())
        if requests and (rows + new > budget or tokens + end - start > ragged_budget):
            batches.append(Batch(requests, rows, tokens))
            requests, rows, tokens, new = [], 0, 0, end - start
        taken_by[path] = len(batches)
        requests.append(request)
        rows, tokens = rows + new, tokens + end - start
    return [*batches, Batch(requests, rows, tokens)] if requests else batches


def _check_lengths(batch: RaggedBatch, limit: int) -> None:
    lengths = batch.lengths
    if lengths.numel() and int(lengths.max()) > limit:
        index = int((lengths > limit).nonzero()[0])
        raise RequestError(
            index,
            f"has {int(lengths[index])} tokens, more than the budget of {limit} a batch: raise max_batch_tokens "
            "or shorten it",
        )
