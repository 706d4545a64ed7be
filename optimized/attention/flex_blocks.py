"""Block masks for FlexAttention, written straight from the plan.

In depth-first order key k is seen by the queries k .. subtree_end[k]-1, so a block of keys is seen by one run of
query blocks. The block mask is these runs, written down; the N' x N' mask is never evaluated to find them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from radixmlp.reference import TriePlan

BLOCK = 128  # rows of a block: a multiple of what FlexAttention's kernels take at once
_LEAST_ROWS = _LEAST_BLOCKS = 2  # a dimension of size 1 would be compiled for 1 alone

Ints = npt.NDArray[np.int64]
BlockLists = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Blocks:
    """Which blocks of `BLOCK` rows see which, and what decides within a block; all int32 on the plan's device.

    Args:
        by_query: the partly visible key blocks of each query block as (count [1, 1, blocks], keys
            [1, 1, blocks, blocks]), then the fully visible ones in the same way.
        by_key: the same, transposed, which a backward pass needs; None: not made.
        position, end: [max(N', 2)], row number and end of subtree; looked up by both indices of a score.
        depth, reach: [max(N', 2)], depth and depth + window; None without a window.
    """

    by_query: BlockLists
    by_key: BlockLists | None
    position: Tensor
    end: Tensor
    depth: Tensor | None
    reach: Tensor | None


def blocks_of(plan: TriePlan, window: int | None, backward: bool = False) -> Blocks:
    """The plan's blocks, made once for a plan and window (a window that reaches every root is none)."""
    depth = _depth(plan)
    if window is not None and (depth.size == 0 or window > int(depth.max())):
        window = None
    key = ("trie-flex", window, backward)
    blocks: Blocks | None = plan.memo.get(key)
    if blocks is None:
        blocks = plan.memo[key] = _make_blocks(plan, depth, window, backward)
    return blocks


def _depth(plan: TriePlan) -> Ints:
    """[N'] depths on the CPU, read from the device once a plan."""
    depth: Ints | None = plan.memo.get("trie-flex.depth")
    if depth is None:
        depth = plan.memo["trie-flex.depth"] = plan.depth.cpu().numpy().astype(np.int64)
    return depth


def _make_blocks(plan: TriePlan, depth: Ints, window: int | None, backward: bool) -> Blocks:
    end = plan.subtree_end.cpu().numpy().astype(np.int64)
    device = plan.gather.device
    count = max(_LEAST_BLOCKS, -(-len(end) // BLOCK))
    part, full = visible_pairs(end, depth, window)
    by_query = (*_table(*part, count, device), *_table(*full, count, device))
    by_key = (*_table(*part[::-1], count, device), *_table(*full[::-1], count, device)) if backward else None
    extra = np.arange(len(end), _LEAST_ROWS)  # a lone row gets a neighbour that sees itself alone
    end, depth = np.append(end, extra + 1), np.append(depth, np.zeros_like(extra))
    return Blocks(
        by_query,
        by_key,
        position=_lookup(np.arange(len(end)), device),
        end=_lookup(end, device),
        depth=None if window is None else _lookup(depth, device),
        reach=None if window is None else _lookup(depth + window, device),
    )


def visible_pairs(
    end: Ints, depth: Ints, window: int | None, block: int = BLOCK
) -> tuple[tuple[Ints, Ints], tuple[Ints, Ints]]:
    """The (query block, key block) pairs with something to see, those seen in part and those seen in full.

    Linear in N' and in the number of pairs that an unlimited window would have. With a window, pairs whose
    depths are all too far apart are left out; a pair in part may turn out to be empty.

    Args:
        end: [N'] end of subtree of each row.
        depth: [N'] ancestors of each row.
        window: nodes along the path that a query sees, itself included.

    Returns:
        (query blocks, key blocks) in part, and in full; sorted by key block, then by query block.
    """
    rows = len(end)
    starts = np.arange(0, rows, block)
    if rows == 0:
        none = np.zeros(0, np.int64)
        return (none, none), (none, none)
    own = np.arange(len(starts))
    last = (
        np.maximum.reduceat(end, starts) - 1
    ) // block  # the last query block that sees any key of the block
    until = np.minimum.reduceat(end, starts)
    last_full = (
        np.where(until == rows, len(starts), until // block) - 1
    )  # and the last that sees all its keys
    key = np.repeat(own, last - own + 1)
    query = np.arange(len(key)) - np.repeat(np.cumsum(last - own + 1) - (last + 1), last - own + 1)
    full = (query > key) & (query <= last_full[key])
    seen = np.ones(len(key), bool)
    if window is not None:
        lowest, highest = np.minimum.reduceat(depth, starts), np.maximum.reduceat(depth, starts)
        seen = lowest[query] - highest[key] < window
        full &= highest[query] - lowest[key] < window
    part = seen & ~full
    return (query[part], key[part]), (query[full], key[full])


def _table(rows: Ints, columns: Ints, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(columns of each row [1, 1, count], and which: [1, 1, count, count], zeros after them), int32."""
    from torch._dynamo import mark_dynamic

    # 16-bit numbers are sorted by radix, in linear time.
    order = np.argsort(rows.astype(np.uint16 if count <= 1 << 16 else np.int64), kind="stable")
    rows, columns = rows[order], columns[order]
    sizes = np.bincount(rows, minlength=count)
    table = np.zeros((count, count), np.int32)
    table[rows, np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)] = columns
    counted, listed = (
        torch.from_numpy(x.astype(np.int32, copy=False)).to(device)[None, None] for x in (sizes, table)
    )
    mark_dynamic(counted, 2)
    mark_dynamic(listed, (2, 3))
    return counted, listed


def _lookup(values: Ints, device: torch.device) -> Tensor:
    """`values` [rows] as int32 on `device`, for the mask to capture."""
    from torch._dynamo.decorators import mark_dynamic, mark_unbacked

    lookup = torch.from_numpy(values.astype(np.int32)).to(device)
    # Inductor names a captured size after its symbol and, on a CPU, renames part of the name of some of them as
    # if they were its own block sizes, so that the C++ does not compile. It leaves unbacked ones alone.
    mark = mark_unbacked if device.type == "cpu" else mark_dynamic
    mark(lookup, 0)
    return lookup
