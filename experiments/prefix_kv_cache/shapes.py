"""The batches on which reuse of a prefix's KV cache and the trie are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from radixmlp.reference import RaggedBatch


@dataclass(frozen=True)
class Shape:
    """A tree of random tokens: `trunk` shared by all, `fan` branches of `branch` tokens, then own parts.

    Args:
        own: tokens of each sequence's own part, in turn; as many sequences below each branch.
    """

    name: str
    trunk: int
    own: Sequence[int]
    fan: int = 1
    branch: int = 0

    @property
    def sequences(self) -> int:
        return self.fan * len(self.own)

    def batch(self, vocab_size: int) -> RaggedBatch:
        """The sequences, branch by branch; siblings begin with different tokens."""
        rng = random.Random(0)

        def siblings(lengths: Sequence[int]) -> list[list[int]]:
            firsts = rng.sample(range(vocab_size), len(lengths))
            return [
                [first, *_ids(rng, n - 1, vocab_size)] if n else []
                for first, n in zip(firsts, lengths, strict=True)
            ]

        trunk = _ids(rng, self.trunk, vocab_size)
        branches = siblings([self.branch] * self.fan)
        return RaggedBatch.from_sequences(
            [trunk + top + own for top in branches for own in siblings(self.own)]
        )


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


SHAPES = (
    Shape("64 + 64 x 16", 64, [64] * 16),
    Shape("256 + 64 x 16", 256, [64] * 16),
    Shape("1024 + 64 x 16", 1024, [64] * 16),
    Shape("512 + 64 x 2", 512, [64] * 2),
    Shape("512 + 64 x 4", 512, [64] * 4),
    Shape("64 + 512 x 4", 64, [512] * 4),
    Shape("512 + 16..256 x 16", 512, [16, 256, 32, 128, 64, 192, 24, 96, 16, 48, 160, 32, 64, 16, 80, 224]),
    Shape("two levels: 128, 4 x 256, 4 x 64 each", 128, [64] * 4, fan=4, branch=256),
)
QUICK_SHAPES = (Shape("12 + 6 x 4", 12, [6] * 4), Shape("two levels: 4, 2 x 8, 2 x 5", 4, [5] * 2, 2, 8))
