"""The cache of left-padded rows without positions: the model's own, made by running it when somebody reads it.

A compact forward counts such rows' positions from their first token. Its keys are turned accordingly, which later
calls, counting columns, would not expect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from radixmlp.optimized.integration.arguments import Call


@dataclass(frozen=True, eq=False)
class OwnCache:
    """A forward to repeat.

    Args:
        original: the decoder's own forward.
        inputs: copies of what it was called with.
        grad: whether gradients were on.
        hidden: [N', d] the compact forward's result: repeated, the forward must give the same.
        nodes: [B, L] the compact row of each slot.
        tolerance: of that comparison, as a share of the norm.
    """

    original: Callable[..., Any]
    inputs: dict[str, Tensor]
    grad: bool
    hidden: Tensor
    nodes: Tensor
    tolerance: float

    @classmethod
    def of(
        cls, original: Callable[..., Any], call: Call, hidden: Tensor, nodes: Tensor, tolerance: float
    ) -> OwnCache:
        """Remember a left-padded call of token ids."""
        assert call.input_ids is not None
        assert call.attention_mask is not None
        inputs = {"input_ids": call.input_ids.clone(), "attention_mask": call.attention_mask.clone()}
        return cls(original, inputs, torch.is_grad_enabled(), hidden, nodes, tolerance)

    def fill(self) -> DynamicCache:
        """Run the forward.

        Raises:
            RuntimeError: the model is not what it was: its result differs.
        """
        with torch.set_grad_enabled(self.grad):
            output = self.original(**self.inputs, use_cache=True, return_dict=True)
        real = self.inputs["attention_mask"] != 0
        got, expected = output[0].detach()[real].double(), self.hidden[self.nodes[real]].double()
        if not float((got - expected).norm()) <= max(self.tolerance, 1e-4) * float(expected.norm()):
            raise RuntimeError(
                "the model changed since the forward whose cache is read now (its weights, adapters or mode): pass "
                "use_cache=True to that forward"
            )
        return next(value for value in output.values() if isinstance(value, DynamicCache))
