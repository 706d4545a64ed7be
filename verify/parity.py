"""Parity: every backend's numbers against the truth, by the rules in `rules.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.errors import UnsupportedAttentionError
from radixmlp.reference import RaggedBatch
from radixmlp.verify import oracle, rules
from radixmlp.verify.models import LoadedModel
from radixmlp.verify.oracle import Outputs
from radixmlp.verify.records import Record, Workload
from radixmlp.verify.subject import Subject
from radixmlp.verify.unchanged import Fingerprint


@dataclass(frozen=True)
class _Case:
    """One (model, workload): the truth, and the dense path's own outputs in the model's dtype."""

    loaded: LoadedModel
    workload: Workload
    batch: RaggedBatch
    keep: int
    truth: Outputs
    alone: Outputs
    padded: Outputs

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.model.dtype

    def record(
        self,
        attention: str,
        metric: str,
        value: float,
        limit: float | None,
        details: dict[str, Any] | None = None,
    ) -> Record:
        passed = limit is None or value <= limit
        name = str(self.dtype).removeprefix("torch.")
        device = self.batch.input_ids.device.type
        labels = (self.loaded.name, self.workload.name, attention, name, device)
        return Record("parity", *labels, metric, value, limit, passed, details or {})


def check_parity(
    loaded: LoadedModel,
    workload: Workload,
    attentions: list[str],
    subject: Subject,
    progress: Callable[[str], None] = lambda _: None,
    may_refuse: Collection[str] = (),
) -> list[Record]:
    """Judge each backend on one model (in its dtype, on its device) and one workload.

    Records, per backend: the errors of `last_hidden_state` and `logits`, inputs that changed, the difference
    of normalised last-token embeddings against dense, and the share of rows equal to dense bit by bit. Once:
    whether the model's truth responds to positions at all.

    A backend that raises gets one failed record, and the others are still judged. One in `may_refuse` that
    says it cannot serve this layer or device gets a record that is reported, not judged.
    """
    progress("truth, each sequence alone in fp64")
    model = loaded.model
    batch = workload.batch.to(next(model.parameters()).device)
    keep = oracle.logits_to_keep(model, batch)
    truth_model = oracle.truth_model(model)
    truth = oracle.truth(truth_model, batch, keep)
    position_response = _position_response(truth_model, batch)
    del truth_model
    progress("dense, alone and in the batch")
    case = _Case(
        loaded,
        workload,
        batch,
        keep,
        truth,
        oracle.each_alone(model, batch, keep),
        oracle.together_padded(model, batch, keep),
    )
    records = [_position_record(case, position_response)]
    for attention in attentions:
        progress(attention)
        try:
            records += _check_backend(case, attention, subject)
        except UnsupportedAttentionError as refusal:
            if attention in may_refuse:
                records.append(case.record(attention, "refused", 0.0, None, {"reason": str(refusal)[:500]}))
            else:
                records.append(error_record(case.record, attention, refusal))
        except Exception as error:
            records.append(error_record(case.record, attention, error))
    return records


def error_record(record: Callable[..., Record], attention: str, error: Exception) -> Record:
    """A failed record that says what was raised."""
    reason = f"{type(error).__name__}: {error}"[:500]
    return record(attention, "error", math.inf, 0.0, {"error": reason})


def _check_backend(case: _Case, attention: str, subject: Subject) -> list[Record]:
    before = Fingerprint.of(case.loaded.model, case.batch)
    got = run_forward(case.loaded.model, case.batch, attention, case.keep, subject)
    changed = before.changed(case.loaded.model, case.batch)
    records = [case.record(attention, "inputs_changed", len(changed), 0, {"changed": ", ".join(changed)})]
    records += _judge(case, attention, got, "")
    if case.dtype == torch.float64:
        with oracle.lifted(case.loaded.model):
            lifted = run_forward(case.loaded.model, case.batch, attention, case.keep, subject)
        records += _judge(case, attention, lifted, "lifted_")
    records.append(_embedding_record(case, attention, got))
    same = (got.last_hidden_state == case.alone.last_hidden_state).all(1).double().mean()
    records.append(case.record(attention, "bitwise_equal_rows", float(same), None))
    return records


@torch.no_grad()
def run_forward(model: Any, batch: RaggedBatch, attention: str, keep: int, subject: Subject) -> Outputs:
    """The call under test."""
    out = subject.forward(model, batch, attention=attention, logits_to_keep=keep)
    return Outputs(out.last_hidden_state, out.logits)


def _judge(case: _Case, attention: str, got: Outputs, prefix: str) -> list[Record]:
    names = ["last_hidden_state"] + ([] if case.truth.logits is None else ["logits"])
    records = []
    for name in names:
        mine, truth = getattr(got, name), getattr(case.truth, name)
        if mine is None:
            raise ValueError(f"forward returned no {name}")
        errors = rules.errors_against(mine, truth)
        details = _worst(case, mine, truth, errors) if errors.largest else {}
        if case.dtype in rules.HALF_DTYPES:
            records += _judge_half(case, attention, name, errors, details)
        else:
            limit = _relative_limit(case.dtype, lifted=bool(prefix))
            records.append(case.record(attention, f"{prefix}{name}_error", errors.largest, limit, details))
    return records


def _relative_limit(dtype: torch.dtype, lifted: bool) -> float:
    if dtype == torch.float64:
        return rules.LIFTED_FLOAT64 if lifted else rules.PLAIN_FLOAT64
    return rules.FLOAT32


def _judge_half(
    case: _Case, attention: str, name: str, errors: rules.Errors, details: dict[str, Any]
) -> list[Record]:
    """Dense, alone and in the batch, shows what rounding costs; the larger of the two is legitimate."""
    truth = getattr(case.truth, name)
    dense = [rules.errors_against(getattr(outputs, name), truth) for outputs in (case.alone, case.padded)]
    rms, largest = max(e.rms for e in dense), max(e.largest for e in dense)
    rms_limit = rules.RMS_FACTOR * rms if truth.shape[0] >= rules.MIN_RMS_ROWS else None
    largest_limit = rules.LARGEST_FACTOR * largest + rules.floor_of(case.dtype, errors.scale)
    rms_details = {"over_dense": errors.rms / rms if rms else 1.0, "rows": truth.shape[0]}
    largest_details = {"over_dense": errors.largest / largest if largest else 1.0, **details}
    return [
        case.record(attention, f"{name}_rms_error", errors.rms, rms_limit, rms_details),
        case.record(attention, f"{name}_largest_error", errors.largest, largest_limit, largest_details),
    ]


def _worst(case: _Case, got: Tensor, truth: Tensor, errors: rules.Errors) -> dict[str, Any]:
    """Where the largest error is, for whoever has to find it."""
    row, column = errors.worst
    sequence = row
    details: dict[str, Any] = {"row": row, "column": column}
    if got.shape[0] == case.batch.num_tokens:
        sequence = int(torch.searchsorted(case.batch.cu_seqlens[1:].contiguous(), row, right=True))
        details["offset"] = row - int(case.batch.cu_seqlens[sequence])
    details["sequence"] = sequence
    return {**details, "got": float(got[row, column]), "expected": float(truth[row, column])}


def _embedding_record(case: _Case, attention: str, got: Outputs) -> Record:
    """Last-token embeddings, as a retrieval user sees them.

    What dense itself is off by is the larger of its difference between alone and in the batch, and of its
    distance from the truth: a CPU often runs the very same kernels for both batches.
    """
    dense = _embeddings(case, case.alone)
    difference = _largest(_embeddings(case, got) - dense)
    in_batch = _largest(_embeddings(case, case.padded) - dense)
    from_truth = _largest(_embeddings(case, case.truth) - dense)
    judged = case.dtype == torch.float16 and max(in_batch, from_truth) < rules.FP16_EMBEDDING
    limit = rules.FP16_EMBEDDING if judged else None
    details = {"dense_alone_vs_in_batch": in_batch, "dense_vs_truth": from_truth}
    return case.record(attention, "embedding_difference", difference, limit, details)


def _embeddings(case: _Case, outputs: Outputs) -> Tensor:
    ends = torch.unique_consecutive(case.batch.cu_seqlens)[1:].to(torch.int64) - 1
    return torch.nn.functional.normalize(outputs.last_hidden_state[ends].float(), dim=-1)


def _largest(difference: Tensor) -> float:
    """max|difference|, infinite where anything is not finite."""
    if not difference.numel():
        return 0.0
    largest = float(difference.abs().max())
    return largest if math.isfinite(largest) else math.inf


def _position_response(truth_model: Any, batch: RaggedBatch) -> float:
    """How far doubled positions move the truth of the longest sequence, as a share of max|truth|."""
    longest = max(oracle.sequences_of(batch), key=lambda pair: pair[0].numel(), default=None)
    if longest is None or longest[0].numel() < 2:
        return math.nan
    ids, positions = (values.tolist() for values in longest)
    device = batch.input_ids.device
    once = RaggedBatch.from_sequences([ids], [positions]).to(device)
    twice = RaggedBatch.from_sequences([ids], [[2 * p for p in positions]]).to(device)
    plain, stretched = (oracle.truth(truth_model, b, 1).last_hidden_state for b in (once, twice))
    return rules.errors_against(stretched, plain).largest


def _position_record(case: _Case, response: float) -> Record:
    """Red where the truth itself does not notice positions: then no backend could be caught ignoring them."""
    if math.isnan(response):
        return case.record("none", "position_blindness", 0.0, None, {"reason": "no sequence has two tokens"})
    value = rules.LEAST_POSITION_RESPONSE / response if response > 0 else math.inf
    return case.record("none", "position_blindness", value, 1.0, {"response_to_doubled_positions": response})
