"""`TriePlan`, the index maps between a ragged batch and its prefix trie, and `AttentionSpec`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from radixmlp.reference.ragged import RaggedBatch

Order = Literal["trie", "input"]


@dataclass(frozen=True, eq=False)
class TriePlan:
    """A batch's prefix trie as index maps (arXiv 2601.15013, section 3).

    Two tokens share a row iff their whole paths of (token id, position id) from the start of their sequences
    (and their sequences' sharing keys) are equal.

    Args:
        gather: [N'] int32, compact row -> first ragged row that maps to it.
        scatter: [N] int32, ragged row -> compact row.
        parent: [N'] int32, compact row of the parent, -1 at a root.
        subtree_end: [N'] int32, one past the largest compact row in the subtree of each node. In
            `order="trie"` the descendants of node i are exactly i+1 .. subtree_end[i]-1, so that query q sees
            key k iff k <= q < subtree_end[k]; in `order="input"` that range holds other nodes too.
        input_ids, position_ids: [N'], the compact rows' values.
        cu_seqlens: [B+1] int32 of the ragged batch.
        order: "trie" is depth-first, siblings in order of first occurrence; "input" is order of first
            occurrence, as the published Rust package numbers nodes.
    """

    gather: Tensor
    scatter: Tensor
    parent: Tensor
    subtree_end: Tensor
    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    order: Order = "trie"
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)  # what backends derive from the plan, once

    @classmethod
    def identity(cls, batch: RaggedBatch) -> TriePlan:
        """The plan that shares nothing: one node per token, each sequence a chain. The dense baseline."""
        rows = torch.arange(batch.num_tokens, dtype=torch.int32, device=batch.input_ids.device)
        lengths = batch.lengths
        starts = batch.cu_seqlens[:-1].repeat_interleave(lengths)
        ends = batch.cu_seqlens[1:].repeat_interleave(lengths)
        parent = torch.where(rows == starts, torch.full_like(rows, -1), rows - 1)
        return cls(rows, rows, parent, ends, batch.input_ids, batch.position_ids, batch.cu_seqlens, "trie")

    @property
    def num_tokens(self) -> int:
        """N, rows of the ragged batch."""
        return self.scatter.shape[0]

    @property
    def num_nodes(self) -> int:
        """N', rows of the trie."""
        return self.gather.shape[0]

    @property
    def gamma(self) -> float:
        """N'/N, the share of rows left to compute (1.0 for an empty batch)."""
        return self.num_nodes / self.num_tokens if self.num_tokens else 1.0

    @property
    def compression_ratio(self) -> float:
        """r = N/N' (1.0 for an empty batch)."""
        return self.num_tokens / self.num_nodes if self.num_nodes else 1.0

    @cached_property
    def depth(self) -> Tensor:
        """[N'] int32, number of ancestors: the distance along the path that sliding windows measure."""
        ends = self.cu_seqlens[1:].contiguous()
        owner = torch.searchsorted(ends, self.gather, right=True)
        return self.gather - self.cu_seqlens[owner]

    def to(self, device: torch.device | str) -> TriePlan:
        """The same plan on `device` (itself where it already is there)."""
        gather = self.gather.to(device)
        if gather is self.gather:
            return self
        return TriePlan(
            gather=gather,
            scatter=self.scatter.to(device),
            parent=self.parent.to(device),
            subtree_end=self.subtree_end.to(device),
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            cu_seqlens=self.cu_seqlens.to(device),
            order=self.order,
        )


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What an attention layer asks for, besides Q, K, V and the plan.

    Args:
        softmax_scale: factor on QK^T.
        sliding_window: a query sees the last `sliding_window` tokens of its path, itself included; None: all.
        softcap: scores become softcap * tanh(score / softcap) after scaling; None: unchanged.
        sinks: [Hq] learned logits, one more column in every softmax whose value is zero; None: none.
        dropout: probability of dropping an attention weight (training only).
    """

    softmax_scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
