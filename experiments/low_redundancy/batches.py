"""Batches of a chosen, small compression ratio, shared in two ways."""

from __future__ import annotations

import random
from collections.abc import Callable

from radixmlp.reference import RaggedBatch


def one_prefix(sequences: int, length: int, ratio: float, vocab_size: int) -> RaggedBatch:
    """All sequences begin with the same tokens.

    N = B L and N' = N - (B - 1) p, so a ratio r = N / N' wants p = (N - N / r) / (B - 1) shared tokens.
    """
    tokens = sequences * length
    shared = round((tokens - tokens / ratio) / (sequences - 1))
    return _batch([range(sequences)], shared, length, vocab_size)


def pairs(sequences: int, length: int, ratio: float, vocab_size: int) -> RaggedBatch:
    """Every two sequences begin with the same tokens, each pair with others: p = 2 (L - L / r).

    Raises:
        ValueError: an odd number of sequences.
    """
    if sequences % 2:
        raise ValueError(f"{sequences} sequences make no pairs: give an even number")
    shared = round(2 * (length - length / ratio))
    groups = [range(first, first + 2) for first in range(0, sequences, 2)]
    return _batch(groups, shared, length, vocab_size)


LAYOUTS: dict[str, Callable[[int, int, float, int], RaggedBatch]] = {"one prefix": one_prefix, "pairs": pairs}


def _batch(groups: list[range], shared: int, length: int, vocab_size: int) -> RaggedBatch:
    """Each group shares `shared` tokens of `length`; groups and own parts begin with different tokens."""
    rng = random.Random(0)
    count = sum(map(len, groups))
    if not 0 <= shared < length or count + len(groups) > vocab_size:
        raise ValueError(
            f"{shared} shared tokens of {length} with {vocab_size} token ids: ask for a smaller ratio"
        )
    firsts = iter(rng.sample(range(vocab_size), count + len(groups)))

    def ids(number: int) -> list[int]:
        return [next(firsts), *(rng.randrange(vocab_size) for _ in range(number - 1))] if number else []

    rows = []
    for group in groups:
        prefix = ids(shared)
        rows += [prefix + ids(length - shared) for _ in group]
    return RaggedBatch.from_sequences(rows)
