"""Sums over batches: what a stream of sequences costs when it is cut into batches, in bounded memory.

Sequences are pooled, a pool is divided by the engine's own batching, and only numbers are kept of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from radixmlp.optimized.engine.batching import Policy, plan_batches
from radixmlp.optimized.index import build_plan
from radixmlp.reference import TriePlan
from radixmlp.verify.inspect.ragged import Int64Array, Tokens

Window = int | None
POOL_TOKENS = 1 << 22
_POOL_BUDGETS = 16  # a pool holds many batches, so that its last, incomplete one weighs little
_POOL_SEQUENCES = 100_000


@dataclass(frozen=True)
class BatchSum:
    """One batch in numbers.

    Args:
        sequences, tokens, rows: B, N, N'.
        dense_pairs, trie_pairs: visible (query, key) pairs, one sequence at a time and in the trie, by sliding
            window (None: the whole path).
    """

    sequences: int
    tokens: int
    rows: int
    dense_pairs: dict[Window, int]
    trie_pairs: dict[Window, int]

    @property
    def gamma(self) -> float:
        """N'/N."""
        return self.rows / self.tokens if self.tokens else 1.0

    @property
    def ratio(self) -> float:
        """r = N/N'."""
        return self.tokens / self.rows if self.rows else 1.0


@dataclass
class Survey:
    """Batches of one policy over a stream.

    Args:
        policy: "prefix" or "fifo".
        max_batch_tokens: compact rows a batch.
        windows: sliding windows to count pairs for; None: the whole path.
        pool_tokens: sequences are divided this many tokens at a time, or 16 budgets where that is more.
        batches: what has been counted so far.
        pools: how many times a pool was divided.
    """

    policy: Policy
    max_batch_tokens: int
    windows: Sequence[Window] = (None,)
    pool_tokens: int = POOL_TOKENS
    batches: list[BatchSum] = field(default_factory=list)
    pools: int = 0
    _pool: list[Tokens] = field(default_factory=list, repr=False)

    def add(self, tokens: Tokens) -> None:
        """More sequences, none longer than `max_batch_tokens`."""
        self._pool.append(tokens)
        held = sum(part.num_tokens for part in self._pool)
        limit = max(self.pool_tokens, _POOL_BUDGETS * self.max_batch_tokens)
        if held >= limit or sum(part.num_sequences for part in self._pool) >= _POOL_SEQUENCES:
            self._divide(final=False)

    def finish(self) -> Survey:
        """Count what is left; the survey itself."""
        if self._pool:
            self._divide(final=True)
        return self

    @property
    def total(self) -> BatchSum:
        """All batches added up."""
        parts = self.batches
        return BatchSum(
            sum(part.sequences for part in parts),
            sum(part.tokens for part in parts),
            sum(part.rows for part in parts),
            {w: sum(part.dense_pairs[w] for part in parts) for w in self.windows},
            {w: sum(part.trie_pairs[w] for part in parts) for w in self.windows},
        )

    def _divide(self, final: bool) -> None:
        pool = Tokens.join(self._pool)
        self._pool = []
        self.pools += 1
        batches = plan_batches(pool.batch(), self.max_batch_tokens, self.policy)
        if not final and len(batches) > 1:
            rest = pool.pick(batches[-1].requests)
            if rest.num_tokens <= pool.num_tokens // 2 and rest.num_sequences <= pool.num_sequences // 2:
                batches.pop()
                self._pool = [rest]  # the last batch is not full: it goes on with what comes next
        for batch in batches:
            self.batches.append(count_batch(pool.pick(batch.requests), self.windows))


def count_batch(tokens: Tokens, windows: Sequence[Window] = (None,)) -> BatchSum:
    """The sums of one batch."""
    plan = build_plan(tokens.batch())
    added = added_rows(plan, tokens.lengths)
    return BatchSum(
        tokens.num_sequences,
        plan.num_tokens,
        plan.num_nodes,
        {w: int(_pairs(tokens.lengths, w).sum()) for w in windows},
        {w: int((_pairs(tokens.lengths, w) - _pairs(tokens.lengths - added, w)).sum()) for w in windows},
    )


def added_rows(plan: TriePlan, lengths: Int64Array) -> Int64Array:
    """[B] rows each sequence is the first to bring: the end of its path, because its beginning is a known prefix."""
    owners = np.searchsorted(lengths.cumsum(), plan.gather.numpy(), side="right")
    return np.bincount(owners, minlength=lengths.size)


def _pairs(lengths: Int64Array, window: Window) -> Int64Array:
    """[B] visible pairs of the first so many tokens of a path."""
    if window is None:
        return lengths * (lengths + 1) // 2
    near = np.minimum(lengths, window)
    return near * (near + 1) // 2 + (lengths - near) * window
