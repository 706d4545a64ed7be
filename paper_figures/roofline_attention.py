"""What a computed (query, key) pair costs on this CPU, by how many keys a query has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import radixmlp
from radixmlp.optimized.attention import get_attention
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

from .roofline_cpu import Curve, at
from .roofline_primitives import Clock
from .roofline_work import attended_of

Heads = tuple[int, int, int]  # query heads, KV heads, head size


def chain_curve(
    heads: Heads, chains: Sequence[tuple[int, int]], dtype: torch.dtype, clock: Clock, training: bool
) -> Curve:
    """(mean computed keys, seconds per pair of one head) of sequences that share nothing.

    Args:
        chains: (tokens, sequences), by tokens.
    """
    points = []
    for tokens, sequences in chains:
        batch = RaggedBatch.from_sequences([[b] * tokens for b in range(sequences)])
        plan = TriePlan.identity(batch)
        attended = attended_of(plan)
        seconds = _seconds(plan, heads, dtype, clock, training)
        points.append((attended.first_pairs / attended.first_rows, seconds / heads[0] / attended.first_pairs))
    return tuple(points)


def merged_curve(
    heads: Heads,
    prefixes: Sequence[tuple[int, int, int]],
    chain: Curve,
    dtype: torch.dtype,
    clock: Clock,
    training: bool,
) -> Curve:
    """(keys, seconds per pair of one head) of suffixes that attend to one prefix and merge what they find.

    Args:
        prefixes: (prefix, suffix, sequences), by prefix, each long enough to have a call of its own.
        chain: of the rest of such a plan, which is taken off.
    """
    points = []
    for prefix, suffix, sequences in prefixes:
        rows = [[0] * prefix + [b + 1] * suffix for b in range(sequences)]
        plan = radixmlp.build_plan(RaggedBatch.from_sequences(rows))
        attended = attended_of(plan)
        seconds = _seconds(plan, heads, dtype, clock, training) / heads[0]
        for tokens, count in ((prefix, 1), (suffix, sequences)):
            own = attended_of(
                TriePlan.identity(RaggedBatch.from_sequences([[b] * tokens for b in range(count)]))
            )
            seconds -= own.first_pairs * at(chain, own.first_pairs / own.first_rows)
        points.append((float(prefix), max(seconds, 0.0) / attended.merged_pairs))
    return tuple(points)


def _seconds(plan: TriePlan, heads: Heads, dtype: torch.dtype, clock: Clock, training: bool) -> float:
    query, key, size = heads
    rows = plan.num_nodes
    q, k, v = (
        torch.randn(rows, count, size).to(dtype).requires_grad_(training) for count in (query, key, key)
    )
    backend, spec = get_attention("trie-sdpa"), AttentionSpec(softmax_scale=size**-0.5)
    return clock.step_seconds(lambda: backend(q, k, v, plan, spec), [q, k, v], training)
