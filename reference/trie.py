"""The prefix trie of a batch, built with one dictionary (arXiv 2601.15013, section 3)."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import torch

from radixmlp.reference.plan import Order, TriePlan
from radixmlp.reference.ragged import RaggedBatch

ROOT = -1


def build_plan(batch: RaggedBatch, order: Order = "trie") -> TriePlan:
    """Give one compact row to every distinct path of (token id, position id).

    A node is unique by its parent and its (token id, position id); roots also by the sharing key of their
    sequence. Linear in the tokens of the batch, without recursion.

    Args:
        batch: N tokens in B sequences.
        order: "trie" numbers nodes depth-first, siblings in order of first occurrence; "input" numbers them
            by first occurrence.

    Returns:
        The plan, its index maps int32 on the batch's device.

    Raises:
        ValueError: `order` is neither of the two.
    """
    if order not in get_args(Order):
        raise ValueError(f"order is {order!r}: expected one of {', '.join(map(repr, get_args(Order)))}")
    scatter, parent, gather = _number_by_first_occurrence(batch)
    sizes = _subtree_sizes(parent)
    if order == "trie":
        rank = _depth_first_ranks(parent, sizes)
        subtree_end = [r + size for r, size in zip(rank, sizes, strict=True)]
    else:
        rank = list(range(len(parent)))
        subtree_end = _largest_descendants(parent)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=batch.input_ids.device)

    # Nodes are numbered by first occurrence up to here; `by_rank` lists them in the order asked for.
    by_rank = sorted(range(len(rank)), key=rank.__getitem__)
    first_rows = ints([gather[node] for node in by_rank])
    return TriePlan(
        gather=first_rows,
        scatter=ints([rank[node] for node in scatter]),
        parent=ints([ROOT if parent[node] == ROOT else rank[parent[node]] for node in by_rank]),
        subtree_end=ints([subtree_end[node] for node in by_rank]),
        input_ids=batch.input_ids[first_rows],
        position_ids=batch.position_ids[first_rows],
        cu_seqlens=batch.cu_seqlens,
        order=order,
    )


def _number_by_first_occurrence(batch: RaggedBatch) -> tuple[list[int], list[int], list[int]]:
    """Walk every sequence down the trie: node of each token [N], parent of each node [N'], first row [N']."""
    tokens = list(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
    keys = [0] * batch.num_sequences if batch.sharing_keys is None else batch.sharing_keys.tolist()
    nodes: dict[tuple[int, int, tuple[int, int]], int] = {}
    scatter: list[int] = []
    parent: list[int] = []
    gather: list[int] = []
    for key, (start, end) in zip(keys, pairwise(batch.cu_seqlens.tolist()), strict=True):
        above = ROOT
        for row in range(start, end):
            node = nodes.setdefault((key, above, tokens[row]), len(parent))
            if node == len(parent):
                parent.append(above)
                gather.append(row)
            scatter.append(node)
            above = node
    return scatter, parent, gather


def _subtree_sizes(parent: list[int]) -> list[int]:
    """[N'] nodes in each subtree. Parents come before their children, so one pass backwards adds them up."""
    sizes = [1] * len(parent)
    for node in reversed(range(len(parent))):
        if parent[node] != ROOT:
            sizes[parent[node]] += sizes[node]
    return sizes


def _depth_first_ranks(parent: list[int], sizes: list[int]) -> list[int]:
    """[N'] place of each node in depth-first order: each child takes the next free slice of its parent."""
    rank: list[int] = []
    free_below: list[int] = []
    free_root = 0
    for node, above in enumerate(parent):
        if above == ROOT:
            place, free_root = free_root, free_root + sizes[node]
        else:
            place = free_below[above]
            free_below[above] += sizes[node]
        rank.append(place)
        free_below.append(place + 1)
    return rank


def _largest_descendants(parent: list[int]) -> list[int]:
    """[N'] one past the largest node in each subtree, where nodes are numbered by first occurrence."""
    ends = list(range(1, len(parent) + 1))
    for node in reversed(range(len(parent))):
        if parent[node] != ROOT:
            ends[parent[node]] = max(ends[parent[node]], ends[node])
    return ends


def path_of(plan: TriePlan, node: int) -> list[int]:
    """The compact rows from the root to `node`, both included, by walking `parent`."""
    return _walk_up(plan.parent.tolist(), node)


def reconstruct(plan: TriePlan) -> list[list[tuple[int, int]]]:
    """The (token id, position id) pairs of each sequence, read off the trie alone.

    Walks `parent` up from the compact row of each sequence's last token, so a wrong merge shows although
    `input_ids[scatter]` is still right. Empty sequences give empty lists.

    Raises:
        ValueError: `parent` leads in a circle or out of the trie.
    """
    parent = plan.parent.tolist()
    values = list(zip(plan.input_ids.tolist(), plan.position_ids.tolist(), strict=True))
    scatter = plan.scatter.tolist()
    bounds = pairwise(plan.cu_seqlens.tolist())
    paths = (_walk_up(parent, scatter[end - 1]) if end > start else [] for start, end in bounds)
    return [[values[node] for node in path] for path in paths]


def _walk_up(parent: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        if not 0 <= node < len(parent):
            raise ValueError(f"compact row {node} is outside the trie's {len(parent)} rows")
        if len(path) == len(parent):
            raise ValueError(f"walking parent up to compact row {node} never reaches a root: it is a circle")
        path.append(node)
        node = parent[node]
    return path[::-1]
