"""Attention over a part of the keys, in matrix products, with its log-sum-exp; forward and backward.

A softmax over the union of disjoint key sets is the log-sum-exp-weighted mean of the softmaxes over each. The
gradient of a part needs only the merged output and the log-sum-exp over *all* keys.

Queries go in chunks whose scores stay in cache, with the G query heads of a KV head folded into rows, so that
every product is a large one. A causal chunk stops at its last visible key. Panels are [n, Hkv, G, L, D] for
queries and [n, Hkv, L, D] for keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.optimized.attention.products import Products, score_dtype
from radixmlp.reference import AttentionSpec

_CHUNK_SCORES = 1 << 20  # scores alive at once
_PRODUCT_ROWS = 128  # rows of a matrix product below which it slows down
_CAUSAL_ROWS = 64  # of a causal chunk: half of them is the mean number of masked scores a row computes
_WHOLE_CHAIN = 128  # so short a chain is one chunk: its masked half costs less than another round of calls


@dataclass(frozen=True)
class Mask:
    """`causal`: query i sees keys 0 .. lead + i. `visible`: [n or 1, 1, 1, Lq, Lk] bool; never both."""

    causal: bool = False
    lead: int = 0
    visible: Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """What one round multiplies: panels of queries, rows of them, and the keys they may see."""

    panels: slice
    rows: slice
    keys: slice


def part_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    spec: AttentionSpec,
    out: Tensor,
    lse: Tensor,
    merge: bool,
) -> None:
    """Softmax over these keys, its value and its log-sum-exp, written to `out` and `lse` or merged into them.

    Args:
        q: [n, Hkv, G, Lq, D].
        k: [n, Hkv, Lk, D].
        v: [n, Hkv, Lk, Dv].
        mask: what each query sees.
        spec: `softmax_scale` and `softcap` are applied; windows are in the mask, sinks come last.
        out: [n, Hkv, G, Lq, Dv].
        lse: [n, Hkv, G, Lq] in `score_dtype`. A row that sees nothing has the lowest finite number: weight 0.
        merge: `out` and `lse` hold a part over other keys; both are updated to the softmax over the union.
    """
    group = q.shape[2]
    flat_k, flat_v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))  # [n * Hkv, Lk, D]
    heads = k.shape[1]
    products = Products(q)
    for chunk in chunks(q, k, mask):
        here = (chunk.panels, slice(None), slice(None), chunk.rows)
        batch = slice(chunk.panels.start * heads, chunk.panels.stop * heads)
        keys, values = (x[batch, chunk.keys].contiguous() for x in (flat_k, flat_v))
        rows = q[here].reshape(keys.shape[0], -1, q.shape[-1])  # [n * Hkv, G * L, D]
        s = _cap_(products.scores(rows, keys, spec.softmax_scale), spec)
        _hide_(s.view(-1, heads, group, *_lengths(chunk)), mask, chunk)
        p = products.softmax(s)
        # The largest weight of a softmax is 1 / sum(exp(s - max)): no second pass of exponentials.
        part_lse = s.amax(-1).sub_(p.amax(-1).log_()).view(lse[here].shape)
        part_out = products.values(p, values).view(out[here].shape)
        if merge:
            _merge_(out[here], lse[here], part_out, part_lse)
        else:
            out[here], lse[here] = part_out, part_lse


def _merge_(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """The log-sum-exp-weighted mean of two parts, in the log-sum-exps' dtype, into the first."""
    weight = torch.sigmoid(part_lse - lse).unsqueeze(-1)
    step = part_out.to(lse.dtype, copy=True).sub_(out).mul_(weight)
    out += step
    lse.copy_(torch.logaddexp(lse, part_lse))


def part_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    lse: Tensor,
    mask: Mask,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from one part, in `score_dtype`.

    Args:
        grad: [n, Hkv, G, Lq, Dv], of the merged output; zero at padding.
        q, k, v, mask, spec: as in `part_forward`.
        delta: [n, Hkv, G, Lq], sum over Dv of grad * merged output.
        lse: [n, Hkv, G, Lq], over all keys (and sinks).
    """
    dtype = score_dtype(q.dtype)
    dq = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dk = torch.zeros(k.shape, dtype=dtype, device=k.device)
    dv = torch.zeros(v.shape, dtype=dtype, device=v.device)
    wide_k, wide_v = k.to(dtype).contiguous(), v.to(dtype).contiguous()
    for chunk in chunks(q, k, mask):
        here = (chunk.panels, slice(None), slice(None), chunk.rows)
        there = (chunk.panels, slice(None), chunk.keys)
        wide_q, wide_grad = _fold(q[here].to(dtype)), _fold(grad[here].to(dtype))
        s = torch.matmul(wide_q, wide_k[there].transpose(-1, -2)).mul_(spec.softmax_scale)
        s = _cap_(s.unflatten(2, (q.shape[2], -1)), spec)
        slope = None if spec.softcap is None else 1 - (s / spec.softcap).square_()
        _hide_(s, mask, chunk)
        p = s.sub_(lse[here].unsqueeze(-1)).exp_()
        ds = torch.matmul(wide_grad, wide_v[there].transpose(-1, -2)).view_as(p)
        ds = ds.sub_(delta[here].unsqueeze(-1)).mul_(p).mul_(spec.softmax_scale)
        if slope is not None:
            ds = ds.mul_(slope)
        p, ds = p.flatten(2, 3), ds.flatten(2, 3)
        dv[there] += torch.matmul(p.transpose(-1, -2), wide_grad)
        dk[there] += torch.matmul(ds.transpose(-1, -2), wide_q)
        dq[here] = torch.matmul(ds, wide_k[there]).unflatten(2, (q.shape[2], -1))
    return dq, dk, dv


def chunks(q: Tensor, k: Tensor, mask: Mask) -> Iterator[Chunk]:
    """Panels and rows at a time, so that a chunk's scores number about `_CHUNK_SCORES`."""
    n, heads, group, length, _ = q.shape
    keys = k.shape[2]
    row_scores = heads * group * keys
    rows = min(length, max(-(-_PRODUCT_ROWS // group), _CHUNK_SCORES // row_scores))
    if mask.causal and length > _WHOLE_CHAIN:
        rows = min(rows, _CAUSAL_ROWS)
    panels = min(n, max(1, _CHUNK_SCORES // (row_scores * rows)))
    for first in range(0, n, panels):
        for start in range(0, length, rows):
            stop = min(length, start + rows)
            seen = mask.lead + stop if mask.causal else keys
            yield Chunk(slice(first, min(n, first + panels)), slice(start, stop), slice(0, seen))


def _lengths(chunk: Chunk) -> tuple[int, int]:
    return chunk.rows.stop - chunk.rows.start, chunk.keys.stop - chunk.keys.start


def _fold(x: Tensor) -> Tensor:
    """[n, Hkv, G, L, D] -> [n, Hkv, G * L, D]."""
    return x.flatten(2, 3)


def _cap_(s: Tensor, spec: AttentionSpec) -> Tensor:
    return s if spec.softcap is None else s.div_(spec.softcap).tanh_().mul_(spec.softcap)


def _hide_(s: Tensor, mask: Mask, chunk: Chunk) -> None:
    """Overwrite invisible scores [n, Hkv, G, rows, keys] with the lowest finite number.

    Its weight is exactly 0 beside any visible key, and no NaN arises where there is none.
    """
    lowest = torch.finfo(s.dtype).min
    if mask.causal:
        rows = chunk.rows.stop - chunk.rows.start
        future = torch.ones(rows, rows, dtype=torch.bool, device=s.device).triu_(1)
        s[..., mask.lead + chunk.rows.start :].masked_fill_(future, lowest)
    elif mask.visible is not None:
        visible = mask.visible if mask.visible.shape[0] == 1 else mask.visible[chunk.panels]
        s.masked_fill_(~visible[..., chunk.rows, chunk.keys], lowest)
