"""Rows copied to the slots of a batch, into memory that is cheap to touch."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

# From here on NumPy asks for huge pages. Most of the time of a copy of this size would go into page faults.
_LARGE = 1 << 22


def spread_rows(rows: Tensor, index: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """rows [R, d], index of `shape` elements -> [*shape, d]; differentiable where `rows` is."""
    if rows.requires_grad and torch.is_grad_enabled():
        return rows.index_select(0, index).unflatten(0, shape)
    out = _empty((index.numel(), *rows.shape[1:]), rows)
    return torch.index_select(rows, 0, index, out=out).unflatten(0, shape)


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    size = math.prod(shape) * like.element_size()
    if not like.is_cpu or size < _LARGE:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(size, np.uint8)).view(like.dtype).view(shape)
