"""Token ids on their way to a `RaggedBatch`: kept as arrays, cut, joined and picked without Python lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixmlp.reference import RaggedBatch

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


@dataclass(frozen=True)
class Tokens:
    """Sequences end to end.

    Args:
        ids: [N] int32.
        lengths: [B] int64 tokens of each sequence.
    """

    ids: Int32Array
    lengths: Int64Array

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> Tokens:
        """From lists of token ids."""
        lengths = np.fromiter(map(len, sequences), np.int64, len(sequences))
        flat = (token for sequence in sequences for token in sequence)
        return cls(np.fromiter(flat, np.int32, int(lengths.sum())), lengths)

    @classmethod
    def join(cls, parts: Sequence[Tokens]) -> Tokens:
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        empty = cls(np.zeros(0, np.int32), np.zeros(0, np.int64))
        kept = [empty, *parts]
        return cls(np.concatenate([p.ids for p in kept]), np.concatenate([p.lengths for p in kept]))

    @property
    def num_tokens(self) -> int:
        return self.ids.size

    @property
    def num_sequences(self) -> int:
        return self.lengths.size

    @property
    def starts(self) -> Int64Array:
        """[B] the first row of each sequence."""
        return self.lengths.cumsum() - self.lengths

    def pick(self, which: Sequence[int] | Int64Array) -> Tokens:
        """The sequences at these indices, in this order."""
        chosen = np.asarray(which, np.int64)
        lengths = self.lengths[chosen]
        begins = lengths.cumsum() - lengths
        rows = np.arange(int(lengths.sum())) + np.repeat(self.starts[chosen] - begins, lengths)
        return Tokens(self.ids[rows], lengths)

    def sequence(self, index: int) -> list[int]:
        """The ids of one sequence."""
        start = int(self.lengths[:index].sum())
        return self.ids[start : start + int(self.lengths[index])].tolist()

    def batch(self) -> RaggedBatch:
        """As a `RaggedBatch` with positions 0, 1, 2, ... in each sequence."""
        bounds = np.zeros(self.num_sequences + 1, np.int32)
        bounds[1:] = self.lengths.cumsum()
        positions = np.arange(self.num_tokens, dtype=np.int32) - np.repeat(bounds[:-1], self.lengths)
        return RaggedBatch(
            torch.from_numpy(self.ids), torch.from_numpy(positions.astype(np.int32)), torch.from_numpy(bounds)
        )
