"""`Rows`: n panels of L compact rows, by slice where they lie together and by index where they do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """n panels of L rows of a [N', H, ...] tensor.

    Args:
        n, length: panels, rows a panel.
        start: first row, where the n * L rows are one slice; else None.
        index: [n * L] int64 rows, short panels padded by repeating their last row; None where `start` is given.
        real: [n, L] bool, False at padding; None where nothing is padded.
    """

    n: int
    length: int
    start: int | None = None
    index: Tensor | None = None
    real: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """[N', ...] -> [n, L, ...]; a view where the rows are one slice."""
        rows = x.index_select(0, self.index) if self.index is not None else x[self._slice()]
        return rows.unflatten(0, (self.n, self.length))

    def put(self, target: Tensor, panel: Tensor) -> None:
        """Write indexed panels [n, L, ...] into target [N', ...], padding left out."""
        assert self.index is not None
        index, rows = self.index, panel.flatten(0, 1)
        if self.real is not None:
            kept = self.real.flatten()
            index, rows = index[kept], rows[kept]
        target.index_copy_(0, index, rows)

    def add(self, target: Tensor, panel: Tensor) -> None:
        """Add panels [n, L, ...] to target [N', ...]; gradients of padding are zero and fall on their row."""
        if self.index is None:
            target[self._slice()].unflatten(0, (self.n, self.length)).add_(panel)
        else:
            target.index_add_(0, self.index, panel.flatten(0, 1).to(target.dtype))

    def without_padding(self, panel: Tensor) -> Tensor:
        """Panels [n, L, ...] with zeros at padding."""
        if self.real is None:
            return panel
        return panel * self.real.view(self.n, self.length, *[1] * (panel.dim() - 2))

    def indices(self, device: torch.device) -> Tensor:
        """[n, L] int64 row numbers."""
        if self.index is not None:
            return self.index.view(self.n, self.length)
        assert self.start is not None
        first = self.start
        return torch.arange(first, first + self.n * self.length, device=device).view(self.n, self.length)

    def _slice(self) -> slice:
        assert self.start is not None
        return slice(self.start, self.start + self.n * self.length)


def one_slice(start: int, stop: int) -> Rows:
    """The single panel of rows [start, stop)."""
    return Rows(1, stop - start, start=start)


def panels(ranges: list[list[tuple[int, int]]], device: torch.device) -> Rows:
    """One panel a list of row ranges, padded to the longest.

    Args:
        ranges: n lists of non-empty (start, stop).
    """
    counts = torch.tensor([sum(stop - start for start, stop in panel) for panel in ranges])
    length = int(counts.max())
    starts = torch.tensor([start for panel in ranges for start, _ in panel])
    sizes = torch.tensor([stop - start for panel in ranges for start, stop in panel])
    flat = _expand(starts, sizes)
    if bool((counts == length).all()):
        if bool((flat.diff() == 1).all()):
            return Rows(len(ranges), length, start=int(flat[0]))
        return Rows(len(ranges), length, index=flat.to(device))
    offsets = torch.arange(length)
    first = counts.cumsum(0) - counts
    index = flat[first[:, None] + torch.minimum(offsets, counts[:, None] - 1)]
    real = offsets < counts[:, None]
    return Rows(len(ranges), length, index=index.flatten().to(device), real=real.to(device))


def _expand(starts: Tensor, sizes: Tensor) -> Tensor:
    """Concatenate start, start+1, ... of each range."""
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return starts.repeat_interleave(sizes) + within
