"""`segment_sum`: the backward of a gather with duplicates. Deterministic, fp32 sums, linear in the rows.

Rows are taken in the order of a stable sort by segment, cut into chunks of at most `CHUNK` rows of one segment. One
launch adds up each chunk; a segment of one chunk is then done. A second launch adds the chunks of each long
segment, in order. So the work is linear however the rows are spread, and no sum depends on timing.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixmlp.kernels.chunks import CHUNK, Segments, scatter_segments
from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.launch import (
    ACCESS_BYTES,
    Rows,
    alignment,
    block_columns,
    check_device,
    check_rows,
    on_device,
    row_major,
)

__all__ = ["CHUNK", "Segments", "scatter_segments", "segment_sum"]

NUM_WARPS = 4
TILE = 4096  # elements of one program's sum: 32 registers for each of its 128 threads
LEAST_BLOCK, BLOCK, LONG_BLOCK = 128, 512, 1024  # columns of one program of the first and the second launch


@triton.jit(do_not_specialize=["num_chunks", "num_segments", "row_stride", "head_stride", "heads", "columns"])
def sum_chunks_kernel(
    x_ptr,
    out_ptr,
    waiting_ptr,
    order_ptr,
    chunk_segment_ptr,
    chunk_first_ptr,
    chunk_length_ptr,
    chunk_slot_ptr,
    num_chunks,
    num_segments,
    row_stride,
    head_stride,
    heads,
    columns,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of each chunk, to out [S, H, D] or waiting [slots, H, D]. Strides and columns in vectors.

    Programs: (blocks of chunks, blocks of the columns of each head).
    """
    chunk = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    known = chunk < num_chunks
    segment = tl.load(chunk_segment_ptr + chunk, mask=known, other=num_segments)
    first = tl.load(chunk_first_ptr + chunk, mask=known, other=0)
    length = tl.load(chunk_length_ptr + chunk, mask=known, other=0)
    slot = tl.load(chunk_slot_ptr + chunk, mask=known, other=-1)

    blocks = tl.cdiv(columns, BLOCK // VECTOR)
    head = (tl.program_id(1) // blocks).to(tl.int64)
    cols = (tl.program_id(1) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = (cols < columns * VECTOR)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for i in range(0, tl.max(length, 0)):
        live = i < length
        row = tl.load(order_ptr + first + i, mask=live, other=0).to(tl.int64)
        offsets = (row * row_stride + head * head_stride) * VECTOR
        x = tl.load(x_ptr + offsets[:, None] + cols[None, :], mask=live[:, None] & inside, other=0.0)
        total += x.to(tl.float32)

    whole = ((segment < num_segments) & (slot < 0))[:, None] & inside
    to_out = ((segment.to(tl.int64) * heads + head) * columns) * VECTOR
    tl.store(out_ptr + to_out[:, None] + cols[None, :], total.to(out_ptr.dtype.element_ty), mask=whole)
    to_slot = ((slot.to(tl.int64) * heads + head) * columns) * VECTOR
    tl.store(waiting_ptr + to_slot[:, None] + cols[None, :], total, mask=(slot >= 0)[:, None] & inside)


@triton.jit(do_not_specialize=["num_segments", "columns"])
def sum_long_kernel(
    waiting_ptr,
    out_ptr,
    long_segment_ptr,
    long_first_ptr,
    long_count_ptr,
    num_segments,
    columns,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[segment] of each long segment from its chunks' sums, rows [columns] in vectors.

    Programs: (long segments, blocks of columns).
    """
    segment = tl.load(long_segment_ptr + tl.program_id(0)).to(tl.int64)
    if segment < num_segments:
        first = tl.load(long_first_ptr + tl.program_id(0))
        count = tl.load(long_count_ptr + tl.program_id(0))
        cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = cols < columns * VECTOR
        total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
        for start in range(0, count, BLOCK_ROWS):
            i = start + tl.arange(0, BLOCK_ROWS)
            offsets = ((first + i).to(tl.int64) * columns) * VECTOR
            total += tl.load(
                waiting_ptr + offsets[:, None] + cols[None, :],
                mask=(i < count)[:, None] & inside[None, :],
                other=0.0,
            )
        result = tl.sum(total, 0)
        tl.store(
            out_ptr + segment * columns * VECTOR + cols, result.to(out_ptr.dtype.element_ty), mask=inside
        )


def segment_sum(x: Tensor, segments: Segments, dtype: torch.dtype | None = None) -> Tensor:
    """out[s] = the sum of the rows of `x` in segment s, zero where there are none.

    Adds in fp32 and rounds once. The order of additions follows from the segments alone: bitwise the same in every
    run. Not differentiable itself.

    Args:
        x: [n, D] or [n, H, D], fp16, bf16 or fp32. Rows and heads may be strided; where neighbouring columns are
            not side by side it is copied first.
        segments: of n rows.
        dtype: of the result, fp16, bf16 or fp32; None: that of x.

    Returns:
        [S, D] or [S, H, D], contiguous.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_rows("x", x)
    if x.shape[0] != segments.num_rows:
        raise ValueError(f"x has {x.shape[0]} rows, but segments were derived from {segments.num_rows}")
    check_device(sum_chunks_kernel, {"x": x, "segments": segments.order})
    out = x.new_empty(segments.num_segments, *x.shape[1:], dtype=dtype or x.dtype)
    check_rows("the result", out)
    if out.numel() == 0:
        return out
    x = row_major(x)
    rows = Rows.of(x)
    waiting = x.new_empty(segments.num_slots, rows.heads * rows.columns, dtype=torch.float32)
    vector = alignment(rows) // x.element_size()
    block = block_columns([rows.columns], LEAST_BLOCK, BLOCK)
    block_rows = TILE // block
    num_chunks = segments.chunk_segment.shape[0]
    grid = (-(-num_chunks // block_rows), rows.heads * -(-rows.columns // block))
    with on_device(x):
        sum_chunks_kernel[grid](
            x,
            out,
            waiting,
            segments.order,
            segments.chunk_segment,
            segments.chunk_first,
            segments.chunk_length,
            segments.chunk_slot,
            num_chunks,
            segments.num_segments,
            rows.row_stride // vector,
            rows.head_stride // vector,
            rows.heads,
            rows.columns // vector,
            VECTOR=vector,
            BLOCK_ROWS=block_rows,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )
        if segments.long_segment.shape[0]:
            _sum_long(waiting, out, segments, rows.heads * rows.columns, vector)
    return out


def _sum_long(waiting: Tensor, out: Tensor, segments: Segments, width: int, vector: int) -> None:
    block = block_columns([width], LEAST_BLOCK, LONG_BLOCK)
    sum_long_kernel[(segments.long_segment.shape[0], -(-width // block))](
        waiting,
        out,
        segments.long_segment,
        segments.long_first,
        segments.long_count,
        segments.num_segments,
        width // vector,
        VECTOR=vector,
        BLOCK_ROWS=TILE // block,
        BLOCK=block,
        num_warps=NUM_WARPS,
    )


def configurations() -> list[KernelConfig]:
    """The sums as launched: gradients of hidden states in each dtype, of strided heads, and unaligned rows."""
    configs = []
    for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        configs.append(_chunks(f"segment_sum {dtype}", "reduce", dtype, dtype, ACCESS_BYTES // size, BLOCK))
        configs.append(_long(f"segment_sum long {dtype}", "reduce", dtype, ACCESS_BYTES // size))
    configs.append(_chunks("segment_sum bf16, heads of 128 columns", "reduce", "bf16", "bf16", 8, 128))
    configs.append(_chunks("segment_sum bf16 to fp32", "reduce", "bf16", "fp32", 8, BLOCK))
    configs.append(_chunks("segment_sum bf16, unaligned rows", "unaligned", "bf16", "bf16", 1, BLOCK))
    configs.append(_long("segment_sum long bf16, unaligned rows", "unaligned", "bf16", 1))
    return configs


_TABLES = ("order_ptr", "chunk_segment_ptr", "chunk_first_ptr", "chunk_length_ptr", "chunk_slot_ptr")
_LONG_TABLES = ("long_segment_ptr", "long_first_ptr", "long_count_ptr")


def _chunks(name: str, kind: str, dtype: str, out: str, vector: int, block: int) -> KernelConfig:
    data = {"x_ptr": f"*{dtype}", "out_ptr": f"*{out}", "waiting_ptr": "*fp32"}
    constexprs = {"VECTOR": vector, "BLOCK_ROWS": TILE // block, "BLOCK": block}
    tables = dict.fromkeys(_TABLES, "*i32")
    return _configuration(name, kind, sum_chunks_kernel, data, tables, constexprs)


def _long(name: str, kind: str, out: str, vector: int) -> KernelConfig:
    data = {"waiting_ptr": "*fp32", "out_ptr": f"*{out}"}
    constexprs = {"VECTOR": vector, "BLOCK_ROWS": TILE // LONG_BLOCK, "BLOCK": LONG_BLOCK}
    tables = dict.fromkeys(_LONG_TABLES, "*i32")
    return _configuration(name, kind, sum_long_kernel, data, tables, constexprs)


def _configuration(
    name: str,
    kind: str,
    kernel: Any,
    data: dict[str, str],
    tables: dict[str, str],
    constexprs: dict[str, int],
) -> KernelConfig:
    signature = (
        dict.fromkeys(kernel.arg_names, "i32") | data | tables | dict.fromkeys(constexprs, "constexpr")
    )
    aligned = (*(data if constexprs["VECTOR"] > 1 else ()), *tables)
    return KernelConfig(name, kind, lambda: kernel, signature, constexprs, NUM_WARPS, divisible_by_16=aligned)
