"""The kernels that copy rows, and their launches. They move bits, in words of 2, 4 or 8 bytes, whatever the dtype.

`copy_rows` goes by output row and reads each where it comes from; `expand_rows` goes by input row, reads it once per
chunk of at most `CHUNK` (32) copies and writes them all. Accesses are of 16 bytes where pointers, strides and widths
allow. Offsets are 64-bit.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from radixmlp.kernels.chunks import Segments
from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.launch import TILE_VECTORS, WORDS, RowLaunch, on_device, row_major

NUM_WARPS = 4
_SHAPES = [f"{t}_{what}" for t in "abc" for what in ("row_stride", "head_stride", "heads", "columns")]


@triton.jit
def _copy_tile(
    source,
    out,
    rows,
    from_rows,
    part,
    row_stride,
    head_stride,
    heads,
    columns,
    num_rows,
    num_sources,
    ZERO_AT_MINUS_ONE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[rows] = source[from_rows], of one block of the columns of one head. Strides and columns in vectors."""
    blocks = tl.cdiv(columns, BLOCK)
    head = (part // blocks).to(tl.int64)
    first = (part % blocks) * (BLOCK * VECTOR)
    cols = first + tl.arange(0, BLOCK * VECTOR)
    inside = (rows < num_rows)[:, None] & (cols < columns * VECTOR)[None, :]
    there = (from_rows >= 0) & (from_rows < num_sources)
    # All bits set is a NaN in every floating dtype: a row that does not exist must not look like one.
    missing = tl.full(from_rows.shape, -1, source.dtype.element_ty)
    if ZERO_AT_MINUS_ONE:
        missing = tl.where(from_rows == -1, 0, -1).to(source.dtype.element_ty)
    offsets = (from_rows * row_stride + head * head_stride) * VECTOR
    words = tl.load(
        source + offsets[:, None] + cols[None, :],
        mask=inside & there[:, None],
        other=tl.broadcast_to(missing[:, None], inside.shape),
    )
    out_offsets = ((rows * heads + head) * columns) * VECTOR
    tl.store(out + out_offsets[:, None] + cols[None, :], words, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_sources", *_SHAPES])
def copy_rows_kernel(
    index_ptr,
    num_rows,
    num_sources,
    a_ptr,
    a_out_ptr,
    a_row_stride,
    a_head_stride,
    a_heads,
    a_columns,
    b_ptr,
    b_out_ptr,
    b_row_stride,
    b_head_stride,
    b_heads,
    b_columns,
    c_ptr,
    c_out_ptr,
    c_row_stride,
    c_head_stride,
    c_heads,
    c_columns,
    ZERO_AT_MINUS_ONE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = tensor[index[i]] for up to three tensors. Programs: (blocks of rows, blocks of columns)."""
    rows = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    from_rows = tl.load(index_ptr + rows, mask=rows < num_rows, other=0).to(tl.int64)
    part = tl.program_id(1)
    a_parts = a_heads * tl.cdiv(a_columns, BLOCK)
    b_parts = b_heads * tl.cdiv(b_columns, BLOCK)
    if part < a_parts:
        _copy_tile(
            a_ptr, a_out_ptr, rows, from_rows, part, a_row_stride, a_head_stride, a_heads, a_columns,
            num_rows, num_sources, ZERO_AT_MINUS_ONE, VECTOR, BLOCK,
        )  # fmt: skip
    elif part < a_parts + b_parts:
        _copy_tile(
            b_ptr, b_out_ptr, rows, from_rows, part - a_parts, b_row_stride, b_head_stride, b_heads, b_columns,
            num_rows, num_sources, ZERO_AT_MINUS_ONE, VECTOR, BLOCK,
        )  # fmt: skip
    else:
        _copy_tile(
            c_ptr, c_out_ptr, rows, from_rows, part - a_parts - b_parts, c_row_stride, c_head_stride, c_heads,
            c_columns, num_rows, num_sources, ZERO_AT_MINUS_ONE, VECTOR, BLOCK,
        )  # fmt: skip


@triton.jit
def _expand_tile(
    source,
    out,
    order,
    from_rows,
    first,
    length,
    part,
    row_stride,
    head_stride,
    heads,
    columns,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[order[first + i]] = source[from_rows] for i < length, of one block of the columns of one head."""
    blocks = tl.cdiv(columns, BLOCK)
    head = (part // blocks).to(tl.int64)
    cols = (part % blocks) * (BLOCK * VECTOR) + tl.arange(0, BLOCK * VECTOR)
    inside = (length > 0)[:, None] & (cols < columns * VECTOR)[None, :]
    offsets = (from_rows * row_stride + head * head_stride) * VECTOR
    words = tl.load(source + offsets[:, None] + cols[None, :], mask=inside, other=0)
    for i in range(0, tl.max(length, 0)):
        there = i < length
        row = tl.load(order + first + i, mask=there, other=0).to(tl.int64)
        out_offsets = ((row * heads + head) * columns) * VECTOR
        tl.store(out + out_offsets[:, None] + cols[None, :], words, mask=inside & there[:, None])


@triton.jit(do_not_specialize=["num_chunks", *_SHAPES])
def expand_rows_kernel(
    order_ptr,
    chunk_segment_ptr,
    chunk_first_ptr,
    chunk_length_ptr,
    num_chunks,
    a_ptr,
    a_out_ptr,
    a_row_stride,
    a_head_stride,
    a_heads,
    a_columns,
    b_ptr,
    b_out_ptr,
    b_row_stride,
    b_head_stride,
    b_heads,
    b_columns,
    c_ptr,
    c_out_ptr,
    c_row_stride,
    c_head_stride,
    c_heads,
    c_columns,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out[i] = tensor[index[i]] for up to three tensors. Programs: (blocks of chunks, blocks of columns)."""
    chunk = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    known = chunk < num_chunks
    from_rows = tl.load(chunk_segment_ptr + chunk, mask=known, other=0).to(tl.int64)
    first = tl.load(chunk_first_ptr + chunk, mask=known, other=0)
    length = tl.load(chunk_length_ptr + chunk, mask=known, other=0)
    part = tl.program_id(1)
    a_parts = a_heads * tl.cdiv(a_columns, BLOCK)
    b_parts = b_heads * tl.cdiv(b_columns, BLOCK)
    if part < a_parts:
        _expand_tile(
            a_ptr, a_out_ptr, order_ptr, from_rows, first, length, part, a_row_stride, a_head_stride, a_heads,
            a_columns, VECTOR, BLOCK,
        )  # fmt: skip
    elif part < a_parts + b_parts:
        _expand_tile(
            b_ptr, b_out_ptr, order_ptr, from_rows, first, length, part - a_parts, b_row_stride, b_head_stride,
            b_heads, b_columns, VECTOR, BLOCK,
        )  # fmt: skip
    else:
        _expand_tile(
            c_ptr, c_out_ptr, order_ptr, from_rows, first, length, part - a_parts - b_parts, c_row_stride,
            c_head_stride, c_heads, c_columns, VECTOR, BLOCK,
        )  # fmt: skip


def copy_rows(
    tensors: tuple[Tensor, ...], index: Tensor, zero_at_minus_one: bool = False
) -> tuple[Tensor, ...]:
    """x[index] for each of up to three checked tensors; no gradient. See `gather_rows`.

    Args:
        zero_at_minus_one: index -1 gives a row of zeros (not, as any other row that is not there, of NaN).
    """
    outs = tuple(x.new_empty(index.shape[0], *x.shape[1:]) for x in tensors)
    if all(out.numel() == 0 for out in outs):
        return outs
    index = index.contiguous()
    launch = RowLaunch.of(tuple(row_major(x) for x in tensors), outs)
    with on_device(index):
        copy_rows_kernel[launch.grid(index.shape[0])](
            index,
            index.shape[0],
            tensors[0].shape[0],
            *launch.arguments(),
            ZERO_AT_MINUS_ONE=zero_at_minus_one,
            VECTOR=launch.vector,
            BLOCK_ROWS=launch.block_rows,
            BLOCK=launch.block,
            num_warps=NUM_WARPS,
        )
    return outs


def expand_rows(tensors: tuple[Tensor, ...], segments: Segments) -> tuple[Tensor, ...]:
    """x[index] for each of up to three checked tensors, where `segments` are those of index; no gradient."""
    outs = tuple(x.new_empty(segments.num_rows, *x.shape[1:]) for x in tensors)
    if all(out.numel() == 0 for out in outs):
        return outs
    launch = RowLaunch.of(tuple(row_major(x) for x in tensors), outs)
    num_chunks = segments.chunk_segment.shape[0]
    with on_device(segments.order):
        expand_rows_kernel[launch.grid(num_chunks)](
            segments.order,
            segments.chunk_segment,
            segments.chunk_first,
            segments.chunk_length,
            num_chunks,
            *launch.arguments(),
            VECTOR=launch.vector,
            BLOCK_ROWS=launch.block_rows,
            BLOCK=launch.block,
            num_warps=NUM_WARPS,
        )
    return outs


def configurations() -> list[KernelConfig]:
    """The copies as launched: hidden states, Q/K/V together, either width of index, and unaligned rows."""
    shapes = [  # name, alignment, vectors of a row that one program takes, what else the launch chooses
        ("gather_rows i32", 16, 256, {"index_ptr": "*i32", "ZERO_AT_MINUS_ONE": False}),
        ("gather_rows i64", 16, 256, {"index_ptr": "*i64", "ZERO_AT_MINUS_ONE": False}),
        ("gather_rows i32, heads of 128", 16, 16, {"index_ptr": "*i32", "ZERO_AT_MINUS_ONE": False}),
        ("scatter_rows", 16, 256, {"index_ptr": "*i64", "ZERO_AT_MINUS_ONE": True}),
        ("gather_rows i32, 8-byte rows", 8, 256, {"index_ptr": "*i32", "ZERO_AT_MINUS_ONE": False}),
        ("gather_rows i32, 4-byte rows", 4, 256, {"index_ptr": "*i32", "ZERO_AT_MINUS_ONE": False}),
        ("gather_rows i32, 2-byte rows", 2, 256, {"index_ptr": "*i32", "ZERO_AT_MINUS_ONE": False}),
        ("gather_rows by segments", 16, 256, {}),
        ("gather_rows by segments, heads of 128", 16, 16, {}),
        ("gather_rows by segments, 2-byte rows", 2, 256, {}),
    ]
    return [_configuration(*shape) for shape in shapes]


def _configuration(name: str, aligned: int, block: int, chosen: dict[str, Any]) -> KernelConfig:
    kernel = copy_rows_kernel if chosen else expand_rows_kernel
    word, vector = WORDS[aligned]
    data = [f"{t}{out}_ptr" for t in "abc" for out in ("", "_out")]
    tables = [pointer for pointer in kernel.arg_names if pointer.endswith("_ptr") and pointer not in data]
    constexprs = {"VECTOR": vector, "BLOCK_ROWS": TILE_VECTORS // block, "BLOCK": block}
    constexprs |= {key: value for key, value in chosen.items() if key.isupper()}
    signature = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(tables, "*i32")
    signature |= {key: value for key, value in chosen.items() if not key.isupper()}
    signature |= dict.fromkeys(data, f"*{word}".replace("int", "i")) | dict.fromkeys(constexprs, "constexpr")
    return KernelConfig(
        name=name,
        kind="copy" if aligned == 16 else "unaligned",
        kernel=lambda: kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        divisible_by_16=(*tables, *(data if aligned == 16 else ())),
    )
