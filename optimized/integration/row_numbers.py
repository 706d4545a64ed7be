"""Models that count rows where they should read positions: up to how many rows that changes nothing.

Llama 4's layers without RoPE scale their queries by a step function of "tokens cached so far + 0, 1, 2, ...",
whatever `position_ids` say. In the compact layout that counts rows, and is right only below the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.errors import UnsupportedModelError
from radixmlp.optimized.integration.arguments import signature_of
from radixmlp.optimized.integration.cache import CACHE_ARGUMENTS, CacheRecorder
from radixmlp.optimized.integration.models import backbone_of
from radixmlp.optimized.integration.switch import CompactCall, compact_call
from radixmlp.reference import TriePlan

_FARTHEST = 1 << 24
_UNCHANGED = 1e-6  # share of the norm


class _Shifted(CacheRecorder):
    """A cache that claims to hold `length` tokens, and holds none."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.length


def find_max_rows(model: Any, plan: TriePlan, compact: Tensor) -> int | None:
    """The largest number of compact rows with right results; None: any number.

    Args:
        plan: a small plan whose compact result is right.
        compact: [N', d] that result.

    Raises:
        UnsupportedModelError: it is right for no larger batch.
    """
    argument = next(
        (
            name
            for name in CACHE_ARGUMENTS
            if name in signature_of(type(backbone_of(model)).forward).parameters
        ),
        None,
    )
    if argument is None or not _changes(model, plan, compact, argument, _FARTHEST):
        return None
    low, high = 0, _FARTHEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _changes(model, plan, compact, argument, middle) else (middle, high)
    if low == 0:
        raise UnsupportedModelError(
            f"{type(model).__name__} computes with the number of a row instead of its position"
        )
    return plan.num_nodes + low


def _changes(model: Any, plan: TriePlan, compact: Tensor, argument: str, length: int) -> bool:
    inputs = {
        "input_ids": plan.input_ids.long()[None],
        "position_ids": plan.position_ids.long()[None],
        "attention_mask": torch.ones(1, plan.num_nodes, dtype=torch.int64, device=plan.gather.device),
        argument: _Shifted(length),
    }
    with compact_call(model, CompactCall.on(model, plan, "auto")):
        hidden = backbone_of(model)(**inputs, use_cache=True)[0][0]
    difference = (hidden.double() - compact.double()).norm() / compact.double().norm()
    return not float(difference) <= max(_UNCHANGED, torch.finfo(compact.dtype).eps)
