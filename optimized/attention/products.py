"""The two matrix products of attention, in the fastest way that keeps scores at fp32.

A CPU multiplies bf16 matrices several times faster than fp32 ones, but PyTorch rounds the result to bf16, which
would cost a score three digits. The product is therefore taken twice: `high = round(QK^T)` and
`low = round(QK^T - high)`, whose subtraction happens in the product's fp32 accumulator. `high + low` has 16
bits, as good as what a fused kernel feeds its exponential.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def score_dtype(dtype: torch.dtype) -> torch.dtype:
    """Scores, log-sum-exps and merges are at least fp32."""
    return torch.promote_types(dtype, torch.float32)


@cache
def two_products_work() -> bool:
    """Whether this build's bf16 `baddbmm` subtracts before it rounds (checked once on random numbers)."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2, 96, 128, generator=random).bfloat16() for _ in range(2))
    rounded, total = torch.empty(2, 96, 96, dtype=a.dtype), torch.empty(2, 96, 96)
    _two_products(a, b.transpose(1, 2), 0.3, rounded, total)
    exact = 0.3 * torch.bmm(a.double(), b.double().transpose(1, 2))
    error = (total.double() - exact).abs().max()
    return bool(error <= 2.0**-14 * exact.abs().max())


def _two_products(a: Tensor, b: Tensor, scale: float, rounded: Tensor, total: Tensor) -> None:
    """total (fp32) = scale * ab to 16 bits; `rounded` (bf16) is overwritten."""
    torch.baddbmm(rounded, a, b, beta=0, alpha=scale, out=rounded)
    total.copy_(rounded)
    rounded.baddbmm_(a, b, beta=-1, alpha=scale)
    total.add_(rounded)


class Products:
    """QK^T, softmax and PV of one part; scratch memory is kept from chunk to chunk.

    Args:
        like: a tensor of the queries' dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.dtype = score_dtype(like.dtype)
        self.doubled = like.dtype is torch.bfloat16 and like.device.type == "cpu" and two_products_work()
        self._scratch: dict[str, Tensor] = {}

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """q [n, L, D], k [n, S, D] -> scale * QK^T [n, L, S] in `score_dtype`, the caller's to overwrite."""
        s = self._room("scores", (q.shape[0], q.shape[1], k.shape[1]), self.dtype, q)
        if self.doubled:
            _two_products(q, k.transpose(1, 2), scale, self._room("rounded", s.shape, q.dtype, q), s)
        else:
            wide_q, wide_k = q.to(self.dtype), k.to(self.dtype)
            torch.baddbmm(s, wide_q, wide_k.transpose(1, 2), beta=0, alpha=scale, out=s)
        return s

    def softmax(self, s: Tensor) -> Tensor:
        """Weights of the scores, in their dtype; valid until the next call."""
        return torch.softmax(s, -1, out=self._room("weights", s.shape, s.dtype, s))

    def values(self, p: Tensor, v: Tensor) -> Tensor:
        """p [n, L, S], v [n, S, Dv] -> PV [n, L, Dv]; bf16 weights are rounded first, as fused kernels do."""
        if v.dtype is torch.float16 and v.device.type == "cpu":  # no fp16 product on most CPUs
            return torch.bmm(p, v.to(p.dtype))
        if v.dtype is not p.dtype:
            p = self._room("rounded", p.shape, v.dtype, v).copy_(p)
        return torch.bmm(p, v)

    def _room(
        self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype, like: Tensor
    ) -> Tensor:
        """A contiguous tensor of `shape` from scratch memory called `name`."""
        count = 1
        for size in shape:
            count *= size
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < count:
            scratch = self._scratch[name] = torch.empty(count, dtype=dtype, device=like.device)
        return scratch[:count].view(shape)
