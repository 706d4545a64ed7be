"""The language-model head on a few rows at a time, forward and backward: logits of all rows never exist at once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from radixmlp.optimized.integration.models import head_module
from radixmlp.optimized.training.rows import CompactRows

_CHUNK_BYTES = 1 << 26  # of one chunk's logits in fp32
_BLOCK = 4096  # rows of a [V, d] gradient at a time, where it is summed in a wider dtype
Pull = Callable[
    [Tensor], Tensor
]  # [C, V] gradient of the logits -> [C, d] of the rows; the weights' are kept


class ChunkedHead(Protocol):
    """What a head offers to a loss that takes it in chunks.

    Attributes:
        vocabulary: V.
        parameters: the weights it has gradients for.
        chunk: rows to take at once.
        fresh: its logits are nobody else's and may be written over.
    """

    vocabulary: int
    parameters: list[nn.Parameter]
    chunk: int
    fresh: bool

    def gradients(self) -> list[Tensor]:
        """Buffers for the weights' gradients, zero, one for each of `parameters`, at least fp32."""
        ...

    def logits(self, rows: Tensor) -> Tensor:
        """[C, d] -> [C, V], without a graph."""
        ...

    def with_pull(self, rows: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Pull]:
        """The same logits, and their backward, which adds the weights' gradients to `gradients`."""
        ...


def head_for(compact: CompactRows) -> ChunkedHead:
    """A plain linear head by its three matrix products; any other as the model itself applies it."""
    module = head_module(compact.model)
    replayed = ReplayedHead(compact)
    if type(module) is nn.Linear:
        sample = compact.hidden[:2].detach()
        with torch.no_grad():
            own = replayed.logits(sample)
            if torch.equal(
                own, nn.functional.linear(sample.to(own.dtype), module.weight, module.bias).to(own.dtype)
            ):
                return LinearHead(module)
    return replayed


class _Head:
    def __init__(self, parameters: list[nn.Parameter], vocabulary: int) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.vocabulary = vocabulary
        self.chunk = max(1, _CHUNK_BYTES // (4 * vocabulary))

    def gradients(self) -> list[Tensor]:
        """See `ChunkedHead`."""
        return [
            torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in self.parameters
        ]


class LinearHead(_Head):
    """`nn.Linear`: logits = rows @ weight^T + bias."""

    fresh = True

    def __init__(self, module: nn.Linear) -> None:
        super().__init__(list(module.parameters()), module.weight.shape[0])
        self.weight, self.bias = module.weight, module.bias
        device = module.weight.device.type
        autocast = torch.is_autocast_enabled(device)
        self.dtype = torch.get_autocast_dtype(device) if autocast else module.weight.dtype

    def logits(self, rows: Tensor) -> Tensor:
        """[C, d] -> [C, V]."""
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(self.dtype)
            return nn.functional.linear(rows.to(self.dtype), self.weight.to(self.dtype), bias)

    def with_pull(self, rows: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Pull]:
        """See `ChunkedHead`."""
        rows = rows.detach().to(self.dtype)

        def pull(grad: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
                short = grad.to(self.dtype)
                for parameter, total in zip(self.parameters, gradients, strict=True):
                    if parameter is self.bias:
                        total += grad.sum(0)
                    elif total.dtype == short.dtype:
                        total.addmm_(short.t(), rows)
                    else:  # block by block: adding a bf16 product to fp32 copies it first
                        for start in range(0, total.shape[0], _BLOCK):
                            block = slice(start, start + _BLOCK)
                            total[block] += short[:, block].t() @ rows
                return short @ self.weight.to(self.dtype)

        return self.logits(rows), pull


class ReplayedHead(_Head):
    """The model's own forward from its decoder's output on: with soft-capping, scales and adapters of its own."""

    fresh = False  # the graph may have saved them

    def __init__(self, compact: CompactRows) -> None:
        self.model, self.compact = compact.model, compact
        decoder = self.model.get_submodule(compact.decoder)
        inside = {id(parameter) for parameter in decoder.parameters()}
        head = head_module(self.model)
        own = [] if head is None else list(head.parameters())
        outside = [parameter for parameter in self.model.parameters() if id(parameter) not in inside]
        parameters = list({id(parameter): parameter for parameter in [*outside, *own]}.values())
        super().__init__(parameters, self.model.get_input_embeddings().weight.shape[0])
        device = compact.hidden.device.type
        self.autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def logits(self, rows: Tensor) -> Tensor:
        """[C, d] -> [C, V]."""
        with torch.no_grad():
            return self._run(rows)

    def with_pull(self, rows: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Pull]:
        """See `ChunkedHead`."""
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            logits = self._run(leaf)

        def pull(grad: Tensor) -> Tensor:
            found = torch.autograd.grad(
                logits, [leaf, *self.parameters], grad.to(logits.dtype), allow_unused=True
            )
            for total, part in zip(gradients, found[1:], strict=True):
                if part is not None:
                    total += part
            return torch.zeros_like(leaf) if found[0] is None else found[0]

        return logits.detach(), pull

    def _run(self, rows: Tensor) -> Tensor:
        device, dtype, enabled = self.autocast
        ids = torch.zeros(1, rows.shape[0], dtype=torch.int64, device=rows.device)
        with self._decoder_gives(rows), torch.autocast(device, dtype, enabled):
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _decoder_gives(self, rows: Tensor) -> Iterator[None]:
        """Within the block the decoder returns `rows` without running."""
        attributes = vars(self.model.get_submodule(self.compact.decoder))
        output = copy.copy(self.compact.output)
        output["last_hidden_state"] = rows[None]
        missing = object()
        before: Any = attributes.get("forward", missing)
        attributes["forward"] = lambda *_args, **_kwargs: output
        try:
            yield
        finally:
            if before is missing:
                del attributes["forward"]
            else:
                attributes["forward"] = before
