"""Log-probabilities of next tokens, chunk by chunk of rows: a loss with its gradient, and single values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.attention.interface import refuse_second_derivatives
from radixmlp.optimized.training.edges import Edges
from radixmlp.optimized.training.head import ChunkedHead

_BLOCK = 4096  # rows of a weight's gradient at a time


class WeightedLoss(torch.autograd.Function):
    """Sum over edges of weight * -log p(target).

    The gradient is computed along with the value, from the same logits: the head's three products run once.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, head: ChunkedHead, edges: Edges, weights: Tensor, *parameters: Tensor
    ) -> Tensor:
        """rows [R, d] of `edges.nodes`, weights [E] -> scalar in at least fp32."""
        needed = any(ctx.needs_input_grad)
        gradients = head.gradients() if needed else []
        grad_rows = torch.empty_like(rows) if needed else None
        total = torch.zeros((), dtype=wide_dtype(rows), device=rows.device)
        for run, members in edges.by_chunk(head.chunk):
            source, target = edges.source[members] - run.start, edges.target[members]
            weight = weights[members].to(total.dtype)
            if grad_rows is None:
                total -= (weight * _picked(head.logits(rows[run]), source, target)).sum()
                continue
            logits, pull = head.with_pull(rows[run], gradients)
            logprobs, grad = _picked_with_gradient(logits, source, target, -weight, head.fresh)
            total -= (weight * logprobs).sum()
            del logits
            grad_rows[run] = pull(grad)
        ctx.save_for_backward(grad_rows, *gradients)
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """The stored gradients times that of the loss."""
        refuse_second_derivatives()
        grad_rows, *gradients = ctx.saved_tensors
        scaled = [_scaled(g, upstream, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (grad_rows * upstream.to(grad_rows.dtype), None, None, None, *scaled)


class Logprobs(torch.autograd.Function):
    """log p(target) of every edge; the backward runs the head again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: ChunkedHead, edges: Edges, *parameters: Tensor) -> Tensor:
        """rows [R, d] of `edges.nodes` -> [E] in at least fp32."""
        out = torch.empty(edges.count, dtype=wide_dtype(rows), device=rows.device)
        for run, members in edges.by_chunk(head.chunk):
            source, target = edges.source[members] - run.start, edges.target[members]
            out[members] = _picked(head.logits(rows[run]), source, target)
        ctx.save_for_backward(rows)
        ctx.head, ctx.edges, ctx.dtypes = head, edges, [parameter.dtype for parameter in parameters]
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """upstream [E]."""
        refuse_second_derivatives()
        (rows,) = ctx.saved_tensors
        gradients, grad_rows = ctx.head.gradients(), torch.empty_like(rows)
        for run, members in ctx.edges.by_chunk(ctx.head.chunk):
            source, target = ctx.edges.source[members] - run.start, ctx.edges.target[members]
            logits, pull = ctx.head.with_pull(rows[run], gradients)
            _, grad = _picked_with_gradient(logits, source, target, upstream[members], ctx.head.fresh)
            del logits
            grad_rows[run] = pull(grad)
        scaled = [g.to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)]
        return (grad_rows, None, None, *scaled)


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp64 for fp64, else fp32: what softmaxes are taken in."""
    return torch.promote_types(x.dtype, torch.float32)


def _picked(logits: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """[e] log p(target) of rows `source` of logits [C, V]."""
    wide = logits.to(wide_dtype(logits))
    return wide[source, target] - wide.logsumexp(-1)[source]


def _picked_with_gradient(
    logits: Tensor, source: Tensor, target: Tensor, upstream: Tensor, fresh: bool
) -> tuple[Tensor, Tensor]:
    """`_picked`, and the gradient [C, V] of sum(upstream * picked): upstream at the targets, minus their row's sum
    times the softmax. One exponential, in place: in the logits' own memory where they are `fresh`.
    """
    wide = logits.to(wide_dtype(logits))
    chosen = wide[source, target]
    top = wide.amax(-1)
    grad = (wide.sub_(top[:, None]) if fresh or wide is not logits else wide - top[:, None]).exp_()
    total = grad.sum(-1)
    picked = chosen - (top + total.log())[source]
    of_row = torch.zeros_like(top).index_add_(0, source, upstream.to(top.dtype))
    grad.mul_((-of_row / total)[:, None])
    grad.index_put_((source, target), upstream.to(top.dtype), accumulate=True)
    return picked, grad


def _scaled(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient * upstream in `dtype`, without a whole copy of it in between."""
    out = torch.empty_like(gradient, dtype=dtype)
    for start in range(0, gradient.shape[0], _BLOCK):
        block = slice(start, start + _BLOCK)
        torch.mul(gradient[block], upstream, out=out[block])
    return out
