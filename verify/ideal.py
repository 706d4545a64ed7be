"""The ideal speed-up: how many FLOPs dense spends for each one that a path spends.

"Ideal" always means this ratio, not r: attention shrinks by less than r, because the shared rows are the
shallow ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch, TriePlan

Path = Literal["dense", "scatter", "trie"]


@dataclass(frozen=True)
class DecoderShape:
    """What the FLOPs of a decoder with gated MLPs depend on; field names as in Hugging Face configs.

    `intermediate_size` counts the active width: experts per token times the width of an expert in a mixture.
    `layer_windows` has one entry per layer: its sliding window in tokens, None where it sees everything.
    """

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    layer_windows: tuple[int | None, ...]

    @classmethod
    def from_config(cls, config: Any) -> DecoderShape:
        """Read a Hugging Face config.

        Raises:
            ValueError: a field is missing, for instance in a model that is not a gated decoder.
        """
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        heads = _field(config, "num_attention_heads")
        hidden = _field(config, "hidden_size")
        experts = getattr(config, "num_experts_per_tok", None) or 1
        width = getattr(config, "moe_intermediate_size", None) or _field(config, "intermediate_size")
        return cls(
            hidden,
            heads,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or hidden // heads,
            experts * width,
            _field(config, "vocab_size"),
            _layer_windows(config),
        )

    @property
    def flops_per_row(self) -> int:
        """Position-wise FLOPs of one row in one layer: Q, K, V and O projections, and three MLP matrices."""
        q_width = self.num_attention_heads * self.head_dim
        kv_width = self.num_key_value_heads * self.head_dim
        projections = 2 * self.hidden_size * (2 * q_width + 2 * kv_width)
        return projections + 2 * 3 * self.hidden_size * self.intermediate_size

    @property
    def flops_per_pair(self) -> int:
        """Attention FLOPs of one visible (query, key) pair in one layer: QK^T and PV over all heads."""
        return 2 * 2 * self.num_attention_heads * self.head_dim

    @property
    def flops_per_logits_row(self) -> int:
        """FLOPs of the head for one row of logits."""
        return 2 * self.hidden_size * self.vocab_size


@dataclass(frozen=True)
class IdealSpeedup:
    """FLOPs of one forward pass on each path (all layers, and the head where it is part of the work)."""

    dense: int
    scatter: int
    trie: int

    def speedup(self, path: Path) -> float:
        """FLOPs of dense / FLOPs of `path`; 1.0 where nothing is computed."""
        flops = getattr(self, path)
        return self.dense / flops if flops else 1.0


def ideal_speedup(
    shape: DecoderShape, batch: RaggedBatch, plan: TriePlan, logits_rows: int = 0
) -> IdealSpeedup:
    """Count what each path has to compute on one batch.

    Dense: N rows and every sequence's causal pairs. The paper's path (arXiv 2601.15013, section 3): N' rows,
    the same pairs. Trie: N' rows, each with its ancestors and itself.

    Args:
        shape: the decoder.
        batch: N tokens.
        plan: its trie, N' nodes, in any order.
        logits_rows: rows the head is computed for, the same on every path (B for last-token logits, 0: none).
    """
    head = logits_rows * shape.flops_per_logits_row
    layers = len(shape.layer_windows)
    dense_depth = TriePlan.identity(batch).depth
    dense_attention = _attention_flops(shape, dense_depth)
    rows, nodes = plan.num_tokens, plan.num_nodes
    return IdealSpeedup(
        dense=layers * rows * shape.flops_per_row + dense_attention + head,
        scatter=layers * nodes * shape.flops_per_row + dense_attention + head,
        trie=layers * nodes * shape.flops_per_row + _attention_flops(shape, plan.depth) + head,
    )


def visible_pairs(depth: Tensor, window: int | None = None) -> int:
    """(query, key) pairs under the causal mask, from each row's number of ancestors [rows] int32."""
    keys = depth.to(torch.int64) + 1
    return int((keys if window is None else keys.clamp(max=window)).sum())


def path_of(attention: str) -> Path:
    """The path a backend takes, by its name: `dense-*`, `scatter-*`, and everything else on the trie."""
    if attention.startswith("dense"):
        return "dense"
    return "scatter" if attention.startswith("scatter") else "trie"


def _attention_flops(shape: DecoderShape, depth: Tensor) -> int:
    pairs = {window: visible_pairs(depth, window) for window in set(shape.layer_windows)}
    return shape.flops_per_pair * sum(pairs[window] for window in shape.layer_windows)


def _layer_windows(config: Any) -> tuple[int | None, ...]:
    layers = _field(config, "num_hidden_layers")
    window = getattr(config, "sliding_window", None)
    kinds: Iterable[str] | None = getattr(config, "layer_types", None)
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return (window,) * layers


def _field(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if value is None:
        raise ValueError(f"{type(config).__name__} has no {name}: cannot count the FLOPs of its layers")
    return int(value)
