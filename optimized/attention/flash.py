"""`dense-flash`, the baseline, and `scatter-flash`, the paper's attention boundary, over FlashAttention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixmlp.optimized.attention.flash_kernels import VarlenKernel, installed_kernel
from radixmlp.optimized.attention.sdpa import sequence_bounds
from radixmlp.optimized.errors import UnsupportedAttentionError
from radixmlp.reference import AttentionSpec, TriePlan


class _Flash:
    """What both share.

    Args:
        kernel: None: whichever is installed, looked for on first use.
    """

    name = ""

    def __init__(self, kernel: VarlenKernel | None = None) -> None:
        self._kernel = kernel

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        kernel = self._kernel or installed_kernel()
        return kernel if isinstance(kernel, str) else kernel.unsupported(spec, device, dtype, training)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D], one row per token of `plan.cu_seqlens` -> [N, Hq, D]."""
        learned = any(x.requires_grad for x in (q, k, v, spec.sinks) if x is not None)
        training = torch.is_grad_enabled() and learned
        kernel = self._kernel or installed_kernel()
        if isinstance(kernel, str):
            raise UnsupportedAttentionError(f"{self.name}: {kernel}")
        reason = kernel.unsupported(spec, q.device, q.dtype, training)
        reason = reason or kernel.unsupported_widths(q.shape[2], v.shape[2])
        if reason is not None:
            raise UnsupportedAttentionError(f"{self.name}: {reason}")
        longest = max((end - start for start, end in pairwise(sequence_bounds(plan))), default=0)
        if longest == 0:
            return q.new_empty(0, q.shape[1], v.shape[2])
        out, lse = kernel.attend(q, k, v, plan.cu_seqlens, longest, spec, spec.sinks is not None)
        if spec.sinks is None:
            return out
        assert lse is not None
        weight = torch.sigmoid(lse - spec.sinks.to(lse.dtype))  # [N, Hq], of everything but the sink
        return (out * weight[..., None]).to(q.dtype)


class DenseFlash(_Flash):
    """Every token its own row: FlashAttention per sequence."""

    name = "dense-flash"
    shares_prefixes = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D] -> [N, Hq, D].

        Raises:
            ValueError: the plan shares rows.
            UnsupportedAttentionError: no kernel is installed, or it does not serve this layer.
        """
        if plan.num_nodes != plan.num_tokens:
            raise ValueError(
                f"dense-flash needs one row per token, got a plan of {plan.num_nodes} rows for "
                f"{plan.num_tokens} tokens: use TriePlan.identity(batch)"
            )
        return self._attend(q, k, v, plan, spec)


class ScatterFlash(_Flash):
    """arXiv 2601.15013, section 3: scatter Q/K/V to the ragged layout, FlashAttention there, gather back."""

    name = "scatter-flash"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, D] -> [N', Hq, D].

        Raises:
            UnsupportedAttentionError: no kernel is installed, or it does not serve this layer.
        """
        moves = _row_moves(q.device.type)
        ragged_q, ragged_k, ragged_v = moves.expand((q, k, v), plan)  # [N, H, D]
        return moves.compact(self._attend(ragged_q, ragged_k, ragged_v, plan, spec), plan)


class _RowMoves(NamedTuple):
    """`expand`: tensors [N', H, D] -> [N, H, D]; `compact`: [N, H, D] -> [N', H, D]."""

    expand: Callable[[tuple[Tensor, ...], TriePlan], tuple[Tensor, ...]]
    compact: Callable[[Tensor, TriePlan], Tensor]


@cache
def _row_moves(device_type: str) -> _RowMoves:
    """On CUDA our kernels (Q, K and V in one launch) where triton is installed, else PyTorch's."""
    if device_type == "cuda":
        try:
            rows = importlib.import_module("radixmlp.kernels.rows")
            chunks = importlib.import_module("radixmlp.kernels.chunks")
        except ModuleNotFoundError as missing:
            if missing.name != "triton":
                raise
        else:
            return _kernel_moves(rows, chunks)
    return _RowMoves(
        lambda tensors, plan: tuple(x.index_select(0, plan.scatter) for x in tensors),
        lambda x, plan: x.index_select(0, plan.gather),
    )


def _kernel_moves(rows: Any, chunks: Any) -> _RowMoves:
    def expand(tensors: tuple[Tensor, ...], plan: TriePlan) -> tuple[Tensor, ...]:
        return rows.gather_rows_together(tensors, plan.scatter, chunks.scatter_segments(plan))

    def compact(x: Tensor, plan: TriePlan) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return rows.gather_rows(x, plan.gather)
        segments = plan.memo.get("flash.gather_segments")  # for the backward, once for all layers
        if segments is None:
            segments = chunks.Segments.of(plan.gather, plan.num_tokens)
            plan.memo["flash.gather_segments"] = segments
        return rows.gather_rows(x, plan.gather, segments)

    return _RowMoves(expand, compact)
