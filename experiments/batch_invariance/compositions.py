"""One request, and the batches it may find itself in."""

from __future__ import annotations

import random
from dataclasses import dataclass

from radixmlp.reference import RaggedBatch

ALONE = "alone"


@dataclass(frozen=True)
class Composition:
    """A batch, and which of its sequences is the request."""

    name: str
    batch: RaggedBatch
    place: int

    @property
    def rows(self) -> slice:
        """The request's rows in the ragged layout."""
        bounds = self.batch.cu_seqlens.tolist()
        return slice(bounds[self.place], bounds[self.place + 1])


def compositions(prefix: int, own: int, many: int, vocab_size: int) -> list[Composition]:
    """The request (`prefix` + `own` tokens) alone first, then in batches of up to `many` sequences.

    "Again" is the very same batch once more: what moves there is not the batch's doing.
    """
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    shared = ids(prefix)
    request = shared + ids(own)
    below = [shared + ids(own) for _ in range(many - 1)]
    shorter = [ids(max(1, (prefix + own) // part)) for part in (2, 3, 5)]
    longer = [ids((prefix + own) * part // 2) for part in (3, 4, 3)]
    batches: dict[str, list[list[int]]] = {
        ALONE: [request],
        "again": [request],
        "twice": [request, request],
        "3 more below its prefix": [request, *below[:3]],
        f"{many - 1} more below its prefix": [request, *below],
        f"last of {many}": [*below, request],
        "3 others, shorter": [request, *shorter],
        "3 others, longer": [request, *longer],
    }
    return [
        Composition(name, RaggedBatch.from_sequences(rows), len(rows) - 1 if name.startswith("last") else 0)
        for name, rows in batches.items()
    ]
