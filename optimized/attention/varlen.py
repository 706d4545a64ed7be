"""Causal attention over a ragged batch with `scaled_dot_product_attention`: equal lengths go in one call."""

from __future__ import annotations

from itertools import groupby, pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from radixmlp.reference import AttentionSpec


def sdpa_varlen(q: Tensor, k: Tensor, v: Tensor, bounds: list[int], spec: AttentionSpec) -> Tensor:
    """Each sequence attends to itself, causally, within the sliding window if there is one.

    Args:
        q: [N, Hq, D].
        k: [N, Hkv, D].
        v: [N, Hkv, Dv].
        bounds: `cu_seqlens` as a list of B+1 ints.
        spec: without softcap and sinks, for which SDPA has no kernel.

    Returns:
        [N, Hq, Dv].
    """
    parts = []
    start = 0
    for length, run in groupby(end - begin for begin, end in pairwise(bounds)):
        count = sum(1 for _ in run)
        stop = start + count * length
        if length:
            panels = (x[start:stop].unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))
            parts.append(_causal_panels(*panels, spec=spec).transpose(1, 2).flatten(0, 1))
        start = stop
    if not parts:
        return q.new_zeros(0, q.shape[1], v.shape[2])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _causal_panels(q: Tensor, k: Tensor, v: Tensor, *, spec: AttentionSpec) -> Tensor:
    """q [n, Hq, L, D], k [n, Hkv, L, D], v [n, Hkv, L, Dv] -> [n, Hq, L, Dv]."""
    length, window = q.shape[2], spec.sliding_window
    mask = None
    if window is not None and window < length:
        index = torch.arange(length, device=q.device)
        distance = index[:, None] - index
        mask = (distance >= 0) & (distance < window)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=spec.softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
