"""Whether a call left its inputs alone: batch tensors, weights and buffers, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch

_BYTES_TO_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """A checksum per input tensor, and copies of the batch's tensors (they are small)."""

    weights: dict[str, tuple[int, int]]
    batch: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any, batch: RaggedBatch) -> Fingerprint:
        """Take it before the call."""
        return cls(_weights(model), {name: tensor.clone() for name, tensor in _batch_tensors(batch).items()})

    def changed(self, model: Any, batch: RaggedBatch) -> list[str]:
        """The names of inputs that are not what they were."""
        now, tensors = _weights(model), _batch_tensors(batch)
        changed = [name for name in {**self.weights, **now} if self.weights.get(name) != now.get(name)]
        return changed + [
            name for name, before in self.batch.items() if not torch.equal(before, tensors[name])
        ]


def _weights(model: Any) -> dict[str, tuple[int, int]]:
    return {name: _checksum(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def _batch_tensors(batch: RaggedBatch) -> dict[str, Tensor]:
    tensors = {
        name: getattr(batch, name) for name in ("input_ids", "position_ids", "cu_seqlens", "sharing_keys")
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@torch.no_grad()
def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the raw bits: of all, and of every other, so that a swap of neighbours shows."""
    bits = tensor.detach().contiguous().flatten()
    if bits.dtype == torch.bool:
        bits = bits.to(torch.int8)
    integers = bits.view(_BYTES_TO_INTEGER[bits.element_size()])
    return int(integers.sum(dtype=torch.int64)), int(integers[::2].sum(dtype=torch.int64))
