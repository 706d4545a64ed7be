"""A pile of requests without its repetitions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Pile:
    """n requests of which U are distinct; those are numbered in order of first occurrence.

    Args:
        first: [U] the index of each distinct request's first occurrence.
        inverse: [n] the number of each request.
        counts: [U] occurrences.
    """

    first: list[int]
    inverse: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, keys: Sequence[Hashable]) -> Pile:
        """The pile of requests that are equal where their keys are."""
        numbers: dict[Hashable, int] = {}
        first: list[int] = []
        inverse = np.empty(len(keys), np.int64)
        for index, key in enumerate(keys):
            number = numbers.setdefault(key, len(first))
            if number == len(first):
                first.append(index)
            inverse[index] = number
        return cls(first, inverse, np.bincount(inverse, minlength=len(first)))

    @property
    def size(self) -> int:
        """n."""
        return len(self.inverse)

    def spread(self, values: Tensor) -> Tensor:
        """[U, ...] results of distinct requests -> [n, ...] of all, in their order."""
        return values if len(self.first) == self.size else values[torch.from_numpy(self.inverse)]

    def occurrences(self, numbers: list[int], values: Tensor) -> tuple[list[int], Tensor]:
        """All indices of some distinct requests, and for each its row of `values` [U, ...]."""
        counts = self.counts[numbers]
        starts = self._starts[numbers]
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        indices: list[int] = self._grouped[starts.repeat(counts) + within].tolist()
        return indices, values[torch.from_numpy(np.repeat(numbers, counts))]

    @cached_property
    def _grouped(self) -> NDArray[np.int64]:
        """[n] indices, those of each distinct request side by side."""
        return np.argsort(self.inverse, kind="stable")

    @cached_property
    def _starts(self) -> NDArray[np.int64]:
        """[U] where those of each begin."""
        starts: NDArray[np.int64] = self.counts.cumsum() - self.counts
        return starts

    def indices(self, number: int, most: int = 5) -> list[int]:
        """Where distinct request `number` stands in the list that was given."""
        found: list[int] = np.flatnonzero(self.inverse == number)[:most].tolist()
        return found


def check_texts(name: str, texts: Any) -> list[str]:
    """`texts` as a list, if it is a sequence of strings.

    Raises:
        TypeError: names the index and the type of the first that is not one.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise TypeError(f"{name} is a {type(texts).__name__}: give a list of strings")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{index}] is a {type(text).__name__}: expected a string")
    return list(texts)


def check_text(name: str, text: Any) -> str:
    """`text`, if it is a string.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} is a {type(text).__name__}: expected a string")
    return text
