"""Which rows attend to which keys, as few dense calls: the schedule of `trie-sdpa`, built once a plan.

In depth-first order the descendants of a segment are one contiguous slice of rows, so all of them attend to it
in one unmasked call. Three kinds of call cover every visible (query, key) pair exactly once:

- *broad*: a slice of rows attends, unmasked, to keys on the path above it. Short segments wait (they are
  *pending*) until they make up a worthwhile call.
- *chain*: segments attend to themselves, causally; similar lengths share a call.
- *bush*: small subtrees, and short segments with keys pending above them, attend to those and to themselves
  under a mask; similar sizes share a call.

A chain or a bush is the first call of its rows, broad calls are merged into it. Bushes are at most `BUSH_ROWS`
rows with fewer than `WORTHWHILE_KEYS` pending keys and padding is bounded, so the work stays proportional to the
visible pairs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.optimized.attention.rows import Rows, one_slice, panels
from radixmlp.reference import TriePlan

BUSH_ROWS = 64
WORTHWHILE_KEYS = 16

Range = tuple[int, int]
Path = tuple[Range, ...]


@dataclass(frozen=True)
class Call:
    """Queries attend to keys, panel by panel.

    Args:
        queries, keys: n panels each.
        causal: query i sees keys 0 .. i of its panel (a chain).
        visible: [n, Lq, Lk] bool (a bush); None with causal False: every key (a broad call).
    """

    queries: Rows
    keys: Rows
    causal: bool = False
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
    chains: list[Range] = []
    bushes: list[tuple[Range, Path]] = []
    broad: list[tuple[Range, Path]] = []
    ancestors: list[tuple[int, Path]] = []  # (end of subtree, keys pending for its children)
    handled = 0  # rows below this are in some chain or bush already
    for a, b, e in zip(starts, stops, ends, strict=True):
        if a < handled:
            continue
        while ancestors and ancestors[-1][0] <= a:
            ancestors.pop()
        pending = ancestors[-1][1] if ancestors else ()
        if e - a <= BUSH_ROWS and (pending or b < e):
            bushes.append(((a, e), pending))
            handled = e
            continue
        if pending and (b == e or b - a >= WORTHWHILE_KEYS):
            broad.append(((a, e), pending))
            pending = ()
        if pending:
            bushes.append(((a, b), pending))
        else:
            chains.append((a, b))
        if b < e:
            below: Path = (*pending, (a, b))
            if sum(stop - start for start, stop in below) >= WORTHWHILE_KEYS:
                broad.append(((b, e), below))
                below = ()
            ancestors.append((e, below))
    first = (*_chain_calls(chains, plan), *_bush_calls(bushes, plan))
    return Schedule(first, tuple(_broad_call(*item, plan) for item in broad), _most_overlaps(broad))


def _broad_call(rows: Range, path: Path, plan: TriePlan) -> Call:
    return Call(one_slice(*rows), panels([list(path)], plan.gather.device))


def _chain_calls(chains: Iterable[Range], plan: TriePlan) -> list[Call]:
    buckets: dict[int, list[Range]] = defaultdict(list)
    for a, b in chains:
        buckets[_bucket(b - a)].append((a, b))
    rows = [panels([[item] for item in items], plan.gather.device) for items in buckets.values()]
    return [Call(r, r, causal=True) for r in rows]


def _bush_calls(bushes: Iterable[tuple[Range, Path]], plan: TriePlan) -> list[Call]:
    buckets: dict[tuple[int, int], list[tuple[Range, Path]]] = defaultdict(list)
    for rows, path in bushes:
        buckets[_bucket(rows[1] - rows[0]), _bucket(sum(t - s for s, t in path))].append((rows, path))
    return [_bush_call(items, plan) for items in buckets.values()]


def _bush_call(items: list[tuple[Range, Path]], plan: TriePlan) -> Call:
    device = plan.gather.device
    queries = panels([[rows] for rows, _ in items], device)
    keys = panels([[*path, rows] for rows, path in items], device)
    q, k = queries.indices(device), keys.indices(device)
    visible = (k[:, None, :] <= q[:, :, None]) & (q[:, :, None] < plan.subtree_end[k][:, None, :])
    if keys.real is not None:
        visible &= keys.real[:, None, :]
    return Call(queries, keys, visible=visible)


def _bucket(length: int) -> int:
    """Sizes that share a call: less than 8 rows of padding up to 64 rows, less than an eighth beyond."""
    if length <= 1:
        return length
    step = 8 if length <= 64 else 1 << (length.bit_length() - 4)
    return -(-length // step) * step


def _most_overlaps(broad: list[tuple[Range, Path]]) -> int:
    """The most broad calls that any one row is in."""
    events = sorted([(start, 1) for (start, _), _ in broad] + [(stop, -1) for (_, stop), _ in broad])
    most = depth = 0
    for _, change in events:
        depth += change
        most = max(most, depth)
    return most
