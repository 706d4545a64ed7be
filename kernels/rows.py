"""`gather_rows` and `scatter_rows`: the row copies between the compact and the ragged layout.

In RadixMLP (arXiv 2601.15013, section 3) compact -> ragged is `gather_rows(x, plan.scatter)`, a gather with
duplicates, and ragged -> compact is `gather_rows(y, plan.gather)`, whose rows are distinct. `scatter_rows` is the
transpose of the second: ragged rows that no compact row came from are zero.

Copies are bitwise, 16 bytes an access where pointers, strides and widths allow, with 64-bit offsets (`row_copy.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from radixmlp.kernels.chunks import Segments
from radixmlp.kernels.launch import check_device, check_index, check_rows
from radixmlp.kernels.row_copy import copy_rows, copy_rows_kernel, expand_rows
from radixmlp.kernels.segments import segment_sum


def gather_rows(x: Tensor, index: Tensor, segments: Segments | None = None) -> Tensor:
    """x[index], differentiable in x.

    Args:
        x: [rows, D] or [rows, H, D], fp16, bf16 or fp32. Rows and heads may be strided; where neighbouring columns
            are not side by side it is copied first.
        index: [n] int32 or int64, in 0 .. rows-1, in any order, with or without duplicates. Not read back to
            the host to be checked: a row outside comes out as NaN.
        segments: `Segments.of(index, rows)`, derived once for an index that serves often (`scatter_segments`).
            Then an index with more rows than x reads each row of x once, not once per duplicate, and the
            backward need not derive it.

    Returns:
        [n, D] or [n, H, D], contiguous. Its gradient adds up duplicates in fp32, in a fixed order.

    Raises:
        ValueError: a shape, dtype or device that does not fit, or segments of an index of other sizes.
    """
    (out,) = gather_rows_together((x,), index, segments)
    return out


def gather_rows_together(
    tensors: tuple[Tensor, ...], index: Tensor, segments: Segments | None = None
) -> tuple[Tensor, ...]:
    """(x[index] for each of up to three tensors) in one launch: Q, K and V.

    Args:
        tensors: as `x` of `gather_rows`, of one dtype and equally many rows.
        index, segments: as there.
    """
    check_index("index", index)
    _check_together(tensors, index, segments)
    if segments is not None:
        segments.require(index.shape[0], tensors[0].shape[0])
    out: tuple[Tensor, ...] = _Gather.apply(index, segments, *tensors)
    return out


def scatter_rows(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """`out[index[i]] = x[i]`, rows of `out` that no i names are zero; differentiable in x.

    Args:
        x: [n, D] or [n, H, D], as in `gather_rows`.
        index: [n] int32 or int64, in 0 .. num_rows-1, meant to be distinct; where two are equal the last wins,
            and the gradient of the others is zero.
        num_rows: rows of the result.

    Returns:
        [num_rows, D] or [num_rows, H, D], contiguous.

    Raises:
        ValueError: a shape, dtype or device that does not fit.
    """
    check_index("index", index)
    _check_together((x,), index)
    if index.shape[0] != x.shape[0]:
        raise ValueError(f"index names {index.shape[0]} rows, but x has {x.shape[0]}: one for each")
    if num_rows < 0:
        raise ValueError(f"num_rows is {num_rows}: expected 0 or more")
    out: Tensor = _Scatter.apply(x, index, num_rows)
    return out


class _Gather(torch.autograd.Function):
    """(index [n], segments or None, up to three [rows, ...]) -> as many [n, ...]."""

    @staticmethod
    def forward(ctx: Any, index: Tensor, segments: Segments | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(index)
        ctx.segments, ctx.rows = segments, tensors[0].shape[0]
        ctx.set_materialize_grads(False)
        if segments is not None and segments.num_rows > segments.num_segments:
            return expand_rows(tensors, segments)
        return copy_rows(tensors, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        segments = ctx.segments if ctx.segments is not None else Segments.of(index, ctx.rows)
        sums = [
            segment_sum(grad, segments) if needed and grad is not None else None
            for grad, needed in zip(grads, ctx.needs_input_grad[2:], strict=True)
        ]
        return None, None, *sums


class _Scatter(torch.autograd.Function):
    """(x [n, ...], index [n], num_rows) -> [num_rows, ...]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, num_rows: int) -> Tensor:
        rows = torch.arange(x.shape[0], dtype=torch.int64, device=index.device)
        inverse = torch.full((num_rows,), -1, dtype=torch.int64, device=index.device)
        inverse.scatter_reduce_(0, index.long(), rows, "amax")
        ctx.save_for_backward(index, inverse)
        (out,) = copy_rows((x,), inverse, zero_at_minus_one=True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, inverse = ctx.saved_tensors
        rows = torch.arange(index.shape[0], dtype=torch.int64, device=index.device)
        written = torch.where(inverse[index.long()] == rows, index.long(), -1)
        (out,) = copy_rows((grad,), written, zero_at_minus_one=True)
        return out, None, None


def _check_together(tensors: tuple[Tensor, ...], index: Tensor, segments: Segments | None = None) -> None:
    if not 1 <= len(tensors) <= 3:
        raise ValueError(f"got {len(tensors)} tensors: one launch moves one to three")
    names = ["x"] if len(tensors) == 1 else [f"tensor {i}" for i in range(len(tensors))]
    for name, x in zip(names, tensors, strict=True):
        check_rows(name, x)
        if x.shape[0] != tensors[0].shape[0] or x.dtype != tensors[0].dtype:
            raise ValueError(
                f"{name} has {x.shape[0]} rows of {x.dtype}, but {names[0]} {tensors[0].shape[0]} of "
                f"{tensors[0].dtype}: tensors moved together need equally many rows of one dtype"
            )
    on = {**dict(zip(names, tensors, strict=True)), "index": index}
    check_device(copy_rows_kernel, on if segments is None else {**on, "segments": segments.order})
