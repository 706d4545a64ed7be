"""What an enabled model did with its batches."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

_lock = threading.Lock()


@dataclass
class Stats:
    """Counts since `enable` (or the last `reset`).

    Args:
        compacted: batches that ran on the trie.
        dense: batches left to the model's own forward, by reason.
        slots: batch x length of all batches, padding included.
        tokens: real tokens of the batches that ran on the trie.
        rows: rows computed for them.
        choices: what `"auto"` chose for batches within the threshold, by attention; "model": the model's own forward,
            predicted to be no slower.
        index_seconds: time spent on laying out batches and building their plans.
    """

    compacted: int = 0
    dense: Counter[str] = field(default_factory=Counter)
    slots: int = 0
    tokens: int = 0
    rows: int = 0
    choices: Counter[str] = field(default_factory=Counter)
    index_seconds: float = 0.0

    @property
    def batches(self) -> int:
        """All batches seen."""
        return self.compacted + sum(self.dense.values())

    @property
    def gamma(self) -> float:
        """Rows computed per token of the batches that ran on the trie (1.0 where none did)."""
        return self.rows / self.tokens if self.tokens else 1.0

    def reset(self) -> None:
        """Start counting anew."""
        with _lock:
            self.__init__()  # type: ignore[misc]

    def count_dense(self, reason: str, slots: int) -> None:
        """One batch ran as ever, for `reason`."""
        with _lock:
            self.dense[reason] += 1
            self.slots += slots

    def count_compact(self, slots: int, tokens: int, rows: int) -> None:
        """One batch ran on the trie."""
        with _lock:
            self.compacted += 1
            self.slots += slots
            self.tokens += tokens
            self.rows += rows

    def count_choice(self, attention: str) -> None:
        """`"auto"` decided for one batch."""
        with _lock:
            self.choices[attention] += 1

    def count_index(self, seconds: float) -> None:
        """Time taken for a batch's plan, whether it was used or not."""
        with _lock:
            self.index_seconds += seconds
