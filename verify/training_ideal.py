"""The ideal speed-up of a training step: FLOPs of the dense step for each one of the step on the trie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify.ideal import DecoderShape, ideal_speedup

STEP = 3  # each product of the forward has two in the backward: of its input's gradient, of its weight's


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of forward and backward, and the rows each path computes.

    Args:
        dense, trie: of all layers, and of the head on the rows that predict a target.
        dense_rows, trie_rows: of the decoder.
        dense_logits, trie_logits: rows of the head.
    """

    dense: int
    trie: int
    dense_rows: int
    trie_rows: int
    dense_logits: int
    trie_logits: int

    @property
    def speedup(self) -> float:
        """FLOPs of dense / FLOPs of the trie; 1.0 where nothing is computed."""
        return self.dense / self.trie if self.trie else 1.0


def step_flops(
    shape: DecoderShape, batch: RaggedBatch, plan: TriePlan, labels: Tensor | None = None
) -> StepFlops:
    """Count the matrix products of one step with every weight trained.

    Recomputation is not counted: attention's backward has four products beside the forward's two. Dense is dense at
    its best: its head runs on the rows that predict a target, no others.

    Args:
        shape: the decoder.
        batch: N tokens.
        plan: one that compacts it, N' nodes, in any order (of the whole trie, or of a part of its sharing).
        labels: [N], -100 leaves a target out; all tokens but each sequence's first are targets where omitted.
    """
    forward = ideal_speedup(shape, batch, plan)
    sources = _source_rows(batch, labels)
    nodes = plan.scatter.long()[sources].unique().numel()
    return StepFlops(
        dense=STEP * (forward.dense + sources.numel() * shape.flops_per_logits_row),
        trie=STEP * (forward.trie + nodes * shape.flops_per_logits_row),
        dense_rows=plan.num_tokens,
        trie_rows=plan.num_nodes,
        dense_logits=sources.numel(),
        trie_logits=nodes,
    )


def _source_rows(batch: RaggedBatch, labels: Tensor | None) -> Tensor:
    """Ragged rows that predict a target: those before a token that is one."""
    target = torch.ones(batch.num_tokens, dtype=torch.bool) if labels is None else labels != -100
    starts = batch.cu_seqlens[:-1].long()
    target = target.clone()
    target[starts[batch.lengths > 0]] = False
    return target.nonzero()[:, 0] - 1
