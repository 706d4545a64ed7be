"""Prefix grouping: a group's common prefix runs once, every sequence's own part runs with the prefix before it.

Attention is two calls a group: the prefix attends to itself, causally; each suffix attends to the concatenation of
the prefix's keys and its own. It is exact where the group has one level of sharing, and shares no more than that.
The products are those of `trie-sdpa`, so that what is compared is the scheme.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.optimized.attention.interface import require_trie_order
from radixmlp.optimized.attention.rows import panels
from radixmlp.optimized.attention.schedule import Call, Schedule, segments_of
from radixmlp.optimized.attention.trie_sdpa import attend_on_plan, unsupported_in_parts
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.training import causal_lm_loss

NAME = "prefix-grouping"

Range = tuple[int, int]


class PrefixGrouping:
    """Prefix self-attention, and suffix attention over the concatenation of prefix and own suffix."""

    name = NAME

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return unsupported_in_parts(spec, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv].

        Raises:
            ValueError: the plan branches more than once on some path.
        """
        require_trie_order(plan, self.name)
        grouped = plan.memo.get(NAME)
        if grouped is None:
            grouped = plan.memo[NAME] = replace(plan, memo={"schedule": _schedule(plan)})
        return attend_on_plan(q, k, v, grouped, spec)


@contextmanager
def registered() -> Iterator[None]:
    """Within the block the backend is available under its name."""
    radixmlp.register_attention(PrefixGrouping())
    try:
        yield
    finally:
        radixmlp.unregister_attention(NAME)


def grouped_loss(model: Any, batch: RaggedBatch, labels: Tensor | None = None) -> Tensor:
    """`causal_lm_loss` with the first level of sharing alone; call it within `registered()`."""
    return causal_lm_loss(model, batch, labels, attention=NAME, plan=group_plan(batch))


def group_plan(batch: RaggedBatch) -> TriePlan:
    """The plan that shares, among sequences with the same first token, what all of them start with; no more.

    Depth-first: the prefix of a group, then its sequences' own parts in the batch's order. The batch's `sharing_keys`
    make smaller groups, whose common prefix is longer.
    """
    trie = radixmlp.build_plan(batch)
    if trie.num_nodes == 0:
        return trie
    starts, stops, _ = segments_of(trie)
    bounds, roots = trie.cu_seqlens.tolist(), trie.parent.tolist()
    members: dict[int, list[Range]] = {}
    for first, last in pairwise(bounds):
        if first < last:
            members.setdefault(int(trie.scatter[first]), []).append((first, last))
    gather, parent, end = [], [], []
    scatter = torch.empty_like(trie.scatter)
    row = 0
    for start, stop in zip(starts, stops, strict=True):
        if roots[start] != -1:
            continue
        prefix, shared = row, stop - start
        gather.append(trie.gather[start:stop])
        parent.append(_chain(row, shared, -1))
        row += shared
        own_ends = []
        for first, last in members[start]:
            common = min(shared, last - first)
            scatter[first : first + common] = _count(prefix, common)
            own = last - first - common
            scatter[first + common : last] = _count(row, own)
            gather.append(_count(first + common, own))
            parent.append(_chain(row, own, prefix + shared - 1))
            row += own
            own_ends.append(torch.full((own,), row, dtype=torch.int32))
        end += [torch.full((shared,), row, dtype=torch.int32), *own_ends]
    rows = torch.cat(gather)
    ids, positions = batch.input_ids[rows], batch.position_ids[rows]
    return TriePlan(rows, scatter, torch.cat(parent), torch.cat(end), ids, positions, trie.cu_seqlens)


def _schedule(plan: TriePlan) -> Schedule:
    """One causal call for each prefix, and one for all suffixes below it, led by the prefix's keys."""
    parent, device = plan.parent.tolist(), plan.gather.device
    starts, stops, _ = segments_of(plan)
    suffixes: dict[int, list[Range]] = {}  # last row of the prefix -> suffixes
    prefixes: list[Range] = []
    for a, b in zip(starts, stops, strict=True):
        if parent[a] == -1:
            prefixes.append((a, b))
            suffixes[b - 1] = []
        elif parent[a] in suffixes:
            suffixes[parent[a]].append((a, b))
        else:
            raise ValueError(
                f"{NAME} shares one level, but row {a} branches off row {parent[a]}, which is no end of a group's "
                "common prefix: use group_plan(batch), or trie-sdpa"
            )
    calls = []
    for prefix in prefixes:
        queries = panels([[prefix]], device)
        calls.append(Call(queries, queries, causal=True))
        below = suffixes[prefix[1] - 1]
        if below:
            keys = panels([[prefix, suffix] for suffix in below], device)
            queries = panels([[suffix] for suffix in below], device)
            calls.append(Call(queries, keys, causal=True, lead=prefix[1] - prefix[0]))
    return Schedule(tuple(calls), (), 0)


def _count(start: int, length: int) -> Tensor:
    return torch.arange(start, start + length, dtype=torch.int32)


def _chain(row: int, length: int, parent: int) -> Tensor:
    """Parents of rows row .. row + length - 1, each below the one before it."""
    rows = _count(row - 1, length)
    rows[:1] = parent
    return rows
