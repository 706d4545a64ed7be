"""A compact forward's output in the shapes the caller asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import Cache
from transformers.utils import ModelOutput

from radixmlp.optimized.errors import UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Expander:
    """Spreads tensors with one row a node over the slots of a [B, L] call.

    Args:
        nodes: [B, L] int64, the compact row of each slot.
        num_nodes: N'.
        make_cache: what stands in for the recorder in the output.
        last_columns: of the last hidden state only these are made (0: all), where the caller reads no others.
    """

    nodes: Tensor
    num_nodes: int
    make_cache: Callable[[], Any]
    last_columns: int = 0

    @property
    def shown(self) -> Tensor:
        """[B, K] int64: the compact rows that the last hidden state shows."""
        return self.nodes[:, -self.last_columns :]

    def __call__(self, output: Any) -> Any:
        """The output, a `ModelOutput` or a tuple, of the same class."""
        if isinstance(output, ModelOutput):
            expanded = copy.copy(output)
            for name, value in output.items():
                expanded[name] = self._field(name, value)
            return expanded
        if isinstance(output, tuple):
            return tuple(self._field(f"output {place}", value) for place, value in enumerate(output))
        raise UnsupportedModelError(f"the model returns a {type(output).__name__}: not a transformers output")

    def rows(self, compact: Tensor, nodes: Tensor) -> Tensor:
        """[1, N', d] -> [B, L, d]; [N', d] -> [B*L, d], with nodes [B, L]."""
        index = nodes.flatten().to(compact.device)
        if compact.dim() == 3 and compact.shape[:2] == (1, self.num_nodes):
            return compact[0].index_select(0, index).unflatten(0, nodes.shape)
        if compact.dim() == 2 and compact.shape[0] == self.num_nodes:
            return compact.index_select(0, index)
        raise UnsupportedModelError(
            f"the model returns a tensor of shape {tuple(compact.shape)}, which has no row per token "
            f"({self.num_nodes} of them)"
        )

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            last = name in ("last_hidden_state", "output 0")
            return self.rows(value, self.shown if last else self.nodes)
        if isinstance(value, Cache):
            return self.make_cache()
        if isinstance(value, tuple | list):
            return tuple(self._field(name, item) for item in value)
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise UnsupportedModelError(
            f"the model returns {name} of type {type(value).__name__}: not understood"
        )
