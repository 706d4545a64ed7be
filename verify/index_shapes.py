"""The batches that the index builder is measured on, and those made to break its linearity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from radixmlp.reference import RaggedBatch

EACH_LIMIT, SHORT_LIMIT = 1.5, 1.3

Rows = Sequence[NDArray[np.int64]]


@dataclass(frozen=True)
class IndexShape:
    """A batch to build the index of.

    Args:
        name: for the table.
        limit: how many times faster than the peer at least, in `order="input"`, the peer's own.
        in_mean: whether it counts in the geometric mean.
        rows: makes the sequences.
    """

    name: str
    limit: float
    in_mean: bool
    rows: Callable[[], Rows]


def index_shapes() -> list[IndexShape]:
    """The shapes that `run_index_bench` measures."""
    batches = [(batch, 512) for batch in (4, 16, 32, 64, 256, 1024, 2048)]
    lengths = [(32, length) for length in (128, 256, 1024, 2048)]
    shapes = [
        IndexShape(f"{b} x {n}, 25% shared", EACH_LIMIT, True, partial(shared_prefix, b, n, n // 4))
        for b, n in batches + lengths
    ]
    return [
        *shapes,
        IndexShape("8192 x 512, 500 shared", EACH_LIMIT, False, partial(shared_prefix, 8192, 512, 500)),
        IndexShape("2048 x 512, all equal", EACH_LIMIT, False, partial(shared_prefix, 2048, 512, 512)),
        IndexShape("ascending comb 1..1500", EACH_LIMIT, False, partial(ascending_comb, 1500)),
        IndexShape("descending comb 1500..1", EACH_LIMIT, False, partial(descending_comb, 1500)),
        IndexShape("100000 x 1..3", SHORT_LIMIT, False, partial(short_rows, 100_000, 1000)),
    ]


def ragged_batch(rows: Rows) -> RaggedBatch:
    """The sequences as int64 tensors, positions from 0."""
    lengths = np.array([row.size for row in rows])
    bounds = np.concatenate([[0], lengths.cumsum()])
    positions = np.arange(bounds[-1]) - bounds[:-1].repeat(lengths)
    ids = torch.from_numpy(np.concatenate(rows))
    return RaggedBatch(ids, torch.from_numpy(positions), torch.from_numpy(bounds.astype(np.int32)))


def random_ids(*shape: int, vocabulary: int = 50_000) -> NDArray[np.int64]:
    """The same ids each time."""
    return np.random.default_rng(0).integers(0, vocabulary, shape)


def shared_prefix(num_sequences: int, length: int, shared: int) -> Rows:
    """The first `shared` tokens equal, the others random."""
    ids = random_ids(num_sequences, length)
    ids[:, :shared] = ids[0, :shared]
    return list(ids)


def short_rows(num_sequences: int, vocabulary: int) -> Rows:
    """1, 2 or 3 random tokens each."""
    return [row[: 1 + i % 3] for i, row in enumerate(random_ids(num_sequences, 3, vocabulary=vocabulary))]


def ascending_comb(n: int) -> Rows:
    """Each sequence one token longer than the last."""
    base = random_ids(n)
    return [base[:k] for k in range(1, n + 1)]


def descending_comb(n: int) -> Rows:
    """Each sequence one token shorter than the last."""
    return ascending_comb(n)[::-1]


def interleaved_combs(n: int) -> Rows:
    """Eight ascending combs by turns."""
    base = random_ids(8, n // 4)
    return [row[:k] for k in range(1, n // 4 + 1) for row in base]


def splits_upwards(n: int) -> Rows:
    """One long edge, cut again and again just above the last cut."""
    base = random_ids(n)
    return [base, *(np.append(base[:k], 50_001) for k in range(n - 1, 0, -1))]


def splits_downwards(n: int) -> Rows:
    """One long edge, cut after each token from the top."""
    base = random_ids(n)
    return [base, *(np.append(base[:k], 50_001) for k in range(1, n))]


def splits_of_a_comb(n: int) -> Rows:
    """An edge whose every node another sequence brought, cut everywhere: each cut looks for its owner."""
    return [*ascending_comb(n), *splits_downwards(n)[1:]]


def short_rows_on_a_comb(n: int) -> Rows:
    """Short sequences that branch off at the top of an edge that many sequences made."""
    first = random_ids(n)[0]
    return [*ascending_comb(n), *(np.array([first, 60_000 + i]) for i in range(n * n // 4))]


def consecutive_ids(n: int) -> Rows:
    """First ids in arithmetic progression, which a plain multiplicative hash may put side by side."""
    return list(np.arange(100 * n)[:, None])


def nothing_shared(n: int) -> Rows:
    """Ids so rare that no two sequences begin alike."""
    return list(random_ids(50 * n, 20, vocabulary=2**31))


WORK_FAMILIES: dict[str, Callable[[int], Rows]] = {
    "ascending comb": ascending_comb,
    "descending comb": descending_comb,
    "interleaved combs": interleaved_combs,
    "all equal": lambda n: shared_prefix(n, n, n),
    "shared prefix": lambda n: shared_prefix(20 * n, 64, 48),
    "nothing shared": nothing_shared,
    "short and distinct": lambda n: short_rows(100 * n, 2**31),
    "short and repeated": lambda n: short_rows(100 * n, 8),
    "consecutive ids": consecutive_ids,
    "splits upwards": splits_upwards,
    "splits downwards": splits_downwards,
    "splits of a comb": splits_of_a_comb,
    "short rows on a comb": short_rows_on_a_comb,
}
