"""The truth: the model's own untouched forward in fp64, each sequence alone; and the dense path beside it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from radixmlp.reference import RaggedBatch
from radixmlp.verify.lift import lift_float32
from radixmlp.verify.models import cast_parameters
from radixmlp.verify.variants import only_last_token, output_head, pad_rows

# Above this many parameters the oracle stays in fp32: 8 bytes each would not fit beside the model.
MAX_FLOAT64_PARAMETERS = 1_000_000_000
# Logits of every token up to this many numbers, of the last tokens only beyond it.
MAX_LOGITS = 1 << 26


@dataclass(frozen=True)
class Outputs:
    """`last_hidden_state` [N, hidden]; `logits` [N, vocab], [B, vocab] of last tokens, or None: no head."""

    last_hidden_state: Tensor
    logits: Tensor | None


def logits_to_keep(model: Any, batch: RaggedBatch) -> int:
    """0: logits of all tokens; 1: of last tokens only, where all would be too many (and none is missing)."""
    head = output_head(model)
    width = 0 if head is None else model.config.get_text_config().vocab_size
    return 0 if batch.num_tokens * width <= MAX_LOGITS or bool((batch.lengths == 0).any()) else 1


def truth_model(model: Any) -> Any:
    """A copy of the model in fp64 (fp32 where that is too large), its weights the same numbers."""
    parameters = sum(p.numel() for p in model.parameters())
    dtype = torch.float64 if parameters <= MAX_FLOAT64_PARAMETERS else torch.float32
    return cast_parameters(copy.deepcopy(model), dtype)


def truth(oracle: Any, batch: RaggedBatch, keep: int) -> Outputs:
    """Run `truth_model`'s result on each sequence alone, its casts to float32 lifted where it is in fp64."""
    with lifted(oracle):
        return each_alone(oracle, batch, keep)


def lifted(model: Any) -> Any:
    """`lift_float32()` for a model in fp64, otherwise nothing."""
    return lift_float32() if model.dtype == torch.float64 else nullcontext()


@torch.no_grad()
def each_alone(model: Any, batch: RaggedBatch, keep: int = 0) -> Outputs:
    """The model's own forward, one sequence at a time: [1, L] in, nothing shared, nothing padded."""
    hidden, logits = [], []
    for input_ids, position_ids in sequences_of(batch):
        with captured_hidden_state(model) as captured:
            out = model(**inputs_alone(input_ids, position_ids), **_keep(model, keep))
        hidden.append(captured[0][0])
        if output_head(model) is not None:
            logits.append(out.logits[0])
    return Outputs(torch.cat(hidden), torch.cat(logits) if logits else None)


@torch.no_grad()
def together_padded(model: Any, batch: RaggedBatch, keep: int = 0) -> Outputs:
    """The model's own forward on the right-padded batch, its rows ragged again; empty sequences left out.

    The batch is one column wider than its longest sequence. Where all lengths are equal it would otherwise
    run the very kernels of "alone", and dense would seem to have no rounding noise of its own.
    """
    padded = pad_rows(without_empty(batch))
    width = padded.input_ids.shape[1] + 1
    real = torch.arange(width, device=padded.last.device) <= padded.last[:, None]
    inputs = {
        "input_ids": pad(padded.input_ids, (0, 1)),
        "position_ids": pad(padded.position_ids, (0, 1)),
        "attention_mask": real.to(torch.int64),
    }
    only_last = only_last_token(model, padded.last) if keep else nullcontext()
    # Unlifted, eager models in fp64 return NaN here: their mask value overflows the fp32 softmax.
    with lifted(model), only_last, captured_hidden_state(model) as captured:
        out = model(**inputs, use_cache=False)
    logits = None
    if output_head(model) is not None:
        logits = out.logits[:, 0] if keep else out.logits[real]
    return Outputs(captured[0][real], logits)


def inputs_alone(input_ids: Tensor, position_ids: Tensor) -> dict[str, Any]:
    """What a model is given for one sequence of ids [L] and positions [L].

    The mask of ones is there because transformers, given none, takes a gap in the positions for the start of
    another sequence.
    """
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "attention_mask": torch.ones_like(input_ids)[None],
        "use_cache": False,
    }


def sequences_of(batch: RaggedBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """(input_ids [L], position_ids [L]) of each sequence that is not empty, int64."""
    for start, end in pairwise(batch.cu_seqlens.tolist()):
        if end > start:
            yield batch.input_ids[start:end].to(torch.int64), batch.position_ids[start:end].to(torch.int64)


def without_empty(batch: RaggedBatch) -> RaggedBatch:
    """The same rows without the sequences that have none."""
    return RaggedBatch(batch.input_ids, batch.position_ids, torch.unique_consecutive(batch.cu_seqlens))


@contextmanager
def captured_hidden_state(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within the block, collect what the model's backbone returns as `last_hidden_state`."""
    captured: list[Tensor] = []
    backbone: nn.Module = model.base_model  # type: ignore[assignment]
    handle = backbone.register_forward_hook(
        lambda _module, _args, out: captured.append(out.last_hidden_state)
    )
    try:
        yield captured
    finally:
        handle.remove()


def _keep(model: Any, keep: int) -> dict[str, int]:
    return {} if output_head(model) is None else {"logits_to_keep": keep}
