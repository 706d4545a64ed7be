"""`dense-sdpa`, the baseline, and `scatter-sdpa`, the paper's attention boundary."""

from __future__ import annotations

import torch
from torch import Tensor

from radixmlp.optimized.attention.trie_sdpa import attend_on_plan, unsupported_in_parts
from radixmlp.optimized.attention.varlen import sdpa_varlen
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan


class DenseSdpa:
    """Every token its own row: scaled dot-product attention per sequence."""

    name = "dense-sdpa"
    shares_prefixes = False

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return unsupported_in_parts(spec, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, Dv] -> [N, Hq, Dv]."""
        if plan.num_nodes != plan.num_tokens:
            raise ValueError(
                f"dense-sdpa needs one row per token, got a plan of {plan.num_nodes} rows for "
                f"{plan.num_tokens} tokens: use TriePlan.identity(batch)"
            )
        return _causal(q, k, v, plan, spec)


class ScatterSdpa:
    """arXiv 2601.15013, section 3: scatter Q/K/V to the ragged layout, attend per sequence, gather back."""

    name = "scatter-sdpa"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return unsupported_in_parts(spec, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        ragged_q, ragged_k, ragged_v = (x.index_select(0, plan.scatter) for x in (q, k, v))  # [N, H, D]
        return _causal(ragged_q, ragged_k, ragged_v, ragged_plan(plan), spec).index_select(0, plan.gather)


def _causal(q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
    """Each sequence attends to itself; `plan` is an identity plan.

    On the CPU the products of `trie-sdpa` are faster than PyTorch's fused kernel, and sharing one kernel makes
    a speed-up over this baseline one of sharing alone. Elsewhere, and where SDPA has a kernel, it is SDPA.
    """
    if q.device.type == "cpu" or spec.softcap is not None or spec.sinks is not None:
        return attend_on_plan(q, k, v, plan, spec)
    return sdpa_varlen(q, k, v, sequence_bounds(plan), spec)


def sequence_bounds(plan: TriePlan) -> list[int]:
    """`plan.cu_seqlens` as a list, read from the device once a plan."""
    bounds = plan.memo.get("bounds")
    if bounds is None:
        bounds = plan.memo["bounds"] = plan.cu_seqlens.tolist()
    return bounds


def ragged_plan(plan: TriePlan) -> TriePlan:
    """The identity plan of the batch that `plan` compacts, made once a plan."""
    ragged = plan.memo.get("ragged")
    if ragged is None:
        rows = plan.scatter
        batch = RaggedBatch(plan.input_ids[rows], plan.position_ids[rows], plan.cu_seqlens)
        ragged = plan.memo["ragged"] = TriePlan.identity(batch)
    return ragged
