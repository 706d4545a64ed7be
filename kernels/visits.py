"""Which blocks of keys each block of queries has to visit, from the plan alone.

In depth-first order the keys before q0 that any query of the block [q0, q1) sees are ancestors of q0: what spans
q0 and a later row is an ancestor of both. So a block of queries visits the key blocks that hold an ancestor of
q0, and those of its own rows. Jumps up the trie that leave a key block cost one step a visit: the lists take time
and space linear in the number of visited block pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from radixmlp.reference import TriePlan

F = TypeVar("F", bound=Callable[..., object])
Int: TypeAlias = Any
Int32Array: TypeAlias = NDArray[Any]

NO_WINDOW = 2**31 - 1
WHOLE = -1  # the slot of an item that holds all visits of its block
ITEM_WORDS = 5


def _compiled(function: F) -> F:
    """Compile at the first call, without the GIL; kept on disk where a place is writable."""
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return njit(nogil=True)(function)


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For each block on one side, the blocks on the other: the fully visible ones, then those under the mask.

    Args:
        begin: [n+1] int32, block i owns others[begin[i] : begin[i+1]].
        middle: [n] int32, where the fully visible ones of block i end.
        others: [visits] int32, ascending within either kind.
    """

    begin: Int32Array
    middle: Int32Array
    others: Int32Array

    @property
    def lengths(self) -> Int32Array:
        """[n] visits of each block."""
        return np.diff(self.begin)


@dataclass(frozen=True, eq=False)
class Visits:
    """The block pairs that hold a visible (query, key) pair.

    Args:
        block_queries, block_keys: rows of a block.
        num_nodes: N'.
        by_query: for each block of queries the key blocks it visits.
        useful_pairs: visible (query, key) pairs of the trie.
    """

    block_queries: int
    block_keys: int
    num_nodes: int
    by_query: BlockLists
    useful_pairs: int

    @cached_property
    def by_key(self) -> BlockLists:
        """For each block of keys the query blocks that visit it."""
        lists = self.by_query
        return BlockLists(
            *_transpose(lists.begin, lists.middle, lists.others, -(-self.num_nodes // self.block_keys))
        )

    @property
    def visited_pairs(self) -> int:
        """(query, key) pairs of all visited blocks, rows past the end of the trie included."""
        return len(self.by_query.others) * self.block_queries * self.block_keys

    @property
    def useful_share(self) -> float:
        """Useful FLOPs / FLOPs of the visited blocks (1.0 for the empty trie); a pair costs the same in both."""
        return self.useful_pairs / self.visited_pairs if self.visited_pairs else 1.0


@dataclass(frozen=True, eq=False)
class Work:
    """What the programs of one kernel do, on its device.

    Args:
        items: [n, 5] int32 (block, begin, middle, end, slot), longest first: a program handles its `block`
            against others[begin:middle], fully visible, and others[middle:end], under the mask. `slot` is
            `WHOLE`, or where the item's part of a split block's sum goes.
        others: [visits + 1] int32; the last is for kernels that read one ahead.
        split: [m, 3] int32 (block, first slot, one past the last), of the split blocks.
        num_slots: of all split blocks.
    """

    items: Tensor
    others: Tensor
    split: Tensor
    num_slots: int


def build_visits(plan: TriePlan, block_queries: int, block_keys: int, window: int | None = None) -> Visits:
    """List the visits of every block of queries.

    Args:
        plan: N' nodes in depth-first order.
        block_queries, block_keys: rows of a block, at least 1.
        window: a query sees the last `window` nodes of its path, itself included; None: all.

    Raises:
        ValueError: a plan in another order, a block or a window without rows.
    """
    if plan.order != "trie":
        raise ValueError(
            f"visits need depth-first order, got order={plan.order!r}: build_plan(batch, order='trie')"
        )
    if block_queries < 1 or block_keys < 1:
        raise ValueError(f"blocks of {block_queries} queries and {block_keys} keys: give each at least 1 row")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}: a query sees itself, so at least 1 (or None)")
    reach = NO_WINDOW if window is None else min(window, NO_WINDOW)
    parent, end, depth = (x.cpu().numpy() for x in (plan.parent, plan.subtree_end, plan.depth))
    trie = (_jumps(parent, block_keys), _block_minima(end, block_keys), depth)
    blocks = -(-plan.num_nodes // block_queries)
    begin, middle = np.zeros(blocks + 1, np.int32), np.zeros(blocks, np.int32)
    sizes = (block_queries, block_keys, reach)
    _visit_blocks(trie, *sizes, begin, middle, np.empty(0, np.int32))
    others = np.empty(begin[-1], np.int32)
    _visit_blocks(trie, *sizes, begin, middle, others)
    useful = int(np.minimum(depth.astype(np.int64) + 1, reach).sum())
    return Visits(block_queries, block_keys, plan.num_nodes, BlockLists(begin, middle, others), useful)


def visits_of(plan: TriePlan, block_queries: int, block_keys: int, window: int | None = None) -> Visits:
    """`build_visits`, once a plan."""
    if window is not None and window > _deepest(plan):
        window = None
    key = ("visits", block_queries, block_keys, window)
    visits = plan.memo.get(key)
    if visits is None:
        visits = plan.memo[key] = build_visits(plan, block_queries, block_keys, window)
    return visits


def _deepest(plan: TriePlan) -> int:
    """The largest depth of any row, read from the device once a plan."""
    deepest = plan.memo.get("deepest")
    if deepest is None:
        deepest = plan.memo["deepest"] = int(plan.depth.max()) if plan.num_nodes else 0
    return deepest


def work_of(lists: BlockLists, device: torch.device, longest: int | None = None) -> Work:
    """One item a block, or several where it has more than `longest` visits; one copy to the device."""
    lengths = lists.lengths.astype(np.int64)
    pieces = np.ones_like(lengths) if longest is None else np.maximum(-(-lengths // longest), 1)
    block = np.repeat(np.arange(len(lengths)), pieces)
    piece = np.arange(len(block)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    stop = lists.begin[1:][block]
    begin = lists.begin[block] + (piece * (0 if longest is None else longest))
    end = stop if longest is None else np.minimum(begin + longest, stop)
    middle = np.clip(lists.middle[block], begin, end)
    split = pieces[block] > 1
    slot = np.where(split, np.cumsum(split) - 1, WHOLE)
    items = np.stack([block, begin, middle, end, slot], 1)[np.argsort(begin - end, kind="stable")]

    several = np.flatnonzero(pieces > 1)
    last = np.cumsum(pieces[several])
    parts = np.stack([several, last - pieces[several], last], 1)
    on_device = _to_device([items, parts, np.append(lists.others, np.int32(0))], device)
    return Work(on_device[0].view(-1, ITEM_WORDS), on_device[2], on_device[1].view(-1, 3), int(split.sum()))


def _to_device(arrays: list[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays, flat, as int32 on `device` in one copy, each starting at a multiple of 16 bytes."""
    room = [-(-array.size // 4) * 4 for array in arrays]
    starts = np.cumsum([0, *room])
    packed = np.zeros(int(starts[-1]), np.int32)
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.reshape(-1)
    tensor = torch.from_numpy(packed)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return [tensor[start : start + array.size] for start, array in zip(starts, arrays, strict=False)]


@_compiled
def _jumps(parent: Int32Array, block_keys: Int) -> Int32Array:
    """[N'] the deepest ancestor of each node that lies in another key block, -1 where there is none."""
    jump = np.empty_like(parent)
    for node in range(len(parent)):
        above = parent[node]
        inside = above >= 0 and above // block_keys == node // block_keys
        jump[node] = jump[above] if inside else above
    return jump


@_compiled
def _block_minima(values: Int32Array, block: Int) -> Int32Array:
    """[blocks] the least of each block; a block that is not full counts 0 for what it lacks."""
    minima = np.zeros((len(values) + block - 1) // block, values.dtype)
    for i in range(len(values) // block):
        minima[i] = values[i * block : (i + 1) * block].min()
    return minima


@_compiled
def _above(key: Int, q0: Int, block_keys: Int, jump: Int32Array) -> Int:
    """The next visible key up from `key`, in another key block: a row of the query block, or an ancestor of q0."""
    first = key // block_keys * block_keys
    if first > q0:
        return first - 1
    return jump[q0] if key >= q0 else jump[key]


@_compiled
def _visit_blocks(
    trie: Any,
    block_queries: Int,
    block_keys: Int,
    window: Int,
    begin: Int32Array,
    middle: Int32Array,
    others: Int32Array,
) -> None:
    """Walk up from each block of queries: count into begin and middle, or write `others` where it has room."""
    jump, least_end, depth = trie
    write = len(others) > 0
    for i in range(len(middle)):
        q0 = i * block_queries
        q1 = min(q0 + block_queries, len(jump))
        shallowest, deepest = depth[q0:q1].min(), depth[q0:q1].max()
        full = partial = 0
        key = q1 - 1
        while key >= q0 or (key >= 0 and shallowest - depth[key] < window):
            block = key // block_keys
            first = block * block_keys
            seen_by_all = first + block_keys - 1 <= q0 and least_end[block] >= q1
            if seen_by_all and deepest - depth[first] < window:
                full += 1
                if write:
                    others[middle[i] - full] = block
            else:
                partial += 1
                if write:
                    others[begin[i + 1] - partial] = block
            key = _above(key, q0, block_keys, jump)
        if not write:
            middle[i] = begin[i] + full
            begin[i + 1] = middle[i] + partial


@_compiled
def _transpose(
    begin: Int32Array, middle: Int32Array, others: Int32Array, num_others: Int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """The lists of the other side, in its (begin, middle, others); a counting sort, full visits first."""
    into = np.zeros(num_others + 1, np.int32)
    full = np.zeros(num_others, np.int32)
    for i in range(len(middle)):
        for visit in range(begin[i], begin[i + 1]):
            into[others[visit] + 1] += 1
            full[others[visit]] += visit < middle[i]
    for j in range(num_others):
        into[j + 1] += into[j]
    split = into[:-1] + full
    next_full, next_partial = into[:-1].copy(), split.copy()
    back = np.empty_like(others)
    for i in range(len(middle)):
        for visit in range(begin[i], begin[i + 1]):
            j = others[visit]
            free = next_full if visit < middle[i] else next_partial
            back[free[j]] = i
            free[j] += 1
    return into, split, back
