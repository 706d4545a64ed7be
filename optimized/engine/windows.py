"""From encoders to batches: requests in the order of their texts, tokenised and packed a window at a time.

Texts that begin alike stand side by side when they are sorted as strings, so their tokens do as well, but for the few
places where a token ends differently. So nothing has to be tokenised before the first batch can run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from radixmlp.optimized.engine.batching import MOST_SHARING, Walk, best_cuts, between
from radixmlp.optimized.engine.encoders import Encoder, Entry
from radixmlp.optimized.engine.stats import Clock
from radixmlp.optimized.index import build_plan
from radixmlp.reference import RaggedBatch, TriePlan

_WINDOW = 8  # budgets of tokens packed together, once the first batches are on their way
_CHARACTERS = 1 << 20  # most text given to the tokenizer at once
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Prepared:
    """A batch ready to run.

    Args:
        entries: its sequences, in the order of the batch.
        batch: the same as tensors.
        plan: its trie; None for a dense run.
    """

    entries: list[Entry]
    batch: RaggedBatch
    plan: TriePlan | None


def prepare(
    encoder: Encoder,
    max_batch_tokens: int,
    dense: bool,
    clock: Clock,
    ready: Callable[[TriePlan], TriePlan] | None = None,
) -> Generator[Prepared, None, None]:
    """The batches of all requests of `encoder`, each of at most `max_batch_tokens` computed rows.

    Args:
        dense: one row per token instead of one per trie node.
        clock: told what was done when.
        ready: what else to do with a plan ahead of its run.

    A window is a few budgets of tokens, and at least as many as are left over from the one before: whatever the
    requests look like, no token is laid out more often than a few times.
    """
    with clock.work("index"):
        order = sorted(range(len(encoder.parts)), key=encoder.parts.__getitem__)
    stream = _Stream(encoder, order, clock)
    waiting: list[Entry] = []
    budgets = 1
    while waiting or not stream.ended:
        held = sum(len(entry.tokens) for entry in waiting)
        waiting += stream.take(max(budgets * max_batch_tokens, held))
        with clock.work("index"):
            groups = _grouped(waiting, max_batch_tokens, dense, not stream.ended)
        waiting = [] if stream.ended else groups.pop()
        for group in groups:
            with clock.work("index"):
                batch = lay_out(group)
                plan = None if dense else build_plan(batch)
                if plan is not None and ready is not None:
                    plan = ready(plan)
            yield Prepared(group, batch, plan)
        budgets = min(2 * budgets, _WINDOW)


def lay_out(entries: list[Entry]) -> RaggedBatch:
    """The sequences end to end, positions counted from 0 in each."""
    lengths = np.array([len(entry.tokens) for entry in entries], np.int64)
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    ids = np.empty(total, np.int64)
    for entry, end in zip(entries, ends.tolist(), strict=True):
        ids[end - len(entry.tokens) : end] = entry.tokens
    positions = np.arange(total) - (ends - lengths).repeat(lengths)
    bounds = np.concatenate([[0], ends]).astype(np.int32)
    return RaggedBatch(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(bounds))


def _grouped(entries: list[Entry], budget: int, dense: bool, more_to_come: bool) -> list[list[Entry]]:
    """The entries divided into batches, in the trie's order; at least one group."""
    if dense:
        lengths = [len(entry.tokens) for entry in entries]
        walk = Walk(list(range(len(entries))), lengths, lengths)
    else:
        walk = Walk.of(build_plan(lay_out(entries)))
    cuts = best_cuts(walk.lengths, walk.added, budget, MOST_SHARING * budget, more_to_come)
    bounds = [0, *cuts, len(entries)]
    return [[entries[i] for i in between(walk, a, b).requests] for a, b in pairwise(bounds)]


class _Stream:
    """The entries of requests in a given order, tokenised as they are asked for."""

    def __init__(self, encoder: Encoder, order: list[int], clock: Clock) -> None:
        self._encoder, self._order, self._clock = encoder, order, clock
        self._at = 0

    @property
    def ended(self) -> bool:
        """Whether all were taken."""
        return self._at == len(self._order)

    def take(self, tokens: int) -> list[Entry]:
        """Further entries with about so many tokens together, all where fewer are left."""
        taken: list[Entry] = []
        held = 0
        while held < tokens and not self.ended:
            numbers = self._next((tokens - held) * _CHARACTERS_PER_TOKEN)
            with self._clock.work("tokenize"):
                entries = self._encoder(numbers)
            taken += entries
            held += sum(len(entry.tokens) for entry in entries)
        return taken

    def _next(self, characters: int) -> list[int]:
        """The next requests, of about so much text."""
        most, start, held = min(characters, _CHARACTERS), self._at, 0
        while self._at < len(self._order) and (held < most or self._at == start):
            held += sum(map(len, self._encoder.parts[self._order[self._at]]))
            self._at += 1
        return self._order[start : self._at]
