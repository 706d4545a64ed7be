"""What an engine did, and what it waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Span = tuple[float, float]  # start and end on one clock, seconds
_lock = threading.Lock()  # of all stats: they are copied and pickled, which a lock of their own could not be


@dataclass
class EngineStats:
    """Counts over all calls of an engine since it was made or `reset`.

    Args:
        requests: given, repetitions included.
        tokens: theirs, before anything is shared.
        rows: computed.
        batches: run.
        choices: batches by the attention that ran.
        seconds: whole calls.
        run_seconds: of them in the model and its head.
        tokenize_seconds, index_seconds: work of the thread ahead: tokenising; ordering, packing, building plans
            and the schedules of the trie's attention.
        first_wait_seconds: until the first batch of each call was there; nothing could hide that.
        waited_seconds: for all later batches.
        unhidden_index_seconds, unhidden_tokenize_seconds: of both waits, how long which work was under way.
    """

    requests: int = 0
    tokens: int = 0
    rows: int = 0
    batches: int = 0
    choices: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    run_seconds: float = 0.0
    tokenize_seconds: float = 0.0
    index_seconds: float = 0.0
    first_wait_seconds: float = 0.0
    waited_seconds: float = 0.0
    unhidden_index_seconds: float = 0.0
    unhidden_tokenize_seconds: float = 0.0

    @property
    def gamma(self) -> float:
        """Rows computed per token (1.0 where nothing ran)."""
        return self.rows / self.tokens if self.tokens else 1.0

    @property
    def unhidden_index_share(self) -> float:
        """Index time that nothing hid, as a share of the calls' time."""
        return self.unhidden_index_seconds / self.seconds if self.seconds else 0.0

    def reset(self) -> None:
        """Start counting anew."""
        with _lock:
            self.__init__()  # type: ignore[misc]

    def count_batch(self, attention: str, rows: int, tokens: int) -> None:
        """One batch ran, for requests of so many tokens."""
        with _lock:
            self.batches += 1
            self.rows += rows
            self.tokens += tokens
            self.choices[attention] += 1

    def count_call(self, requests: int, clock: Clock) -> None:
        """One call came to its end."""
        first, later = clock.waits[:1], clock.waits[1:]
        index, tokenize = clock.spans["index"], clock.spans["tokenize"]
        with _lock:
            self.requests += requests
            self.seconds += time.perf_counter() - clock.started
            self.run_seconds += clock.run_seconds
            self.tokenize_seconds += _total(tokenize)
            self.index_seconds += _total(index)
            self.first_wait_seconds += _total(first)
            self.waited_seconds += _total(later)
            self.unhidden_index_seconds += overlap(clock.waits, index)
            self.unhidden_tokenize_seconds += overlap(clock.waits, tokenize)


class Clock:
    """Who did what when in one call: the thread ahead its work, the caller its waits and runs."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.spans: dict[str, list[Span]] = {"index": [], "tokenize": []}
        self.waits: list[Span] = []
        self.run_seconds = 0.0

    @contextmanager
    def work(self, kind: str) -> Iterator[None]:
        """Count the block as "index" or "tokenize"."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spans[kind].append((started, time.perf_counter()))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the block as a wait for the next batch."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.waits.append((started, time.perf_counter()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block as a run."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.run_seconds += time.perf_counter() - started


def overlap(some: list[Span], others: list[Span]) -> float:
    """Seconds that two lists of spans, each ascending and free of overlaps, have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        total += max(0.0, min(some[i][1], others[j][1]) - max(some[i][0], others[j][0]))
        if some[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return total


def _total(spans: list[Span]) -> float:
    return sum(end - start for start, end in spans)
