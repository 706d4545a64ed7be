"""The ways to compute one loss of a batch, as calls that return it with its graph.

- `dense-padded`: transformers' own loss, `model(input_ids, labels=labels).loss`, on the right-padded batch.
- `dense-padded-rows`: the same decoder; the head only on the rows that predict a target.
- `dense-sdpa`, `trie-sdpa`, ...: `causal_lm_loss` with that backend; building the plan is part of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.training import causal_lm_loss
from radixmlp.verify.models import cast_parameters, load_model
from radixmlp.verify.variants import DENSE_PADDED, DENSE_RAGGED, output_head, pad_rows

DENSE_PADDED_ROWS = "dense-padded-rows"
DENSE_LOSSES = (DENSE_PADDED, DENSE_PADDED_ROWS, DENSE_RAGGED)
IGNORED = -100

Loss = Callable[[], Tensor]


def build_losses(
    model: Any, batch: RaggedBatch, labels: Tensor | None, names: Sequence[str]
) -> dict[str, Loss]:
    """One callable per name: the mean over the targets of -log p, a scalar with its graph.

    Args:
        model: a causal LM whose head is a plain linear layer.
        batch: no empty sequence; positions count from 0.
        labels: [N], -100 leaves a target out; the batch's own ids where omitted.
        names: of the above.

    Raises:
        ValueError: a sequence is empty, positions that do not count from 0, or an unknown name.
    """
    if int(batch.lengths.min()) == 0:
        raise ValueError(f"row {int(batch.lengths.argmin())} is empty: leave it out of the workload")
    padded = pad_rows(batch)
    if not padded.counted:
        raise ValueError(
            "positions do not count from 0 in every row: the padded model would number them anew"
        )
    padded_labels = _pad_labels(batch, labels)
    inputs = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask, "use_cache": False}
    losses: dict[str, Loss] = {}
    for name in names:
        if name == DENSE_PADDED:
            losses[name] = partial(_own_loss, model, inputs, padded_labels)
        elif name == DENSE_PADDED_ROWS:
            losses[name] = partial(_wanted_rows_loss, model, inputs, padded_labels)
        elif name in radixmlp.attention_backends():
            losses[name] = partial(causal_lm_loss, model, batch, labels, attention=name)
        else:
            known = ", ".join([DENSE_PADDED, DENSE_PADDED_ROWS, *radixmlp.attention_backends()])
            raise ValueError(f"unknown loss {name!r}: choose from {known}")
    return losses


def step(model: Any, loss: Loss) -> float:
    """Forward and backward with fresh gradients; the loss."""
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    return float(value.detach())


def mask_prompts(batch: RaggedBatch, prompt: int) -> Tensor:
    """[N] labels of the tokens from offset `prompt` on; -100 for those before."""
    starts = batch.cu_seqlens[:-1].repeat_interleave(batch.lengths)
    offsets = torch.arange(batch.num_tokens) - starts
    return batch.input_ids.long().masked_fill(offsets < prompt, IGNORED)


def load_trainee(name: str, vocabulary: int, dtype: str) -> Any:
    """The model called `name` with `vocabulary` rows in its (random) embedding and head."""
    model = load_model(name, "float32").model
    if vocabulary != model.config.vocab_size:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
    return cast_parameters(model, getattr(torch, dtype))


def _own_loss(model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    loss: Tensor = model(**inputs, labels=labels).loss
    return loss


def _wanted_rows_loss(model: Any, inputs: dict[str, Any], labels: Tensor) -> Tensor:
    head = output_head(model)
    assert head is not None
    targets = labels[:, 1:]
    wanted = targets != IGNORED
    hidden = model.base_model(**inputs).last_hidden_state[:, :-1][wanted]
    return cross_entropy(head(hidden).float(), targets[wanted])


def _pad_labels(batch: RaggedBatch, labels: Tensor | None) -> Tensor:
    """[B, L] int64, -100 at padding."""
    flat = batch.input_ids.long() if labels is None else labels.long()
    rows = flat.split(batch.lengths.tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=IGNORED)
