"""`causal_lm_loss`: the next-token loss of a ragged batch, with every shared prefix computed once."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from radixmlp.optimized.training.chunked import Logprobs, WeightedLoss, wide_dtype
from radixmlp.optimized.training.edges import Edges, check_known, edge_weights
from radixmlp.optimized.training.head import head_for
from radixmlp.optimized.training.rows import run_decoder
from radixmlp.reference import RaggedBatch, TriePlan

Reduction = Literal["mean", "sum", "none"]


def causal_lm_loss(
    model: Any,
    batch: RaggedBatch,
    labels: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    *,
    attention: str | None = None,
    plan: TriePlan | None = None,
) -> Tensor:
    """-log p of every token given those before it, as the un-shared batch has it, value and gradients.

    Rows of the decoder and of the head run once per trie node; each edge of the trie then picks its own target and
    weight. The head runs in chunks: the logits of all rows never exist at once.

    Args:
        model: a transformers causal LM (enabled or not), or a wrapper of one (PEFT).
        batch: N tokens in B sequences. The first token of a sequence is never a target.
        labels: [N] int, the target at each token's place (not shifted); -100 leaves it out. The batch's own
            `input_ids` where omitted.
        weights: [B] per sequence (advantages), or [N] per target token; constants: they get no gradient.
        reduction: "mean": the weighted sum over the number of targets; "sum"; "none": [E], weighted, in the batch's
            order.
        attention: a name of `attention_backends()` or "auto" (the default unless `enable` said otherwise).
        plan: the batch's plan in depth-first order, where it was built ahead of time.

    Returns:
        A scalar ([E] for "none"), in fp32 (fp64 for an fp64 model). 0 where no label is left.

    Raises:
        UnsupportedModelError: the model's rows may not be shared; dropout is active in training (sequences that
            share a row would share its mask); a router loss is part of the model's own.
        ValueError: labels or weights of another shape or out of range; an empty batch.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}: expected 'mean', 'sum' or 'none'")
    compact = run_decoder(model, batch, attention, plan)
    edges = Edges.of(batch, compact.plan, labels)
    weight = edge_weights(weights, batch, edges)
    rows = compact.hidden.index_select(0, edges.nodes)
    if weight is None:
        weight = torch.ones(edges.count, dtype=wide_dtype(rows), device=rows.device)
    head = head_for(compact)
    if labels is not None:
        check_known(labels, batch, head.vocabulary)
    if reduction == "none":
        return -Logprobs.apply(rows, head, edges, *head.parameters) * weight.detach()
    total: Tensor = WeightedLoss.apply(rows, head, edges, weight.detach(), *head.parameters)
    return total / max(edges.count, 1) if reduction == "mean" else total
