"""`trie-triton`: attention inside the compact layout in Triton kernels, forward and backward."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from radixmlp.kernels.trie_launch import DTYPES, unsupported_spec
from radixmlp.kernels.trie_tiles import LEAST_SHARED_MEMORY, shared_memory, unsupported_heads
from radixmlp.optimized.attention.interface import refuse_second_derivatives, require_trie_order
from radixmlp.optimized.errors import UnsupportedAttentionError
from radixmlp.reference import AttentionSpec, TriePlan


class TrieTriton:
    """Each node attends to its ancestors and itself; nothing is scattered to the ragged layout.

    float16, bfloat16 and float32 (whose products keep fp32 and use no tensor cores), at the head dimensions of
    `trie_tiles.HEAD_DIMS`; others are refused with those there are. The backward pass is deterministic.
    """

    name = "trie-triton"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        if spec.dropout > 0 and training:
            return "attention dropout draws one mask per row: shared rows would share it; set it to 0 or call eval()"
        if dtype not in DTYPES:
            return f"dtype {dtype} is none of {', '.join(map(str, DTYPES))}: use trie-sdpa"
        return unsupported_spec(spec) or _unsupported_device(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv].

        Raises:
            UnsupportedAttentionError: head dimensions that no kernel is shipped for in this dtype.
            ValueError: a plan in another order, or inputs that do not fit together.
        """
        require_trie_order(plan, self.name)
        reason = unsupported_heads(q.shape[-1], v.shape[-1], q.dtype)
        if reason is not None:
            raise UnsupportedAttentionError(f"{self.name}: {reason}; use trie-sdpa")
        return _TrieAttention.apply(q, k, v, spec.sinks, plan, spec)


def _unsupported_device(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    if device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") == "1":
            return None
        return (
            "Triton runs on a GPU: use trie-sdpa, or set TRITON_INTERPRET=1 to debug the kernels on the CPU"
        )
    if device.type != "cuda":
        return f"device {device} is no CUDA GPU: use trie-sdpa"
    if torch.version.hip is not None:
        return "the kernels are tuned and tested for NVIDIA GPUs only: use trie-sdpa"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"the GPU is sm_{capability[0]}{capability[1]}, the kernels need sm_80 or newer: use trie-sdpa"
    if shared_memory(device) < LEAST_SHARED_MEMORY:
        kib = shared_memory(device) // 1024
        return f"the GPU has {kib} KiB of shared memory a block, the kernels need 163 KiB: use trie-sdpa"
    return None


class _TrieAttention(torch.autograd.Function):
    """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv], sinks [Hq] or None -> [N', Hq, Dv]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: TriePlan, spec: AttentionSpec
    ) -> Tensor:
        from radixmlp.kernels.trie_attention import trie_attention

        out, lse = trie_attention(q, k, v, plan, spec)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.spec = plan, spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        from radixmlp.kernels.trie_attention_backward import trie_attention_backward

        q, k, v, out, lse = ctx.saved_tensors
        return (*trie_attention_backward(grad, q, k, v, out, lse, ctx.plan, ctx.spec), None, None)
