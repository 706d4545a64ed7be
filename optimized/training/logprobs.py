"""`sequence_logprobs`: the log-probability of every next token, for losses of one's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from radixmlp.optimized.training.chunked import Logprobs
from radixmlp.optimized.training.edges import Edges
from radixmlp.optimized.training.head import head_for
from radixmlp.optimized.training.rows import run_decoder
from radixmlp.reference import RaggedBatch, TriePlan


class SequenceLogprobs(NamedTuple):
    """Log-probabilities, sequence after sequence.

    Args:
        values: [E] fp32 (fp64); of tokens 1 .. n-1 of each sequence of n tokens.
        cu_seqlens: [B+1] int64; sequence b owns values cu_seqlens[b] .. cu_seqlens[b+1]-1.
    """

    values: Tensor
    cu_seqlens: Tensor

    def split(self) -> tuple[Tensor, ...]:
        """One tensor per sequence, in order."""
        return self.values.split(self.cu_seqlens.diff().tolist())


def sequence_logprobs(
    model: Any, batch: RaggedBatch, *, attention: str | None = None, plan: TriePlan | None = None
) -> SequenceLogprobs:
    """log p of every token given those before it: exactly n-1 values for a sequence of n tokens.

    Differentiable: policy-gradient losses are built on the values. The backward runs the head once more instead of
    keeping logits.

    Args:
        model, batch, attention, plan: as for `causal_lm_loss`, whose errors it raises.
    """
    compact = run_decoder(model, batch, attention, plan)
    edges = Edges.of(batch, compact.plan)
    head = head_for(compact)
    rows = compact.hidden.index_select(0, edges.nodes)
    values: Tensor = Logprobs.apply(rows, head, edges, *head.parameters)
    counts = (compact.plan.cu_seqlens.diff().long() - 1).clamp_min(0)
    return SequenceLogprobs(values, torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
