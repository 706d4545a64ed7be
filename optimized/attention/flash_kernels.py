"""FlashAttention over sequences laid end to end: PyTorch's own kernel, or the `flash-attn` package's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from radixmlp.reference import AttentionSpec

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, int, AttentionSpec, bool], tuple[Tensor, Tensor | None]]

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256
_LEAST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class VarlenKernel:
    """A causal attention kernel for the ragged layout.

    Args:
        name: for error messages.
        attend: (q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D], cu_seqlens [B+1] int32, longest sequence, spec, whether
            the log-sum-exp is wanted) -> (out [N, Hq, D], log-sum-exp [N, Hq] fp32 or None). Scale, window and
            softcap are applied; sinks are not, and no gradient flows through the log-sum-exp.
        softcap: whether `attend` knows soft-capped scores.
        device_type: where it runs.
    """

    name: str
    attend: Attend
    softcap: bool
    device_type: str = "cuda"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason the kernel cannot serve such a layer, or None."""
        if device.type != self.device_type:
            return f"{self.name} runs on {self.device_type.upper()} alone, the layer is on {device}"
        if dtype not in _DTYPES:
            return f"{self.name} computes in float16 and bfloat16, not in {dtype}"
        if spec.dropout > 0 and training:
            return "attention dropout draws one mask per row: set it to 0 or call eval()"
        if spec.softcap is not None and not self.softcap:
            return f"{self.name} has no logit softcap: install flash-attn, or use another backend"
        if spec.sinks is not None and training:
            return f"{self.name} passes no gradient through its log-sum-exp, which attention sinks need"
        return self._unsupported_device(device)

    def unsupported_widths(self, head_dim: int, value_dim: int) -> str | None:
        """The reason the kernel cannot serve such head dimensions, or None."""
        if head_dim != value_dim:
            return (
                f"{self.name} needs values as wide as keys: head_dim is {head_dim}, values have {value_dim}"
            )
        if head_dim % 8 or not 8 <= head_dim <= _LARGEST_HEAD_DIM:
            return f"{self.name} takes multiples of 8 up to {_LARGEST_HEAD_DIM}, head_dim is {head_dim}"
        return None

    def _unsupported_device(self, device: torch.device) -> str | None:
        if self.device_type != "cuda":
            return None
        if not torch.cuda.is_available():
            return f"{self.name} needs CUDA, and PyTorch finds no CUDA device here"
        capability = torch.cuda.get_device_capability(device)
        if capability < _LEAST_CAPABILITY:
            return f"{self.name} needs compute capability 8.0 or more, {device} has {'.'.join(map(str, capability))}"
        return None


@cache
def installed_kernel() -> VarlenKernel | str:
    """The `flash-attn` package's kernel where it can be imported, else PyTorch's own; or why there is neither."""
    if importlib.util.find_spec("flash_attn") is not None:
        try:
            return package_kernel(importlib.import_module("flash_attn").flash_attn_varlen_func)
        except (ImportError, OSError, AttributeError):  # built for another PyTorch, or too old
            pass
    try:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn
    except ImportError as error:
        return f"this PyTorch has no torch.nn.attention.varlen ({error}): use 2.11 or newer, or install flash-attn"
    if "window_size" not in inspect.signature(varlen_attn).parameters:
        return "this PyTorch's varlen_attn takes no window_size: use 2.11 or newer, or install flash-attn"
    return torch_kernel(varlen_attn, AuxRequest(lse=True))


def torch_kernel(varlen_attn: Callable[..., Any], request_lse: Any) -> VarlenKernel:
    """`torch.nn.attention.varlen.varlen_attn` as a `VarlenKernel`.

    It is causal where `window_size` is (-1, 0), and (left, 0) sees `left` tokens before its own. Newer versions want
    to be told of grouped queries, older ones have no such argument and take them as they are.
    """
    has_gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, spec: AttentionSpec, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        kwargs: dict[str, Any] = {
            "scale": spec.softmax_scale,
            "window_size": (_tokens_before(spec, longest), 0),
        }
        if has_gqa:
            kwargs["enable_gqa"] = q.shape[1] != k.shape[1]
        if not with_lse:
            return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **kwargs), None
        kwargs["return_aux"] = request_lse
        rows = q.shape[0]
        q, k, v, cu_seqlens = _not_square(q, k, v, cu_seqlens)
        out, lse = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **kwargs)
        return out[:rows], _rows_first(lse, q)[:rows]

    return VarlenKernel("torch.nn.attention.varlen", attend, softcap=False)


def package_kernel(flash_attn_varlen_func: Callable[..., Any]) -> VarlenKernel:
    """`flash_attn.flash_attn_varlen_func` as a `VarlenKernel`; it takes grouped queries as they are."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, spec: AttentionSpec, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        before, rows = _tokens_before(spec, longest), q.shape[0]
        if with_lse:
            q, k, v, cu_seqlens = _not_square(q, k, v, cu_seqlens)
        result = flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            softmax_scale=spec.softmax_scale,
            causal=True,
            window_size=(-1, -1) if before < 0 else (before, 0),
            softcap=spec.softcap or 0.0,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            return_attn_probs=with_lse,
        )
        return (result[0][:rows], _rows_first(result[1], q)[:rows]) if with_lse else (result, None)

    return VarlenKernel("flash-attn", attend, softcap=True)


def _tokens_before(spec: AttentionSpec, longest: int) -> int:
    """Tokens a query sees before its own; -1: all, also where the window is as long as the longest sequence."""
    window = spec.sliding_window
    return -1 if window is None or window >= longest else window - 1


def _not_square(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with one more sequence, of one token, where there are as many rows as heads: else nothing would tell
    which way round a log-sum-exp of them is."""
    if q.shape[0] != q.shape[1]:
        return q, k, v, cu_seqlens
    q, k, v = (torch.cat([x, x[:1]]) for x in (q, k, v))
    return q, k, v, torch.cat([cu_seqlens, cu_seqlens[-1:] + 1])


def _rows_first(lse: Tensor, q: Tensor) -> Tensor:
    """The kernels return [Hq, N] (and PyTorch's documentation says [N, Hq]) -> [N, Hq]."""
    rows, heads = q.shape[:2]
    if lse.shape == (heads, rows):
        return lse.T
    if lse.shape == (rows, heads):
        return lse
    raise RuntimeError(
        f"a log-sum-exp of shape {tuple(lse.shape)} is neither [Hq, N] nor [N, Hq], {heads}, {rows}"
    )
