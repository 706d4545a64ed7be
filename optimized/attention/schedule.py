"""Which rows attend to which keys, as few dense calls: the schedule of `trie-sdpa`, built once a plan.

In depth-first order the descendants of a segment are one contiguous slice of rows, so all of them attend to it
in one unmasked call. Three kinds of call cover every visible (query, key) pair exactly once:

- *broad*: a slice of rows attends, unmasked, to keys on the path above it. It costs a pass over those rows, so
  a path that is short beside what hangs below it waits instead (it is *pending*) and is attended to further down.
- *chain*: segments attend to their pending keys and, causally, to themselves; similar lengths share a call.
- *bush*: small subtrees, and short inner segments with pending keys, attend to those and to themselves under
  a mask; similar sizes share a call.

A chain or a bush is the first call of its rows, broad calls are merged into it. Bushes have at most `BUSH_ROWS`
rows, pending keys number at most `MOST_PENDING`, and padding is bounded, so the work stays proportional to the
visible pairs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.optimized.attention.rows import Rows, one_slice, panels
from radixmlp.reference import TriePlan

BUSH_ROWS = 64
ALWAYS_PENDING = 16  # keys so few never justify a pass over the rows below
MOST_PENDING = 128

Range = tuple[int, int]
Path = tuple[Range, ...]
Item = tuple[Range, Path]  # rows, and the keys pending above them


@dataclass(frozen=True)
class Call:
    """Queries attend to keys, panel by panel.

    Args:
        queries, keys: n panels each.
        causal: query i of a panel sees its keys 0 .. lead + i (a chain).
        lead: the pending keys, which come first in each panel of a chain.
        visible: [n, Lq, Lk] bool (a bush); None with causal False: every key (a broad call).
    """

    queries: Rows
    keys: Rows
    causal: bool = False
    lead: int = 0
    visible: Tensor | None = None


@dataclass(frozen=True)
class Schedule:
    """`first` calls write their rows, `merged` ones are merged into them; `merges` is the most any row has."""

    first: tuple[Call, ...]
    merged: tuple[Call, ...]
    merges: int


def schedule_of(plan: TriePlan) -> Schedule:
    """The plan's schedule, built on first use."""
    schedule = plan.memo.get("schedule")
    if schedule is None:
        schedule = plan.memo["schedule"] = build_schedule(plan)
    return schedule


def segments_of(plan: TriePlan) -> tuple[list[int], list[int], list[int]]:
    """Segments in depth-first order as lists (start, stop, end): rows [start, stop), subtree [start, end).

    A new segment starts at each root and at each child of a branching node.
    """
    parent = plan.parent.cpu().long()
    n = plan.num_nodes
    children = torch.bincount(parent[parent >= 0], minlength=n)
    continues = (parent >= 0) & (children[parent.clamp_min(0)] == 1)
    start = (~continues).nonzero().flatten()
    stop = torch.cat([start[1:], start.new_tensor([n])])
    return start.tolist(), stop.tolist(), plan.subtree_end.cpu()[start].tolist()


def build_schedule(plan: TriePlan) -> Schedule:
    """Walk the segments in depth-first order, carrying the keys that are pending above each."""
    if plan.num_nodes == 0:
        return Schedule((), (), 0)
    starts, stops, ends = segments_of(plan)
    chains: list[Item] = []
    bushes: list[Item] = []
    broad: list[Item] = []
    ancestors: list[tuple[int, Path]] = []  # (end of subtree, keys pending for its children)
    handled = 0  # rows below this are in some chain or bush already
    for i, (a, b, e) in enumerate(zip(starts, stops, ends, strict=True)):
        if a < handled:
            continue
        while ancestors and ancestors[-1][0] <= a:
            ancestors.pop()
        pending = ancestors[-1][1] if ancestors else ()
        if b == e:
            chains.append(((a, b), pending))
            continue
        if e - a <= BUSH_ROWS:
            bushes.append(((a, e), pending))
            handled = e
            continue
        if pending and b - a >= ALWAYS_PENDING:
            broad.append(((a, e), pending))
            pending = ()
        (bushes if pending else chains).append(((a, b), pending))
        below: Path = (*pending, (a, b))
        segments_below = bisect_left(starts, e) - i - 1
        if _size(below) > min(MOST_PENDING, max(ALWAYS_PENDING, (e - b) // segments_below)):
            broad.append(((b, e), below))
            below = ()
        ancestors.append((e, below))
    first = (*_chain_calls(chains, plan), *_bush_calls(bushes, plan))
    return Schedule(first, tuple(_broad_call(*item, plan) for item in broad), _most_overlaps(broad))


def _size(path: Path) -> int:
    return sum(stop - start for start, stop in path)


def _broad_call(rows: Range, path: Path, plan: TriePlan) -> Call:
    return Call(one_slice(*rows), panels([list(path)], plan.gather.device))


def _chain_calls(chains: Iterable[Item], plan: TriePlan) -> list[Call]:
    buckets: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for rows, path in chains:
        buckets[_bucket(rows[1] - rows[0]), _size(path)].append((rows, path))
    return [_chain_call(items, lead, plan) for (_, lead), items in buckets.items()]


def _chain_call(items: list[Item], lead: int, plan: TriePlan) -> Call:
    device = plan.gather.device
    queries = panels([[rows] for rows, _ in items], device)
    keys = queries if lead == 0 else panels([[*path, rows] for rows, path in items], device)
    return Call(queries, keys, causal=True, lead=lead)


def _bush_calls(bushes: Iterable[Item], plan: TriePlan) -> list[Call]:
    buckets: dict[tuple[int, int], list[Item]] = defaultdict(list)
    for rows, path in bushes:
        buckets[_bucket(rows[1] - rows[0]), _bucket(_size(path))].append((rows, path))
    return [_bush_call(items, plan) for items in buckets.values()]


def _bush_call(items: list[Item], plan: TriePlan) -> Call:
    device = plan.gather.device
    queries = panels([[rows] for rows, _ in items], device)
    keys = panels([[*path, rows] for rows, path in items], device)
    q, k = queries.indices(device), keys.indices(device)
    visible = (k[:, None, :] <= q[:, :, None]) & (q[:, :, None] < plan.subtree_end[k][:, None, :])
    if keys.real is not None:
        visible &= keys.real[:, None, :]
    return Call(queries, keys, visible=visible)


def _bucket(length: int) -> int:
    """Sizes that share a call.

    Less than 8 rows of padding up to 32 rows; less than 32 up to 128, where a call costs more than what it
    computes; less than an eighth beyond.
    """
    if length <= 1:
        return length
    if length <= 32:
        step = 8
    elif length <= 128:
        step = 32
    else:
        step = 1 << (length.bit_length() - 4)
    return -(-length // step) * step


def _most_overlaps(broad: list[Item]) -> int:
    """The most broad calls that any one row is in."""
    events = sorted([(start, 1) for (start, _), _ in broad] + [(stop, -1) for (_, stop), _ in broad])
    most = depth = 0
    for _, change in events:
        depth += change
        most = max(most, depth)
    return most
