"""`rope_scatter`: RoPE on compact Q and K, and Q, K, V expanded to the ragged layout, in one launch.

The attention boundary of arXiv 2601.15013, section 3. Each compact row is read and rotated once per chunk of at
most `CHUNK` (32) ragged rows and written to all of them; RoPE is computed in fp32 and rounded once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from radixmlp.kernels.chunks import Segments
from radixmlp.kernels.launch import ACCESS_BYTES, check_device, check_rows, on_device, row_major
from radixmlp.kernels.rope_kernel import NUM_WARPS, rope_scatter_kernel, tile_shape
from radixmlp.kernels.segments import segment_sum


def rope_scatter(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, segments: Segments
) -> tuple[Tensor, Tensor, Tensor]:
    """(RoPE(q)[scatter], RoPE(k)[scatter], v[scatter]), differentiable in q, k and v.

    The first R columns of each head turn, as transformers turns them: column d with column d + R/2,
    x * cos + rotate_half(x) * sin. The other D - R columns are copied (partial rotary).

    Args:
        q: [N', Hq, D], k: [N', Hkv, D], v: [N', Hkv, Dv], of one dtype: fp16, bf16 or fp32. Rows and heads may be
            strided.
        cos, sin: [N', R] at the compact rows' positions (one dtype, which may be wider than q's), R even and at
            most D. Scaling of long contexts is in them already.
        segments: `Segments.of(plan.scatter, plan.num_nodes)`, derived once a plan.

    Returns:
        q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, Dv], contiguous.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or cos or sin that require a gradient.
    """
    _check(q, k, v, cos, sin, segments)
    out: tuple[Tensor, Tensor, Tensor] = _RopeScatter.apply(q, k, v, cos, sin, segments)
    return out


class _RopeScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, segments: Segments
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.segments = segments
        outs = tuple(x.new_empty(segments.num_rows, *x.shape[1:]) for x in (q, k, v))
        _launch((q, k, v), outs, cos, sin, segments, backward=False)
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        sums = tuple(segment_sum(grad, ctx.segments, torch.float32) for grad in (dq, dk))
        outs = tuple(torch.empty_like(x, dtype=dq.dtype) for x in sums)
        _launch((*sums, sums[1]), (*outs, outs[1]), cos, sin, ctx.segments, backward=True)
        return *outs, segment_sum(dv, ctx.segments), None, None, None


def _launch(
    tensors: tuple[Tensor, ...],
    outs: tuple[Tensor, ...],
    cos: Tensor,
    sin: Tensor,
    segments: Segments,
    backward: bool,
) -> None:
    if all(out.numel() == 0 for out in outs):
        return
    q, k, v = (row_major(x) for x in tensors)
    cos, sin = cos.contiguous(), sin.contiguous()
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    eight_heads = q.shape[1] % 8 == 0 and k.shape[1] % 8 == 0
    shape = tile_shape(q.shape[2], v.shape[2], cos.shape[1], outs[0].element_size(), eight_heads)
    vector = math.gcd(ACCESS_BYTES // min(x.element_size() for x in (q, outs[0])), *strides)
    num_chunks = segments.num_segments if backward else segments.chunk_segment.shape[0]
    widths = [shape["BLOCK_HEADS"], shape["BLOCK_HEADS"], shape["BLOCK_VALUE_HEADS"]]
    parts = [-(-x.shape[1] // width) for x, width in zip((q, k, v), widths, strict=True)]
    grid = (-(-num_chunks // shape["BLOCK_ROWS"]), sum(parts[:2] if backward else parts))
    with on_device(q):
        rope_scatter_kernel[grid](
            q,
            k,
            v,
            cos,
            sin,
            *outs,
            segments.order,
            segments.chunk_segment,
            segments.chunk_first,
            segments.chunk_length,
            num_chunks,
            q.shape[1],
            k.shape[1],
            *(stride // vector for stride in strides),
            VECTOR=vector,
            BACKWARD=backward,
            **shape,
            num_warps=NUM_WARPS,
        )


def _check(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, segments: Segments) -> None:
    nodes = segments.num_segments
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rows(name, x, dims=(3,))
        if x.shape[0] != nodes or x.dtype != q.dtype:
            raise ValueError(
                f"{name} has {x.shape[0]} rows of {x.dtype}: expected {nodes} rows, as many as segments, of q's "
                f"{q.dtype}"
            )
    if k.shape[2] != q.shape[2] or v.shape[1] != k.shape[1]:
        raise ValueError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}: q and k need one head_dim, "
            f"k and v one number of heads"
        )
    for name, x in (("cos", cos), ("sin", sin)):
        check_rows(name, x, dims=(2,))
        if x.shape != cos.shape or x.shape[0] != nodes or x.dtype != cos.dtype:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}: expected [{nodes}, rotary_dim], one "
                f"row for each row of q, and the same for cos and sin"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and none is computed for it: detach it")
    if cos.shape[1] % 2 or not 2 <= cos.shape[1] <= q.shape[2]:
        raise ValueError(
            f"cos has {cos.shape[1]} columns: expected an even rotary_dim of 2 .. head_dim, {q.shape[2]}"
        )
    tensors = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "segments": segments.order}
    check_device(rope_scatter_kernel, tensors)
