"""`trie-sdpa`: attention inside the compact layout, forward and backward, by the calls of `schedule.py`.

Parts are computed in matrix products (`partial.py`) and merged by their log-sum-exp in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.attention.interface import refuse_second_derivatives, require_trie_order
from radixmlp.optimized.attention.partial import Mask, part_backward, part_forward
from radixmlp.optimized.attention.products import score_dtype
from radixmlp.optimized.attention.schedule import Call, schedule_of
from radixmlp.reference import AttentionSpec, TriePlan


class TrieSdpa:
    """Each node attends to its ancestors and itself; nothing is scattered to the ragged layout."""

    name = "trie-sdpa"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return unsupported_in_parts(spec, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        require_trie_order(plan, self.name)
        return attend_on_plan(q, k, v, plan, spec)


def unsupported_in_parts(spec: AttentionSpec, dtype: torch.dtype, training: bool) -> str | None:
    """What `attend_on_plan` cannot serve."""
    if spec.dropout > 0 and training:
        return (
            "attention dropout draws one mask per row: shared rows would share it; set it to 0 or call eval()"
        )
    if not dtype.is_floating_point or dtype.itemsize < 2:
        return f"dtype {dtype} is none of float64, float32, float16, bfloat16"
    return None


def attend_on_plan(q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
    """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]; `plan` in depth-first order."""
    q = q.unflatten(1, (k.shape[1], -1))  # [N', Hkv, G, D]
    sinks = None if spec.sinks is None else spec.sinks.view(q.shape[1], q.shape[2])
    out: Tensor = _TrieAttention.apply(q, k, v, sinks, plan, spec)
    return out.flatten(1, 2)


class _TrieAttention(torch.autograd.Function):
    """q [N', Hkv, G, D], k and v [N', Hkv, D], sinks [Hkv, G] or None -> [N', Hkv, G, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: TriePlan, spec: AttentionSpec
    ) -> Tensor:
        out, lse = attend_in_parts(q, k, v, plan, spec)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            out = out * torch.exp(lse - total).unsqueeze(-1)
            lse = total
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.plan, ctx.spec = plan, spec
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        q, k, v, sinks, out, lse = ctx.saved_tensors
        delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [N', Hkv, G]
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        schedule = schedule_of(ctx.plan)
        for call in (*schedule.first, *schedule.merged):
            part = _Part(call, q, k, v, ctx.plan, ctx.spec)
            grads = part.backward(grad, lse, delta)
            for target, rows, panel in zip((dq, dk, dv), part.rows, grads, strict=True):
                rows.add(target, panel)
        dsinks = None
        if sinks is not None:
            dsinks = -(torch.exp(sinks.to(lse.dtype) - lse) * delta).sum(0).to(sinks.dtype)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None


def attend_in_parts(
    q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out [N', Hkv, G, D], log-sum-exp [N', Hkv, G]), sinks not applied.

    `out` is fp32 (fp64) where some row has several merges, so that only the last result is rounded.
    """
    schedule = schedule_of(plan)
    wide = score_dtype(q.dtype)
    dtype = wide if schedule.merges > 1 else q.dtype
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for call in schedule.first:
        _Part(call, q, k, v, plan, spec).write(out, lse)
    for call in schedule.merged:
        _Part(call, q, k, v, plan, spec).merge(out, lse)
    return out, lse


class _Part:
    """One call's panels, in the layouts of `partial.py`; results come back as [n, L, Hkv, G, ...]."""

    def __init__(
        self, call: Call, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec
    ) -> None:
        self.spec = spec
        self.queries = call.queries
        self.rows = (call.queries, call.keys, call.keys)
        self.q = _query_panel(call.queries.take(q))
        self.k, self.v = (call.keys.take(x).transpose(1, 2) for x in (k, v))
        self.mask = _mask(call, plan, spec)

    def write(self, out: Tensor, lse: Tensor) -> None:
        """Write the result into the queries' rows of out [N', Hkv, G, Dv] and lse [N', Hkv, G]."""
        if self.queries.index is None:
            self._run(self.queries.take(out), self.queries.take(lse), merge=False)
            return
        shape = (self.queries.n, self.queries.length)
        part_out, part_lse = (x.new_empty(*shape, *x.shape[1:]) for x in (out, lse))
        self._run(part_out, part_lse, merge=False)
        self.queries.put(out, part_out)
        self.queries.put(lse, part_lse)

    def merge(self, out: Tensor, lse: Tensor) -> None:
        """Merge the result into the queries' rows, which are one slice."""
        self._run(self.queries.take(out), self.queries.take(lse), merge=True)

    def _run(self, out: Tensor, lse: Tensor, merge: bool) -> None:
        out, lse = _query_panel(out), lse.permute(0, 2, 3, 1)
        part_forward(self.q, self.k, self.v, self.mask, self.spec, out, lse, merge)

    def backward(self, grad: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries = self.queries
        grad = _query_panel(queries.without_padding(queries.take(grad)))
        delta = queries.without_padding(queries.take(delta)).permute(0, 2, 3, 1)
        lse = queries.take(lse).permute(0, 2, 3, 1)
        dq, dk, dv = part_backward(grad, self.q, self.k, self.v, delta, lse, self.mask, self.spec)
        return dq.permute(0, 3, 1, 2, 4), dk.transpose(1, 2), dv.transpose(1, 2)


def _query_panel(x: Tensor) -> Tensor:
    """[n, L, Hkv, G, D] -> [n, Hkv, G, L, D]."""
    return x.permute(0, 2, 3, 1, 4)


def _mask(call: Call, plan: TriePlan, spec: AttentionSpec) -> Mask:
    """The call's own mask, cut by the sliding window where some row is deeper than it reaches."""
    window = spec.sliding_window
    visible = None if call.visible is None else call.visible[:, None, None]
    if window is None or window > _deepest(plan):
        return Mask(call.causal, call.lead, visible)
    device = plan.gather.device
    if call.causal:  # a panel's keys are one stretch of path, which ends with its queries, padding after them
        keys = torch.arange(call.keys.length, device=device)
        distance = (keys[: call.queries.length, None] + call.lead - keys)[None]
        near = (distance >= 0) & (distance < window)
    else:
        rows, columns = call.queries.indices(device), call.keys.indices(device)
        near = plan.depth[rows][:, :, None] - plan.depth[columns][:, None, :] < window
    near = near[:, None, None]
    return Mask(visible=near if visible is None else near & visible)


def _deepest(plan: TriePlan) -> int:
    """The largest depth of any row, read from the device once a plan."""
    deepest = plan.memo.get("deepest")
    if deepest is None:
        deepest = plan.memo["deepest"] = int(plan.depth.max()) if plan.num_nodes else 0
    return deepest
