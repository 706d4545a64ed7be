"""Causal attention, on the ragged layout and on the trie, one path at a time, in the dtype it is given.

Shapes: q [rows, Hq, D], k [rows, Hkv, D], v [rows, Hkv, Dv]; query head h reads KV head h // (Hq // Hkv).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from radixmlp.reference.plan import AttentionSpec, TriePlan

_MEMO_KEY = "reference.attention.leaf_paths"


def causal_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, spec: AttentionSpec) -> Tensor:
    """Each token attends to itself and the tokens before it in its own sequence.

    Args:
        q, k, v: ragged layout, N rows.
        cu_seqlens: [B+1] bounds of the sequences.
        spec: scale, window, softcap and sinks; dropout must be 0.

    Returns:
        [N, Hq, Dv] in the dtype of q.

    Raises:
        ValueError: shapes that do not fit together, or a spec this reference does not compute.
    """
    _check(q, k, v, int(cu_seqlens[-1]), spec)
    bounds = pairwise([0, *cu_seqlens.tolist()])  # the empty first piece serves the batch without sequences
    return torch.cat([_attend(q[a:b], k[a:b], v[a:b], spec) for a, b in bounds])


def trie_attention(q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
    """Each node attends to itself and its ancestors: what its tokens see in every sequence that holds them.

    Takes the root-to-leaf paths in turn and computes the nodes at the end of a path that no earlier path
    held. Needs `plan.parent` alone, so both orders serve.

    Args:
        q, k, v: compact layout, N' rows.
        plan: the trie.
        spec: as in `causal_attention`; the window counts nodes along the path.

    Returns:
        [N', Hq, Dv] in the dtype of q.

    Raises:
        ValueError: as `causal_attention`.
    """
    _check(q, k, v, plan.num_nodes, spec)
    paths = [(plan.parent.new_zeros(0), 0), *leaf_paths(plan)]  # the empty one serves the empty trie
    pieces = [_attend(q[path[new:]], k[path], v[path], spec) for path, new in paths]
    rows = torch.cat([path[new:] for path, new in paths])
    return torch.cat(pieces)[rows.argsort()]


def leaf_paths(plan: TriePlan) -> list[tuple[Tensor, int]]:
    """Each root-to-leaf path as (compact rows, how many of them an earlier path already held)."""
    if _MEMO_KEY not in plan.memo:
        parent = plan.parent.tolist()
        inner = set(parent)
        seen: set[int] = set()
        paths = []
        for leaf in range(len(parent)):
            if leaf in inner:
                continue
            path = []
            node = leaf
            while node >= 0:
                path.append(node)
                node = parent[node]
            path.reverse()
            shared = sum(node in seen for node in path)
            seen.update(path)
            paths.append((torch.tensor(path, dtype=plan.parent.dtype, device=plan.parent.device), shared))
        plan.memo[_MEMO_KEY] = paths
    return plan.memo[_MEMO_KEY]


def _attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention along one path: k, v hold its m rows, q its last n <= m rows -> [n, Hq, Dv]."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)

    depth = torch.arange(m, device=q.device)
    distance = depth[m - n :, None] - depth  # [n, m] along the path
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))

    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype)[:, None, None].expand(-1, n, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    at_least_float32 = torch.promote_types(q.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=at_least_float32).to(q.dtype)[..., :m]
    return torch.einsum("hqk,khd->qhd", weights, v)


def _check(q: Tensor, k: Tensor, v: Tensor, rows: int, spec: AttentionSpec) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != rows:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected [{rows}, heads, head_dim]")
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q, k, v have {q.shape[1]}, {k.shape[1]}, {v.shape[1]} heads: k and v need equally many, "
            f"and q a multiple of that"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]}, but k has {k.shape[2]}")
    if spec.dropout > 0:
        raise ValueError(f"dropout is {spec.dropout}: the reference computes no dropout, set it to 0")
    if spec.sliding_window is not None and spec.sliding_window < 1:
        raise ValueError(
            f"sliding_window is {spec.sliding_window}: a query sees itself, so at least 1 (or None)"
        )
    if spec.softcap is not None and spec.softcap <= 0:
        raise ValueError(f"softcap is {spec.softcap}: expected a positive number (or None)")
    if spec.sinks is not None and spec.sinks.shape != (q.shape[1],):
        raise ValueError(
            f"sinks have shape {tuple(spec.sinks.shape)}: expected one per query head, {q.shape[1]}"
        )
