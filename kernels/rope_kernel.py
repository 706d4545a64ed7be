"""The kernel of `rope_scatter`, its tile and its configurations."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from radixmlp.kernels.config import KernelConfig

NUM_WARPS = 4
TILE_BYTES = 8192  # of one program's heads: 32 registers for each of its 128 threads, in fp16
_ACCESS_BYTES = 2048  # half a tile has at least, so that each thread's part is 16 bytes


@triton.jit
def _rotate_tile(
    x,
    out,
    cos,
    sin,
    order,
    segment,
    first,
    length,
    part,
    heads,
    row_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Rotate these heads of the rows `segment` [R] and write them to their `length` [R] ragged rows."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    head = (part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
    col = tl.arange(0, BLOCK_HALF)[None, None, :]
    live = (length > 0)[:, None, None]
    node = segment[:, None, None]

    at = x + (node * row_stride + head.to(tl.int64) * head_stride) * VECTOR
    inside = live & (head < heads) & (col < HALF)
    a = tl.load(at + col, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + HALF + col, mask=inside, other=0.0).to(tl.float32)
    angle, known = node * ROTARY_DIM + col, live & (col < HALF)
    cos_a = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + HALF + angle, mask=known, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + HALF + angle, mask=known, other=0.0).to(tl.float32)
    if BACKWARD:
        turned_a, turned_b = a * cos_a + b * sin_b, b * cos_b - a * sin_a
    else:
        turned_a, turned_b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    turned_a, turned_b = turned_a.to(out.dtype.element_ty), turned_b.to(out.dtype.element_ty)
    if BLOCK_REST > 0:
        rest_col = tl.arange(0, BLOCK_REST)[None, None, :]
        rest_inside = live & (head < heads) & (rest_col < HEAD_DIM - ROTARY_DIM)
        rest = tl.load(at + ROTARY_DIM + rest_col, mask=rest_inside, other=0.0).to(out.dtype.element_ty)

    for i in range(0, tl.max(length, 0)):
        there = i < length
        row = segment if BACKWARD else tl.load(order + first + i, mask=there, other=0).to(tl.int64)
        to = out + (row[:, None, None] * heads + head) * HEAD_DIM
        tl.store(to + col, turned_a, mask=inside & there[:, None, None])
        tl.store(to + HALF + col, turned_b, mask=inside & there[:, None, None])
        if BLOCK_REST > 0:
            tl.store(to + ROTARY_DIM + rest_col, rest, mask=rest_inside & there[:, None, None])


@triton.jit
def _expand_tile(
    x,
    out,
    order,
    segment,
    first,
    length,
    part,
    heads,
    row_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write these heads of the rows `segment` [R] to their `length` [R] ragged rows."""
    head = (part * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[None, :, None]
    col = tl.arange(0, BLOCK)[None, None, :]
    inside = (length > 0)[:, None, None] & (head < heads) & (col < HEAD_DIM)
    at = x + (segment[:, None, None] * row_stride + head.to(tl.int64) * head_stride) * VECTOR
    value = tl.load(at + col, mask=inside, other=0.0)
    for i in range(0, tl.max(length, 0)):
        there = i < length
        row = tl.load(order + first + i, mask=there, other=0).to(tl.int64)
        to = out + (row[:, None, None] * heads + head) * HEAD_DIM
        tl.store(to + col, value, mask=inside & there[:, None, None])


_SIZES = ["num_chunks", "q_heads", "kv_heads"]
_STRIDES = [f"{t}_{which}_stride" for t in "qkv" for which in ("row", "head")]


@triton.jit(do_not_specialize=_SIZES + _STRIDES)
def rope_scatter_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    v_out_ptr,
    order_ptr,
    chunk_segment_ptr,
    chunk_first_ptr,
    chunk_length_ptr,
    num_chunks,
    q_heads,
    kv_heads,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    BLOCK_VALUE_HEADS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Programs: (blocks of chunks, blocks of heads of q, then k, then v). Strides in vectors.

    BACKWARD: the transposed rotation of each row onto itself (chunk i is row i), without v.
    """
    chunk = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    known = chunk < num_chunks
    if BACKWARD:
        segment, first, length = chunk.to(tl.int64), chunk, known.to(tl.int32)
    else:
        segment = tl.load(chunk_segment_ptr + chunk, mask=known, other=0).to(tl.int64)
        first = tl.load(chunk_first_ptr + chunk, mask=known, other=0)
        length = tl.load(chunk_length_ptr + chunk, mask=known, other=0)
    part = tl.program_id(1)
    q_parts, kv_parts = tl.cdiv(q_heads, BLOCK_HEADS), tl.cdiv(kv_heads, BLOCK_HEADS)
    if part < q_parts:
        _rotate_tile(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, order_ptr, segment, first, length, part, q_heads,
            q_row_stride, q_head_stride, HEAD_DIM, ROTARY_DIM, VECTOR, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
            BACKWARD,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        _rotate_tile(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, order_ptr, segment, first, length, part - q_parts, kv_heads,
            k_row_stride, k_head_stride, HEAD_DIM, ROTARY_DIM, VECTOR, BLOCK_HEADS, BLOCK_HALF, BLOCK_REST,
            BACKWARD,
        )  # fmt: skip
    elif not BACKWARD:
        _expand_tile(
            v_ptr, v_out_ptr, order_ptr, segment, first, length, part - q_parts - kv_parts, kv_heads,
            v_row_stride, v_head_stride, VALUE_DIM, VECTOR, BLOCK_VALUE_HEADS, BLOCK_VALUE,
        )  # fmt: skip


def tile_shape(
    head_dim: int, value_dim: int, rotary_dim: int, element_size: int, eight_heads: bool
) -> dict[str, int]:
    """The constexprs that follow from the head dimensions.

    Args:
        element_size: bytes, of the result.
        eight_heads: q and k have multiples of eight heads: so many then share one reading of cos and sin, else four
            (and where only a part of the head turns: cos and sin are short there).
    """
    half, rest = triton.next_power_of_2(rotary_dim // 2), head_dim - rotary_dim
    heads = 8 if eight_heads and not rest else 4
    widest = max(2 * half, *(triton.next_power_of_2(max(width, 1)) for width in (rest, value_dim)))
    value = triton.next_power_of_2(max(value_dim, 1))
    elements = TILE_BYTES // element_size
    rows = max(elements // (heads * widest), _ACCESS_BYTES // element_size // (heads * half))
    # A narrow rotary part would else make the rest of the head too large.
    rows = max(1, min(rows, 4 * elements // (heads * widest)))
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_ROWS": rows,
        "BLOCK_HEADS": heads,
        "BLOCK_HALF": half,
        "BLOCK_REST": triton.next_power_of_2(rest) if rest else 0,
        "BLOCK_VALUE": value,
        "BLOCK_VALUE_HEADS": max(1, min(heads, elements // (rows * value))),
    }


def configurations() -> list[KernelConfig]:
    """RoPE with the scatter, and its transpose, at the models' head dimensions."""
    shapes = [  # name, D, Dv, R
        *((f"d{dim}", dim, dim, dim) for dim in (64, 96, 128, 256)),
        ("d80 32 rotary", 80, 80, 32),
        ("d128 32 rotary", 128, 128, 32),
        ("d192 v128 64 rotary", 192, 128, 64),
    ]
    configs = [
        _configuration(f"rope_scatter {name} {dtype} {heads} heads", dtype, dtype, dims, heads == 8)
        for name, *dims in shapes
        for dtype in ("bf16", "fp16")
        for heads in ((8, 4) if dims[0] == dims[2] else (4,))
    ]
    whole = [128, 128, 128]
    return [
        *configs,
        _configuration("rope_scatter d128 fp32 8 heads", "fp32", "fp32", whole, True),
        _configuration("rope_scatter d128 bf16 8 heads, fp32 angles", "bf16", "fp32", whole, True),
        _configuration("rope_scatter backward d128 bf16 8 heads", "bf16", "bf16", whole, True, backward=True),
        _configuration(
            "rope_scatter backward d64 bf16 4 heads", "bf16", "bf16", [64] * 3, False, backward=True
        ),
    ]


def _configuration(
    name: str, dtype: str, angle_dtype: str, dims: list[int], eight_heads: bool, backward: bool = False
) -> KernelConfig:
    head_dim, value_dim, rotary_dim = dims
    constexprs = tile_shape(head_dim, value_dim, rotary_dim, 4 if dtype == "fp32" else 2, eight_heads)
    constexprs |= {"VECTOR": 4 if dtype == "fp32" or backward else 8, "BACKWARD": backward}
    pointers = [name for name in rope_scatter_kernel.arg_names if name.endswith("_ptr")]
    outs, angles = ("q_out_ptr", "k_out_ptr", "v_out_ptr"), ("cos_ptr", "sin_ptr")
    signature = dict.fromkeys(rope_scatter_kernel.arg_names, "i32") | dict.fromkeys(pointers, "*i32")
    signature |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*fp32" if backward else f"*{dtype}")
    signature |= dict.fromkeys(outs, f"*{dtype}") | dict.fromkeys(angles, f"*{angle_dtype}")
    return KernelConfig(
        name=name,
        kind="copy",
        kernel=lambda: rope_scatter_kernel,
        signature=signature | dict.fromkeys(constexprs, "constexpr"),
        constexprs=constexprs,
        num_warps=NUM_WARPS,
        divisible_by_16=tuple(pointers),
    )
