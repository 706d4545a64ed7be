"""Next tokens live on edges: a node where sequences part has several, and each has its own target and weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch, TriePlan

IGNORED = -100  # the label that transformers and PyTorch leave out of a loss


@dataclass(frozen=True, eq=False)
class Edges:
    """The next-token predictions of a ragged batch, in its order; a sequence of n tokens has n-1 of them.

    Args:
        nodes: [R] int64 compact rows that predict something, ascending.
        source: [E] int64, the entry of `nodes` each prediction is made from.
        target: [E] int64 token ids.
        place: [E] int64, the ragged row of the predicted token.
    """

    nodes: Tensor
    source: Tensor
    target: Tensor
    place: Tensor

    @classmethod
    def of(cls, batch: RaggedBatch, plan: TriePlan, labels: Tensor | None = None) -> Edges:
        """All edges, or those whose label is not -100.

        Args:
            labels: [N] the target of each token's row, the model's own input ids where omitted. That of a
                sequence's first token is never read: nothing predicts it.

        Raises:
            ValueError: labels of another shape, or below 0 and not -100; names the row and the offset.
        """
        device = plan.scatter.device
        ids = batch.input_ids.to(device)
        targets = ids.long() if labels is None else check_labels(labels, batch).to(device).long()
        place = torch.ones(ids.shape[0], dtype=torch.bool, device=device)
        starts, lengths = plan.cu_seqlens[:-1].long(), plan.cu_seqlens.diff()
        place[starts[lengths > 0]] = False
        place &= targets != IGNORED
        rows = place.nonzero()[:, 0]
        nodes, source = plan.scatter[rows - 1].long().unique(return_inverse=True)
        return cls(nodes, source, targets[rows], rows)

    @property
    def count(self) -> int:
        """E."""
        return self.source.shape[0]

    def by_chunk(self, size: int) -> list[tuple[slice, Tensor]]:
        """For each run of at most `size` entries of `nodes`, equal in length but for the last: the run, and the edges
        that start in it."""
        rows = self.nodes.shape[0]
        if rows == 0:
            return []
        size = math.ceil(rows / math.ceil(rows / size))
        order = self.source.argsort(stable=True)
        starts = torch.arange(0, rows + size, size, device=order.device)
        bounds = torch.searchsorted(self.source[order], starts).tolist()
        runs = [slice(a, min(a + size, rows)) for a in range(0, rows, size)]
        return [(run, order[bounds[i] : bounds[i + 1]]) for i, run in enumerate(runs)]


def check_labels(labels: Tensor, batch: RaggedBatch) -> Tensor:
    """`labels` if they are [N] integers, each -100 or a token id.

    Raises:
        ValueError: names the row, the offset and the value.
    """
    if labels.shape != batch.input_ids.shape or labels.is_floating_point():
        raise ValueError(
            f"labels have shape {tuple(labels.shape)} and dtype {labels.dtype}, but the batch has {batch.num_tokens} "
            "tokens: give one integer per token, sequence after sequence"
        )
    _refuse((labels < 0) & (labels != IGNORED), labels, batch, "expected a token id or -100")
    return labels


def check_known(labels: Tensor, batch: RaggedBatch, vocabulary: int) -> None:
    """Refuse labels the head has no logit for.

    Raises:
        ValueError: names the row, the offset and the value.
    """
    _refuse(labels >= vocabulary, labels, batch, f"the head has {vocabulary} logits")


def _refuse(wrong: Tensor, labels: Tensor, batch: RaggedBatch, why: str) -> None:
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        row = int(torch.searchsorted(batch.cu_seqlens[1:].contiguous().cpu(), index, right=True))
        offset = index - int(batch.cu_seqlens[row])
        raise ValueError(f"labels row {row}, offset {offset} is {int(labels[index])}: {why}")


def edge_weights(weights: Tensor | None, batch: RaggedBatch, edges: Edges) -> Tensor | None:
    """[E] weights from one per sequence [B] or one per token [N] (of the predicted token).

    Raises:
        ValueError: another shape, or integers.
    """
    if weights is None:
        return None
    weights = weights.to(edges.place.device)
    if not weights.is_floating_point() or weights.shape not in ((batch.num_sequences,), (batch.num_tokens,)):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)} and dtype {weights.dtype}: expected floating point, one per "
            f"sequence [{batch.num_sequences}] or one per token [{batch.num_tokens}]"
        )
    if weights.shape[0] == batch.num_tokens and batch.num_tokens != batch.num_sequences:
        return weights[edges.place]
    ends = batch.cu_seqlens[1:].to(edges.place.device).contiguous()
    return weights[torch.searchsorted(ends, edges.place, right=True)]
