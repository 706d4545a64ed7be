"""`trie-flex`: PyTorch's FlexAttention over the trie, compiled once for all batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from radixmlp.optimized.attention.flex_blocks import BLOCK, Blocks, blocks_of
from radixmlp.optimized.attention.interface import require_trie_order
from radixmlp.optimized.errors import UnsupportedAttentionError
from radixmlp.reference import AttentionSpec, TriePlan

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CUDA_HEAD_DIM = (16, 256)
_VARIANTS = 64  # compilations kept: head counts, head dimensions, dtypes, scales; never N' or N


class TrieFlex:
    """Each node attends to its ancestors and itself in one FlexAttention call; nothing is scattered."""

    name = "trie-flex"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        if spec.dropout > 0 and training:
            return "FlexAttention has no attention dropout: set it to 0 or call eval()"
        if dtype not in _DTYPES:
            return f"FlexAttention has no kernel for dtype {dtype}: use float32, float16 or bfloat16"
        if device.type == "cpu":
            return _unsupported_on_cpu(spec, training)
        if device.type == "cuda":
            return None if importlib.util.find_spec("triton") else "FlexAttention on CUDA needs triton"
        return f"device {device} is neither a CPU nor CUDA"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv].

        Raises:
            ValueError: the plan is not in depth-first order.
            UnsupportedAttentionError: a gradient is wanted on a CPU, or CUDA has no kernel for the head dimension.
        """
        require_trie_order(plan, self.name)
        learned = [x for x in (q, k, v, spec.sinks) if x is not None and x.requires_grad]
        wants_grad = torch.is_grad_enabled() and bool(learned)
        self._check(q, v, spec, wants_grad)
        rows = plan.num_nodes
        if rows == 0:
            return q.new_empty(0, q.shape[1], v.shape[2])
        blocks = blocks_of(plan, spec.sliding_window, wants_grad)
        extra = blocks.end.shape[0] - rows
        heads_first = (pad(x, (0, 0, 0, 0, 0, extra)) if extra else x for x in (q, k, v))
        panels = [x.transpose(0, 1)[None] for x in heads_first]  # [1, H, rows, D]
        out = _run_compiled(panels, blocks, spec, wants_grad)
        return out[0].transpose(0, 1)[:rows]

    def _check(self, q: Tensor, v: Tensor, spec: AttentionSpec, wants_grad: bool) -> None:
        reason = self.unsupported(spec, q.device, q.dtype, wants_grad)
        least, most = _CUDA_HEAD_DIM
        widths = (q.shape[2], v.shape[2])
        if reason is None and q.device.type == "cuda" and not least <= min(widths) <= max(widths) <= most:
            reason = f"head dimensions {widths} are outside {least} .. {most}, what its CUDA kernel takes"
        if reason is not None:
            raise UnsupportedAttentionError(f"{self.name}: {reason}")


def _run_compiled(panels: list[Tensor], blocks: Blocks, spec: AttentionSpec, wants_grad: bool) -> Tensor:
    """panels: q [1, Hq, rows, D], k [1, Hkv, rows, D], v [1, Hkv, rows, Dv] -> [1, Hq, rows, Dv]."""
    from torch._dynamo import config, mark_dynamic

    for panel in panels:
        mark_dynamic(panel, 2)
    by_key = blocks.by_key or (None, None, None, None)
    lookups = (blocks.position, blocks.end, blocks.depth, blocks.reach)
    # A compilation is also for a grad mode: without gradients there shall be one.
    mode = nullcontext() if wants_grad else torch.no_grad()
    with mode, config.patch(recompile_limit=_VARIANTS, specialize_float=True):
        return _compiled()(
            *panels, *lookups, *blocks.by_query, *by_key, spec.sinks, spec.softmax_scale, spec.softcap
        )


@cache
def _compiled() -> Callable[..., Tensor]:
    """`fullgraph`: an uncompiled call would compute N' x N' scores."""
    return torch.compile(_attend, fullgraph=True)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    end: Tensor,
    depth: Tensor | None,
    reach: Tensor | None,
    key_count: Tensor,
    keys: Tensor,
    full_key_count: Tensor,
    full_keys: Tensor,
    query_count: Tensor | None,
    queries: Tensor | None,
    full_query_count: Tensor | None,
    full_queries: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """What is compiled, for any number of rows and blocks; shapes as in `_run_compiled` and `Blocks`."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # Both indices are looked up: compiled for a CPU with dynamic shapes, raw ones lack a C++ name.
        seen = (position[key] <= position[query]) & (position[query] < end[key])
        if depth is not None and reach is not None:
            seen = seen & (depth[query] < reach[key])
        return seen

    mask = BlockMask(
        seq_lengths=(q.shape[2], q.shape[2]),
        kv_num_blocks=key_count,
        kv_indices=keys,
        full_kv_num_blocks=full_key_count,
        full_kv_indices=full_keys,
        q_num_blocks=query_count,
        q_indices=queries,
        full_q_num_blocks=full_query_count,
        full_q_indices=full_queries,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )
    options: dict[str, Any] = {
        "score_mod": None if softcap is None else _capped_at(softcap),
        "block_mask": mask,
        "scale": scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if q.device.type == "cuda":
        # The kernel for decoding is chosen by the number of queries: a guard on N'.
        options["kernel_options"] = {"FORCE_USE_FLEX_ATTENTION": True}
    if sinks is None:
        return flex_attention(q, k, v, **options)
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    weight = torch.sigmoid(aux.lse - sinks.to(aux.lse.dtype)[:, None])  # of everything but the sink
    return (out * weight[..., None]).to(q.dtype)


def _capped_at(softcap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, *_where: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _unsupported_on_cpu(spec: AttentionSpec, training: bool) -> str | None:
    if training:
        return "FlexAttention has no backward on a CPU: use trie-sdpa, or torch.no_grad()"
    if spec.sinks is not None:
        return "FlexAttention returns no log-sum-exp on a CPU, which attention sinks need: use trie-sdpa"
    if not torch.cpu._is_avx2_supported():
        return "FlexAttention on a CPU needs AVX2"
    return _without_compiler()


@cache
def _without_compiler() -> str | None:
    """The reason nothing can be compiled for this CPU, or None."""
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception as error:  # its class moved between versions of PyTorch
        return f"FlexAttention on a CPU needs a C++ compiler (g++, or CXX): {type(error).__name__}: {error}"
    return None
