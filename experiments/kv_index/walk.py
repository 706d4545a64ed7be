"""Attention whose K and V stay in the compact layout and are read through an index, one tile at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixmlp import AttentionSpec, TriePlan
from radixmlp.optimized.attention import require_trie_order
from radixmlp.optimized.attention.interface import refuse_second_derivatives
from radixmlp.optimized.attention.partial import Mask, part_backward, part_forward
from radixmlp.optimized.attention.products import score_dtype
from radixmlp.optimized.attention.schedule import segments_of
from radixmlp.optimized.attention.trie_sdpa import unsupported_in_parts

QUERY_ROWS = 256
KEY_ROWS = 256  # of a tile: the only K and V there ever are beside the compact ones


class KvIndex:
    """Each block of query rows walks the index of its path: gather a tile of K and V, attend, merge, forget it."""

    name = "kv-index"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return unsupported_in_parts(spec, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        require_trie_order(plan, self.name)
        q = q.unflatten(1, (k.shape[1], -1))  # [N', Hkv, G, D]
        sinks = None if spec.sinks is None else spec.sinks.view(q.shape[1], q.shape[2])
        out: Tensor = _Walked.apply(q, k, v, sinks, plan, spec)
        return out.flatten(1, 2)


@dataclass(frozen=True)
class Block:
    """Query rows [start, stop), one after the other on one path, and their path's rows.

    Args:
        index: [L] int64, the compact rows of the path from its root to row `stop - 1`: the block table of a paged
            attention with pages of one row.
    """

    start: int
    stop: int
    index: Tensor

    def tiles(self, window: int | None) -> Iterator[tuple[Tensor, Mask]]:
        """(rows [n] of a tile, what of it each query sees), from the root down; none that the window hides."""
        length, rows = self.index.numel(), self.stop - self.start
        depth = torch.arange(length - rows, length, device=self.index.device)  # of the queries
        first = 0 if window is None else max(0, length - rows - window + 1)
        for begin in range(first, length, KEY_ROWS):
            end = min(length, begin + KEY_ROWS)
            if window is None and end <= length - rows:
                yield self.index[begin:end], Mask()
            else:
                distance = depth[:, None] - torch.arange(begin, end, device=depth.device)
                seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
                yield self.index[begin:end], Mask(visible=seen[None, None, None])


def blocks_of(plan: TriePlan) -> list[Block]:
    """The plan's rows in blocks of at most `QUERY_ROWS` of one segment, each with the index of its path."""
    key = "kv-index.blocks"
    if key not in plan.memo:
        plan.memo[key] = list(_blocks(plan))
    return plan.memo[key]  # type: ignore[no-any-return]


def _blocks(plan: TriePlan) -> Iterator[Block]:
    if plan.num_nodes == 0:
        return
    above: list[tuple[int, Tensor]] = []  # (end of subtree, index of the path down to its segment's end)
    for start, stop, end in zip(*segments_of(plan), strict=True):
        while above and above[-1][0] <= start:
            above.pop()
        own = torch.arange(start, stop)
        path = torch.cat([above[-1][1], own]) if above else own
        on_device = path.to(plan.gather.device)
        for first in range(start, stop, QUERY_ROWS):
            last = min(stop, first + QUERY_ROWS)
            yield Block(first, last, on_device[: path.numel() - (stop - last)])
        above.append((end, path))


class _Walked(torch.autograd.Function):
    """q [N', Hkv, G, D], k and v [N', Hkv, D], sinks [Hkv, G] or None -> [N', Hkv, G, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: TriePlan, spec: AttentionSpec
    ) -> Tensor:
        wide = score_dtype(q.dtype)
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
        for block in blocks_of(plan):
            rows = slice(block.start, block.stop)
            part = torch.empty(out[rows].shape, dtype=wide, device=q.device)
            for count, (index, mask) in enumerate(block.tiles(spec.sliding_window)):
                keys, values = _panel(k[index]), _panel(v[index])
                merge = count > 0
                part_forward(
                    _queries(q[rows]), keys, values, mask, spec, _queries(part), _scores(lse[rows]), merge
                )
            if sinks is not None:
                total = torch.logaddexp(lse[rows], sinks.to(wide))
                part *= torch.exp(lse[rows] - total).unsqueeze(-1)
                lse[rows] = total
            out[rows] = part.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.plan, ctx.spec = plan, spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        q, k, v, sinks, out, lse = ctx.saved_tensors
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [N', Hkv, G]
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        for block in blocks_of(ctx.plan):
            rows = slice(block.start, block.stop)
            for index, mask in block.tiles(ctx.spec.sliding_window):
                parts = part_backward(
                    _queries(grad[rows]),
                    _queries(q[rows]),
                    _panel(k[index]),
                    _panel(v[index]),
                    _scores(delta[rows]),
                    _scores(lse[rows]),
                    mask,
                    ctx.spec,
                )
                dq[rows] += parts[0][0].permute(2, 0, 1, 3)
                dk.index_add_(0, index, parts[1][0].transpose(0, 1))
                dv.index_add_(0, index, parts[2][0].transpose(0, 1))
        dsinks = None
        if sinks is not None:
            dsinks = -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(0).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def _queries(x: Tensor) -> Tensor:
    """[L, Hkv, G, D] -> [1, Hkv, G, L, D], a view."""
    return x.permute(1, 2, 0, 3)[None]


def _scores(x: Tensor) -> Tensor:
    """[L, Hkv, G] -> [1, Hkv, G, L], a view."""
    return x.permute(1, 2, 0)[None]


def _panel(x: Tensor) -> Tensor:
    """[L, Hkv, D] -> [1, Hkv, L, D]."""
    return x.transpose(0, 1)[None]
