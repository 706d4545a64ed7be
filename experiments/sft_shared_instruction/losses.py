"""Two losses of the same examples, and two copies of a model trained with them."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp import RaggedBatch
from radixmlp.training import causal_lm_loss
from radixmlp.verify import rules
from radixmlp.verify.timing import quantile

from .examples import Example

IGNORED = -100


def shared_loss(model: Any, examples: list[Example]) -> Tensor:
    """Every prefix once; the mean over answer tokens."""
    batch = RaggedBatch.from_sequences([e.prompt + e.answer for e in examples])
    labels = [token for e in examples for token in [IGNORED] * len(e.prompt) + e.answer]
    return causal_lm_loss(model, batch, torch.tensor(labels))


def own_loss(model: Any, examples: list[Example]) -> Tensor:
    """The model's own forward on a padded batch, its head on the rows that predict an answer's token."""
    width = max(len(e.prompt) + len(e.answer) for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, e in enumerate(examples):
        end = len(e.prompt) + len(e.answer)
        ids[row, :end], mask[row, :end] = torch.tensor(e.prompt + e.answer), 1
        labels[row, len(e.prompt) : end] = torch.tensor(e.answer)
    hidden = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    counted = labels[:, 1:] != IGNORED
    logits = model.get_output_embeddings()(hidden[:, :-1][counted])
    targets = labels[:, 1:][counted]
    # `cross_entropy` says the same, but its fp32 sum over 49,152 entries comes out 9e-6 too low on a CPU.
    return (logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]).mean()


LOSSES: dict[str, Callable[[Any, list[Example]], Tensor]] = {"unshared": own_loss, "shared": shared_loss}


def compare(model: Any, batches: list[list[Example]], learning_rate: float) -> dict[str, Any]:
    """Train two copies of `model` on the same batches, one with each loss; the losses and seconds of every step.

    Args:
        batches: one list of examples a step.
    """
    models = {name: copy.deepcopy(model) for name in LOSSES}
    optimizers = {
        name: torch.optim.AdamW(trained.parameters(), lr=learning_rate) for name, trained in models.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in LOSSES}
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for number, examples in enumerate(batches):
        order = list(LOSSES) if number % 2 else list(LOSSES)[::-1]
        for name in order:
            started = time.perf_counter()
            optimizers[name].zero_grad(set_to_none=True)
            loss = LOSSES[name](models[name], examples)
            loss.backward()
            seconds[name].append(time.perf_counter() - started)
            optimizers[name].step()
            losses[name].append(float(loss.detach()))
    apart = [abs(a - b) / abs(b) for a, b in zip(losses["shared"], losses["unshared"], strict=True)]
    # The first step also sets things up: buffers, the check of the model.
    ratios = [a / b for a, b in zip(seconds["unshared"], seconds["shared"], strict=True)][1:]
    return {
        "losses": losses,
        "largest_relative_difference": max(apart),
        "rows": rows_of(batches),
        "loss_and_backward_seconds": {
            **{name: statistics.median(found[1:]) for name, found in seconds.items()},
            "ratio": statistics.median(ratios),
            "quantiles": [quantile(ratios, 0.2), quantile(ratios, 0.8)],
        },
    }


def rows_of(batches: list[list[Example]]) -> dict[str, float]:
    """Means over steps: tokens of the batch, nodes of its trie, answer tokens."""
    plans = [
        radixmlp.build_plan(RaggedBatch.from_sequences([e.prompt + e.answer for e in examples]))
        for examples in batches
    ]
    tokens = statistics.mean(plan.num_tokens for plan in plans)
    nodes = statistics.mean(plan.num_nodes for plan in plans)
    answers = statistics.mean(sum(len(e.answer) for e in examples) for examples in batches)
    return {"unshared": tokens, "shared": nodes, "ratio": tokens / nodes, "answer_tokens": answers}


def passed(result: dict[str, Any]) -> bool:
    """The curves agree to 1e-5 at every step, they fall, and fewer rows were computed."""
    curve = result["losses"]["unshared"]
    falls = statistics.mean(curve[-3:]) < statistics.mean(curve[:3])
    near = result["largest_relative_difference"] <= rules.FLOAT32
    return falls and near and result["rows"]["ratio"] > 1
