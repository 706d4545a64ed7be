"""Whether what a training bar times is right: log-probabilities, loss values and gradients; and loss curves.

Truth for values is the model in fp32, each sequence alone. For gradients below fp32 that costs more than what is
timed; there, two dense ways to compute the same gradient say how far apart correct ones may be.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch
from radixmlp.training import sequence_logprobs
from radixmlp.verify import rules
from radixmlp.verify.bars import TRIE
from radixmlp.verify.models import cast_parameters, load_model
from radixmlp.verify.training_variants import DENSE_PADDED, IGNORED, build_losses, mask_prompts, step
from radixmlp.verify.workloads import make_workload

# A mean over targets averages their rounding errors: a sixteenth of a unit of one value.
MEAN_LOSS_UNITS = 1 / 16
GRADIENT_FACTOR = 2.0  # of the distance between two dense gradients in the same dtype
GRADIENT_FLOOR_UNITS = 1.0  # of the dtype's epsilon, of the gradient's norm

Gradients = dict[str, Tensor]


@torch.no_grad()
def true_logprobs(model: Any, batch: RaggedBatch) -> Tensor:
    """[E] fp32 log p of every next token, each sequence alone, by an fp32 copy of the model."""
    model = cast_parameters(copy.deepcopy(model), torch.float32)
    parts = []
    for ids in batch.input_ids.long().split(batch.lengths.tolist()):
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        parts.append(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0])
    return torch.cat(parts)


def mean_loss(logprobs: Tensor, batch: RaggedBatch, labels: Tensor) -> float:
    """-mean of [E] log-probabilities over the targets that `labels` [N] leaves in."""
    target = labels != IGNORED
    first = torch.zeros_like(target)
    first[batch.cu_seqlens[:-1].long()] = True
    return -float(logprobs[target[~first]].double().mean())


@torch.no_grad()
def wrong_logprobs(model: Any, batch: RaggedBatch, attention: str, truth: Tensor) -> str | None:
    """Why `attention`'s log-probabilities are wrong, or None: by the factors of `rules.py`.

    Args:
        truth: [E], of `true_logprobs`.
    """
    errors = {
        name: rules.errors_against(
            sequence_logprobs(model, batch, attention=name).values[:, None], truth[:, None]
        )
        for name in ("dense-sdpa", attention)
    }
    ours, dense = errors[attention], errors["dense-sdpa"]
    dtype = next(model.parameters()).dtype
    largest = rules.FLOAT32
    if dtype in rules.HALF_DTYPES:
        largest = rules.LARGEST_FACTOR * dense.largest + rules.floor_of(dtype, dense.scale)
        rms = rules.RMS_FACTOR * dense.rms
        if truth.numel() >= rules.MIN_RMS_ROWS and not ours.rms <= rms:
            return f"log-probabilities: RMS error {ours.rms:.2e} (allowed {rms:.2e})"
    if not ours.largest <= largest:
        return f"log-probabilities: largest error {ours.largest:.2e} (allowed {largest:.2e})"
    return None


def wrong_values(values: Mapping[str, float], truth: float, dtype: torch.dtype) -> dict[str, str]:
    """Why mean losses are wrong, for the variants whose loss is."""
    half = dtype in rules.HALF_DTYPES
    allowed = MEAN_LOSS_UNITS * torch.finfo(dtype).eps if half else rules.FLOAT32
    return {
        name: f"loss {value:.6f}, expected {truth:.6f} within {allowed:.1e}"
        for name, value in values.items()
        if not abs(value - truth) <= allowed * abs(truth)
    }


def wrong_gradient(ours: Gradients, dense: Sequence[Gradients], dtype: torch.dtype) -> str | None:
    """Why a gradient is wrong, or None: each weight's distance to the first dense gradient, by that of the others.

    Args:
        ours: {weight: gradient}.
        dense: at least two gradients of the same loss, not all computed in one way.
    """
    first, *others = dense
    if ours.keys() != first.keys():
        return f"gradients on one side only: {', '.join(sorted(ours.keys() ^ first.keys()))[:300]}"
    for name, anchor in first.items():
        norm = float(anchor.float().norm())
        spread = max(_distance(other[name], anchor) for other in others)
        allowed = GRADIENT_FACTOR * spread + GRADIENT_FLOOR_UNITS * torch.finfo(dtype).eps * norm
        distance = _distance(ours[name], anchor)
        if not distance <= allowed:
            return (
                f"gradient of {name}: off by {distance / norm:.1e} of its norm (allowed {allowed / norm:.1e})"
            )
    return None


def gradients_of(model: Any) -> Gradients:
    """The model's gradients, cloned."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def curve(model_name: str, workload: str, masked: int, steps: int, shared: bool) -> list[float]:
    """Losses of `steps` AdamW steps in fp32 from the model's seeded weights, a new batch each step.

    Args:
        workload: "synthetic:PROMPT+COMPLETIONxGROUP".
        masked: tokens of each row that are no targets.
        shared: on the trie; else transformers' own loss on the padded batch.
    """
    loaded = load_model(model_name, "float32")
    model = loaded.model
    variant = TRIE if shared else DENSE_PADDED
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for index in range(steps):
        batch = make_workload(workload, None, loaded.vocab_size, seed=index).batch
        labels = mask_prompts(batch, masked)
        losses.append(step(model, build_losses(model, batch, labels, [variant])[variant]))
        optimiser.step()
    return losses


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm())
