"""Bytes each copy kernel requests, from shapes and launch geometry, against the least any kernel could move.

Requested: every byte its programs load and store, tables of indices included, caches left out of account. The least:
every row that is needed read once, every result written once, one index a row. Tensors may be on the meta device;
indices are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.kernels.chunks import Segments
from radixmlp.kernels.launch import RowLaunch, Rows, block_columns
from radixmlp.kernels.rope_kernel import tile_shape
from radixmlp.kernels.segments import BLOCK, LEAST_BLOCK, LONG_BLOCK

_INDEX_BYTES = 4  # of an entry of `Segments`
_TABLES = 3  # that expanding kernels read for each chunk: segment, first, length


@dataclass(frozen=True)
class Traffic:
    """Bytes loaded, bytes stored, and the least that both together could be."""

    loaded: int
    stored: int
    least: int

    @property
    def ratio(self) -> float:
        """Bytes moved over the least possible."""
        return (self.loaded + self.stored) / self.least


def copy_rows_traffic(tensors: Sequence[Tensor], index: Tensor) -> Traffic:
    """Of `gather_rows_together(tensors, index)` without segments, every index in range.

    Args:
        tensors: up to three [rows, D] or [rows, H, D].
        index: [n] int32 or int64.
    """
    n, row = index.shape[0], sum(_row_bytes(x) for x in tensors)
    loaded = n * row + n * index.element_size() * _row_parts(tensors)
    distinct = index.unique().shape[0]
    return Traffic(loaded, n * row, (distinct + n) * row + n * index.element_size())


def expand_rows_traffic(tensors: Sequence[Tensor], segments: Segments) -> Traffic:
    """Of `gather_rows_together(tensors, index, segments)`, where it has more rows than the tensors."""
    row = sum(_row_bytes(x) for x in tensors)
    n, tables = segments.num_rows, _table_bytes(segments, _TABLES) * _row_parts(tensors)
    needed = int((segments.chunk_length > 0).sum())
    return Traffic(
        needed * row + tables, n * row, (_segments_with_rows(segments) + n) * row + n * _INDEX_BYTES
    )


def segment_sum_traffic(x: Tensor, segments: Segments, dtype: torch.dtype | None = None) -> Traffic:
    """Of both launches of `segment_sum(x, segments, dtype)`."""
    rows, n = Rows.of(x), segments.num_rows
    width = rows.heads * rows.columns
    out = segments.num_segments * width * (dtype or x.dtype).itemsize
    parts = rows.heads * -(-rows.columns // block_columns([rows.columns], LEAST_BLOCK, BLOCK))
    long_parts = -(-width // block_columns([width], LEAST_BLOCK, LONG_BLOCK))
    waiting = int((segments.chunk_slot >= 0).sum()) * width * 4
    long_tables = segments.long_segment.shape[0] + 2 * int((segments.long_count > 0).sum())
    loaded = n * _row_bytes(x) + _table_bytes(segments, _TABLES + 1) * parts
    loaded += waiting + long_tables * _INDEX_BYTES * long_parts
    return Traffic(loaded, out + waiting, n * _row_bytes(x) + out + n * _INDEX_BYTES)


def rope_scatter_traffic(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, segments: Segments) -> Traffic:
    """Of the forward of `rope_scatter(q, k, v, cos, sin, segments)`."""
    eight_heads = q.shape[1] % 8 == 0 and k.shape[1] % 8 == 0
    tile = tile_shape(q.shape[2], v.shape[2], cos.shape[1], q.element_size(), eight_heads)
    q_parts, k_parts = (-(-x.shape[1] // tile["BLOCK_HEADS"]) for x in (q, k))
    v_parts = -(-v.shape[1] // tile["BLOCK_VALUE_HEADS"])
    row, angles = sum(_row_bytes(x) for x in (q, k, v)), 2 * _row_bytes(cos)
    n, needed = segments.num_rows, int((segments.chunk_length > 0).sum())
    loaded = needed * (row + angles * (q_parts + k_parts))
    loaded += _table_bytes(segments, _TABLES) * (q_parts + k_parts + v_parts)
    least = _segments_with_rows(segments) * (row + angles) + n * row + n * _INDEX_BYTES
    return Traffic(loaded, n * row, least)


def _row_bytes(x: Tensor) -> int:
    return x.shape[1:].numel() * x.element_size()


def _row_parts(tensors: Sequence[Tensor]) -> int:
    """Programs that share the rows of one block, each of which reads the block's indices."""
    outs = tuple(x.new_empty(0, *x.shape[1:]) for x in tensors)
    return RowLaunch.of(tuple(tensors), outs).parts


def _table_bytes(segments: Segments, tables: int) -> int:
    """What one block of columns reads: `tables` entries of each chunk, and the place of each row."""
    return (tables * segments.chunk_segment.shape[0] + segments.num_rows) * _INDEX_BYTES


def _segments_with_rows(segments: Segments) -> int:
    return segments.chunk_segment[segments.chunk_length > 0].unique().shape[0]
