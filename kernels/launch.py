"""What every launch of a row kernel needs: checked tensors, and rows described in units of one access.

Rows are moved as 16-byte vectors wherever pointers, strides and widths allow. A kernel receives strides and widths
counted in vectors and multiplies by the vector's length itself, so that the compiler sees the alignment for any
width, not only for multiples of 16 elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ACCESS_BYTES = 16
TILE_VECTORS = 1024  # of one program that copies: 8 accesses in flight for each of its 128 threads
WORDS = {16: (tl.int64, 2), 8: (tl.int64, 1), 4: (tl.int32, 1), 2: (tl.int16, 1)}  # alignment: word, vector
_BLOCK_VECTORS = (32, 256)  # of a row that one program takes: 512 bytes to 4 KB
_WASTE = 1.1  # columns a choice of block may compute, over the least
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a [rows, H, D] tensor lie, in elements: heads that lie side by side count as one."""

    tensor: Tensor
    heads: int
    columns: int
    row_stride: int
    head_stride: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """x [rows, D] or [rows, H, D], last stride 1."""
        heads, columns = (1, x.shape[1]) if x.dim() == 2 else (x.shape[1], x.shape[2])
        head_stride = columns if x.dim() == 2 or heads == 1 else x.stride(1)
        if head_stride == columns:
            heads, columns = 1, heads * columns
        row_stride = x.stride(0) if x.shape[0] > 1 else 0  # of a single row it is whatever PyTorch left there
        return cls(x, heads, columns, row_stride, head_stride if heads > 1 else columns)


def alignment(*rows: Rows) -> int:
    """The largest power of two, at most 16, of bytes that every row, head and width is a multiple of."""
    common = ACCESS_BYTES
    for each in rows:
        width = each.tensor.element_size()
        strides = (each.columns, each.row_stride, each.head_stride)
        common = math.gcd(common, each.tensor.data_ptr(), *(stride * width for stride in strides))
    return common


class RowLaunch:
    """The geometry of one launch that copies rows of up to three tensors."""

    def __init__(self, sources: list[Rows], outs: tuple[Tensor, ...], aligned: int) -> None:
        self.sources, self.outs, self.aligned = sources, outs, aligned
        self.word, self.vector = WORDS[aligned]
        element = sources[0].tensor.element_size()
        self.columns = [source.columns * element // aligned for source in sources]  # in vectors
        self.block = block_columns(self.columns, *_BLOCK_VECTORS)
        self.block_rows = TILE_VECTORS // self.block
        self.parts = sum(
            source.heads * -(-columns // self.block)
            for source, columns in zip(sources, self.columns, strict=True)
        )

    def grid(self, rows: int) -> tuple[int, int]:
        """Programs for so many rows (or chunks)."""
        return -(-rows // self.block_rows), self.parts

    @classmethod
    def of(cls, tensors: tuple[Tensor, ...], outs: tuple[Tensor, ...]) -> RowLaunch:
        """For tensors [rows, ...] whose columns lie side by side, and contiguous outs [n, ...]."""
        sources = [Rows.of(x) for x in tensors]
        return cls(sources, outs, alignment(*sources, *(Rows.of(out) for out in outs)))

    def arguments(self) -> list[Any]:
        """Pointers, strides, heads and columns of the three tensors, those that are missing without columns."""
        values: list[Any] = []
        element = self.sources[0].tensor.element_size()
        for source, out, columns in zip(self.sources, self.outs, self.columns, strict=True):
            pointers = [triton.reinterpret(x, self.word) for x in (source.tensor, out)]
            strides = [stride * element // self.aligned for stride in (source.row_stride, source.head_stride)]
            values += [*pointers, *strides, source.heads, columns]
        missing = [*values[:2], 0, 0, 0, 0]
        return values + missing * (3 - len(self.sources))


def block_columns(columns: list[int], least: int, most: int) -> int:
    """Columns that one program takes: a power of two, at least `least` (where a row has as many), at most `most`.

    The largest that computes hardly more columns that are not there than the best one.
    """
    widest = 1 << (max(columns) - 1).bit_length()
    first, last = min(least, widest), min(most, widest)
    sizes = [first << i for i in range((last // first).bit_length())]
    padded = [sum(-(-each // size) * size for each in columns) for size in sizes]
    return max(size for size, width in zip(sizes, padded, strict=True) if width <= _WASTE * min(padded))


def row_major(x: Tensor) -> Tensor:
    """`x` itself where neighbouring columns lie side by side (rows and heads may be strided), else a copy."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def check_rows(name: str, x: Tensor, dims: tuple[int, ...] = (2, 3)) -> None:
    """Raises ValueError unless `x` is a floating [rows, D] or [rows, H, D] tensor the kernels can move."""
    if x.dim() not in dims:
        shapes = " or ".join("[rows, D]" if n == 2 else "[rows, H, D]" for n in dims)
        raise ValueError(f"{name} has shape {tuple(x.shape)}: expected {shapes}")
    if x.dtype not in FLOATS:
        raise ValueError(f"{name} has dtype {x.dtype}: expected float16, bfloat16 or float32")


def check_index(name: str, index: Tensor) -> None:
    """Raises ValueError unless `index` is [n] int32 or int64."""
    if index.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(index.shape)}: expected one dimension, [n]")
    if index.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} has dtype {index.dtype}: expected int32 or int64")


def check_device(kernel: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless all tensors are on one device on which `kernel` runs."""
    (first, tensor), *others = tensors.items()
    device = tensor.device
    for name, other in others:
        if other.device != device:
            raise ValueError(f"{first} is on {device}, but {name} on {other.device}: move them to one device")
    interpreted = not isinstance(kernel, triton.JITFunction)
    if device.type == "cuda" or (device.type == "cpu" and interpreted):
        return
    raise ValueError(
        f"{first} is on {device}: this is a Triton kernel and runs on a GPU. Move the tensors to one, use "
        f"PyTorch's index_select here, or set TRITON_INTERPRET=1 before Triton is imported to debug on the CPU"
    )


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it that of `x`."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
