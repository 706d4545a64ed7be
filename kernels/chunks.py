"""`Segments`: which rows of a ragged tensor belong to one row of another, cut into chunks for the kernels.

It serves both ways: `segment_sum` adds up each segment's rows, `expand_rows` and `rope_scatter` write a row to all of
its segment's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixmlp.kernels.launch import check_index
from radixmlp.reference import TriePlan

# Rows: long enough that second sums cost little (1/32 of the rows, in fp32), short enough to balance.
CHUNK = 32
_MEMO_KEY = "kernels.segments.scatter"


@dataclass(frozen=True, eq=False)
class Segments:
    """Which rows belong to which segment, cut into chunks. Derive it once for an index and keep it.

    Sizes are bounds that follow from n and S alone, so that deriving it on a GPU waits for nothing; what lies past
    the true counts is empty.

    Args:
        num_rows: n.
        num_segments: S.
        order: [n] int32, the rows sorted by segment, in their own order within one.
        chunk_segment: [C] int32, the segment of each chunk; S past the last chunk. An empty segment has a chunk too.
        chunk_first: [C] int32, its first place in `order`.
        chunk_length: [C] int32, its rows, 0 .. CHUNK.
        chunk_slot: [C] int32, where its sum waits for the second launch, or -1: it is its whole segment.
        long_segment: [L] int32, the segments of more than one chunk; S past the last.
        long_first, long_count: [L] int32, their waiting sums: first slot and how many.
        num_slots: at least the number of waiting sums.
    """

    num_rows: int
    num_segments: int
    order: Tensor
    chunk_segment: Tensor
    chunk_first: Tensor
    chunk_length: Tensor
    chunk_slot: Tensor
    long_segment: Tensor
    long_first: Tensor
    long_count: Tensor
    num_slots: int

    @classmethod
    def of(cls, index: Tensor, num_segments: int) -> Segments:
        """Row i belongs to segment index[i].

        Args:
            index: [n] int32 or int64, on any device, in 0 .. num_segments-1. On the CPU that is checked here; on a
                GPU an assertion waits in the stream for it, so that nothing is read back.
            num_segments: S.

        Raises:
            ValueError: a shape, dtype or value that does not fit.
        """
        check_index("index", index)
        if num_segments < 0:
            raise ValueError(f"num_segments is {num_segments}: expected 0 or more")
        _check_range(index, num_segments)
        n, device = index.shape[0], index.device
        in_order, order = index.sort(stable=True)
        bounds = torch.searchsorted(
            in_order, torch.arange(num_segments + 1, device=device, dtype=index.dtype)
        )
        # One more, empty and without a chunk: what lies past the true counts reads its tables.
        first, length = bounds, pad(bounds.diff(), (0, 1))  # [S+1]
        chunks = (length + CHUNK - 1).div(CHUNK, rounding_mode="floor")
        chunks[:-1].clamp_(min=1)
        waiting = torch.where(chunks > 1, chunks, 0)
        first_chunk, first_slot = chunks.cumsum(0) - chunks, waiting.cumsum(0) - waiting

        chunk = torch.arange(num_segments + n // CHUNK, device=device)
        segment = torch.searchsorted(first_chunk[1:], chunk, right=True)
        within = chunk - first_chunk[segment]
        ordinal = torch.arange(1, n // (CHUNK + 1) + 1, device=device)
        long_segment = torch.searchsorted((chunks[:-1] > 1).cumsum(0), ordinal)

        def table(values: Tensor) -> Tensor:
            return values.to(torch.int32)

        return cls(
            num_rows=n,
            num_segments=num_segments,
            order=table(order),
            chunk_segment=table(segment),
            chunk_first=table(first[segment] + within * CHUNK),
            chunk_length=table((length[segment] - within * CHUNK).clamp(0, CHUNK)),
            chunk_slot=table(torch.where(chunks[segment] > 1, first_slot[segment] + within, -1)),
            long_segment=table(long_segment),
            long_first=table(first_slot[long_segment]),
            long_count=table(chunks[long_segment]),
            num_slots=2 * n // (CHUNK + 1),
        )

    def to(self, device: torch.device | str) -> Segments:
        """The same on `device` (itself where it already is there)."""
        if self.order.device == torch.device(device):
            return self
        tensors = {name: x.to(device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Segments(**{**vars(self), **tensors})

    def require(self, num_rows: int, num_segments: int) -> None:
        """Raises ValueError unless these are the segments of that many rows in that many segments."""
        if (self.num_rows, self.num_segments) != (num_rows, num_segments):
            raise ValueError(
                f"segments hold {self.num_rows} rows in {self.num_segments} segments, but the index holds "
                f"{num_rows} rows of {num_segments}: derive them from this index, Segments.of(index, rows)"
            )


def scatter_segments(plan: TriePlan) -> Segments:
    """`Segments.of(plan.scatter, plan.num_nodes)`, derived once a plan: what expands compact rows to ragged ones."""
    segments = plan.memo.get(_MEMO_KEY)
    if segments is None:
        segments = plan.memo[_MEMO_KEY] = Segments.of(plan.scatter, plan.num_nodes)
    return segments


def _check_range(index: Tensor, num_segments: int) -> None:
    wrong = (index < 0) | (index >= num_segments)
    if index.device.type != "cpu":
        torch._assert_async(~wrong.any(), f"an index is outside 0 .. {num_segments - 1}")
    elif wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(f"index[{row}] is {int(index[row])}: expected 0 .. {num_segments - 1}")
