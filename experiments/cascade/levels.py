"""Cascade attention on the trie: every level of shared keys is one part of the softmax, merged by log-sum-exp."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor

from radixmlp import AttentionSpec, TriePlan
from radixmlp.optimized.attention import require_trie_order
from radixmlp.optimized.attention.rows import one_slice, panels
from radixmlp.optimized.attention.schedule import Call, Schedule, segments_of
from radixmlp.optimized.attention.trie_sdpa import attend_on_plan, unsupported_in_parts

Range = tuple[int, int]


class Cascade:
    """Rows attend causally to their own segment, and unmasked to each segment above it, level by level.

    The products, their merging and their backward are `trie-sdpa`'s, so that what is compared is the scheme.

    Args:
        name: the backend's name.
        levels: levels from the root whose keys are a part of their own. Rows below take the keys of deeper
            segments together with their own, once a path: with 1, Hydragen's split into prefix and suffix.
            None: every level.
    """

    def __init__(self, name: str, levels: int | None = None) -> None:
        self.name, self.levels = name, levels

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return unsupported_in_parts(spec, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        require_trie_order(plan, self.name)
        key = ("cascade", self.levels)
        if key not in plan.memo:
            plan.memo[key] = replace(plan, memo={"schedule": cascade_schedule(plan, self.levels)})
        return attend_on_plan(q, k, v, plan.memo[key], spec)


def cascade_schedule(plan: TriePlan, levels: int | None = None) -> Schedule:
    """One unmasked call for each segment above `levels` with rows below it, one causal call for equal segments."""
    if plan.num_nodes == 0:
        return Schedule((), (), 0)
    owns: dict[tuple[int, int], list[tuple[Range, list[Range]]]] = defaultdict(list)
    broad: list[tuple[int, Call]] = []
    above: list[tuple[int, Range]] = []  # (end of subtree, segment) from the root down
    deepest = 0
    for start, stop, end in zip(*segments_of(plan), strict=True):
        while above and above[-1][0] <= start:
            above.pop()
        level = len(above)
        shared = level if levels is None else min(level, levels)
        deepest = max(deepest, shared)
        path = [segment for _, segment in above[shared:]]
        lead = sum(b - a for a, b in path)
        owns[stop - start, lead].append(((start, stop), path))
        if end > stop and (levels is None or level < levels):
            broad.append((level, Call(one_slice(stop, end), panels([[(start, stop)]], plan.gather.device))))
        above.append((end, (start, stop)))
    first = tuple(_own_call(items, lead, plan) for (_, lead), items in owns.items())
    merged = tuple(call for _, call in sorted(broad, key=lambda each: each[0]))
    return Schedule(first, merged, deepest)


def _own_call(items: list[tuple[Range, list[Range]]], lead: int, plan: TriePlan) -> Call:
    queries = panels([[rows] for rows, _ in items], plan.gather.device)
    keys = queries if not lead else panels([[*path, rows] for rows, path in items], plan.gather.device)
    return Call(queries, keys, causal=True, lead=lead)


def counts(schedule: Schedule) -> dict[str, int]:
    """What a schedule costs: calls, (query, key) pairs multiplied (a causal call's masked half included), merges.

    `merged_rows`: rows of results that are read, weighted and written again, over all merges.
    `key_rows`: rows of K (and as many of V) read by all calls.
    """
    calls = (*schedule.first, *schedule.merged)
    return {
        "calls": len(calls),
        "pairs": sum(call.queries.n * call.queries.length * call.keys.length for call in calls),
        "key_rows": sum(call.keys.n * call.keys.length for call in calls),
        "merged_rows": sum(call.queries.n * call.queries.length for call in schedule.merged),
        "most_merges_of_a_row": schedule.merges,
    }
