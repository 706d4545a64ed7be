"""Gradients of every weight against the truth, in lifted fp64."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch
from radixmlp.verify import oracle, rules
from radixmlp.verify.models import LoadedModel
from radixmlp.verify.parity import error_record
from radixmlp.verify.records import Record, Workload
from radixmlp.verify.subject import Subject


def check_gradients(
    loaded: LoadedModel, workload: Workload, attentions: list[str], subject: Subject
) -> list[Record]:
    """One record per backend: the worst weight's largest error, as a share of that weight's largest gradient.

    The loss is a fixed random projection of every token's hidden state and logits, so that every row of every
    sequence counts, also where many share one compact row.

    Args:
        loaded: a model in float64; its weights' `.grad` are left empty.
    """
    model = loaded.model
    batch = workload.batch.to(next(model.parameters()).device)

    def record(
        attention: str, metric: str, value: float, limit: float | None, details: dict[str, Any]
    ) -> Record:
        passed = limit is None or value <= limit
        device = batch.input_ids.device.type
        labels = (loaded.name, workload.name, attention, "float64", device)
        return Record("parity", *labels, metric, value, limit, passed, details)

    with oracle.lifted(model):
        expected = _true_gradients(model, batch)
        records = []
        for attention in attentions:
            try:
                got = _gradients_of_forward(model, batch, attention, subject)
                value, details = _worst_weight(got, expected)
                records.append(
                    record(attention, "lifted_gradient_error", value, rules.LIFTED_GRADIENT, details)
                )
            except Exception as error:
                records.append(error_record(record, attention, error))
    return records


def _true_gradients(model: Any, batch: RaggedBatch) -> dict[str, Tensor]:
    """Each sequence alone through the model's own forward; gradients add up over sequences."""
    model.zero_grad(set_to_none=True)
    start = 0
    for input_ids, position_ids in oracle.sequences_of(batch):
        with oracle.captured_hidden_state(model) as captured:
            out = model(**oracle.inputs_alone(input_ids, position_ids))
        logits = getattr(out, "logits", None)
        _loss(captured[0][0], None if logits is None else logits[0], start).backward()
        start += input_ids.shape[0]
    return _take_gradients(model)


def _gradients_of_forward(
    model: Any, batch: RaggedBatch, attention: str, subject: Subject
) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    try:
        out = subject.forward(model, batch, attention=attention)
        _loss(out.last_hidden_state, out.logits, 0).backward()
    finally:
        gradients = _take_gradients(model)
    return gradients


def _take_gradients(model: Any) -> dict[str, Tensor]:
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return gradients


def _loss(hidden: Tensor, logits: Tensor | None, start: int) -> Tensor:
    """Sum of fixed weights times outputs; `start` is the ragged row of the first one."""
    loss = (hidden * _weights(hidden, start, 0)).sum()
    return loss if logits is None else loss + (logits * _weights(logits, start, 1)).sum()


def _weights(like: Tensor, start: int, phase: int) -> Tensor:
    """[rows, width] values between -1 and 1 that depend on the ragged row and column only."""
    rows = torch.arange(start, start + like.shape[0], device=like.device, dtype=torch.float64)
    columns = torch.arange(like.shape[1], device=like.device, dtype=torch.float64)
    return torch.sin(1.7 * rows[:, None] + 0.9 * columns + phase)


def _worst_weight(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, dict[str, Any]]:
    if got.keys() != expected.keys():
        odd = sorted(got.keys() ^ expected.keys())
        return math.inf, {"gradients_on_one_side_only": ", ".join(odd)[:500]}
    largest = max((float(g.abs().max()) for g in expected.values()), default=0.0)
    worst, where = 0.0, ""
    for name, truth in expected.items():
        scale = float(truth.abs().max()) or largest  # an expert that no token chose has zero gradient
        error = float((got[name] - truth).abs().max()) / scale if scale else 0.0
        if not error <= worst:  # NaN counts as worst
            worst, where = (error if math.isfinite(error) else math.inf), name
    return worst, {"weight": where, "weights": len(expected)}
