"""How far a correct path may be from the truth: every factor of the harness, fixed here once."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Relative to max|truth|. "Lifted": the model's own casts to float32 keep float64.
LIFTED_FLOAT64 = 1e-10
LIFTED_GRADIENT = 1e-10
PLAIN_FLOAT64 = 1e-6
FLOAT32 = 1e-5

# Below float32 the dense path in the same dtype sets the scale.
RMS_FACTOR = 1.1
LARGEST_FACTOR = 2.0
FLOOR_ULPS = 2
# The RMS of fewer rows (last-token logits of a small batch) is a matter of luck: it is reported, not judged.
MIN_RMS_ROWS = 64

# L2-normalised last-token embeddings in fp16 (arXiv 2601.15013), where dense itself stays below it.
FP16_EMBEDDING = 1e-4

# Stretched positions must move the truth by this much, or a path that ignores them would pass unseen.
LEAST_POSITION_RESPONSE = 1e-3

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Errors:
    """How one output differs from the truth, as shares of max|truth|; `worst`: where most, (row, column)."""

    largest: float
    rms: float
    worst: tuple[int, int]
    scale: float


def errors_against(got: Tensor, truth: Tensor) -> Errors:
    """Compare [rows, width] outputs; anything that is not finite is an infinite error.

    Raises:
        ValueError: the shapes differ.
    """
    if got.shape != truth.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    if truth.numel() == 0:
        return Errors(0.0, 0.0, (0, 0), 0.0)
    difference = (got.to(truth.dtype) - truth).abs()
    difference = torch.where(torch.isfinite(difference), difference, math.inf)
    row, column = divmod(int(difference.argmax()), truth.shape[1])
    scale = float(truth.abs().max())
    if not math.isfinite(scale) or scale == 0.0:
        return Errors(math.inf, math.inf, (row, column), scale)
    largest = float(difference.max()) / scale
    rms = float(difference.square().mean().sqrt()) / scale
    return Errors(largest, rms, (row, column), scale)


def floor_of(dtype: torch.dtype, scale: float) -> float:
    """`FLOOR_ULPS` units in the last place of `scale`, as a share of it."""
    exponent = math.floor(math.log2(scale)) if scale > 0 else 0
    return FLOOR_ULPS * torch.finfo(dtype).eps * 2.0**exponent / scale if scale > 0 else 0.0
