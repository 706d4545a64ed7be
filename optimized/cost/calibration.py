"""The calibration: a few batches through the first layers of the model itself, with a clock at its attention.

A backend stands in for attention. The time from leaving one attention call to entering the next is one layer of
everything else: at the model's own widths, with its own kernels, experts or quantised weights. A forward is left, by
an exception, at its third attention call. The first one also times the attention backends, with heads like its own,
on plans that are all overhead, all scores, or in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.cost.attention_samples import agree, attention_costs
from radixmlp.optimized.cost.fit import ascending
from radixmlp.optimized.cost.model import CostModel
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

_ROWS = (16, 64, 256, 768)
_LENGTH = 16  # of the sequences that the rows are laid out as
_SLOW = 0.15  # seconds of a layer: more rows than take that long are not tried
_LEAST, _MOST = 3, 6  # repetitions
_BUDGET = 0.4  # seconds, after which no repetition begins that need not


class _EnoughError(Exception):
    """Raised at the third attention call: what follows is not needed."""


class _Clock:
    """Stands in for attention, and notes when it is entered and left; `first` is given the first call's inputs."""

    name = "calibration"

    def __init__(self, wait: Callable[[], None], first: Callable[..., None] | None = None) -> None:
        self.wait, self.first = wait, first
        self.entered: list[float] = []
        self.left: list[float] = []

    def unsupported(self, *_: Any) -> str | None:
        """It computes nothing."""
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """Every row sees itself alone."""
        self.entered.append(self.now())
        if len(self.entered) == 3:
            raise _EnoughError
        if self.first is not None and len(self.entered) == 1:
            self.first(q, k, v, spec)
        out = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        self.left.append(self.now())
        return out

    def now(self) -> float:
        """Seconds, once the device is idle."""
        self.wait()
        return time.perf_counter()


def calibrate(model: Any, key: dict[str, str]) -> CostModel:
    """Measure one layer of `model` where it is, in well under a second for a model of some hundred million weights.

    Draws no random numbers, and leaves the modes and the state of the model as they are.

    Raises:
        Exception: anything the model raises; ValueError where no attention backend could be timed.
    """
    started = time.perf_counter()
    device = model.get_input_embeddings().weight.device
    wait: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else _no_wait
    sizes: dict[str, int] = {}
    attention: dict[str, Any] = {}

    def first(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        sizes.update(query_heads=q.shape[1], kv_heads=k.shape[1])
        attention.update(attention_costs(q, k, v, spec, wait))

    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        _layer_seconds(model, _ROWS[0], _Clock(wait, first))
        runs = _row_runs(model, wait)
    if not attention.get("candidates"):
        raise ValueError("no attention backend serves its layers")
    calm = attention["calm"] and all(map(agree, runs.values()))
    return CostModel(
        key,
        int(model.config.get_text_config().num_hidden_layers),
        sizes["query_heads"],
        sizes["kv_heads"],
        device_type=device.type,
        candidates=attention["candidates"],
        row_seconds=ascending([(rows, min(seconds)) for rows, seconds in runs.items()]),
        attention=attention["costs"],
        copy_seconds=attention["copy_seconds"],
        seconds=time.perf_counter() - started,
        calm=calm,
    )


def _row_runs(model: Any, wait: Callable[[], None]) -> dict[int, list[float]]:
    """{rows: seconds of a layer without attention, one a repetition}; the ladder is climbed again and again."""
    runs: dict[int, list[float]] = {}
    begun = time.perf_counter()
    for repetition in range(_MOST):
        if repetition >= _LEAST and time.perf_counter() - begun > _BUDGET:
            break
        for rows, more in zip(_ROWS, (*_ROWS[1:], 0), strict=True):
            runs.setdefault(rows, []).append(_layer_seconds(model, rows, _Clock(wait)))
            if min(runs[rows]) * more / rows > _SLOW:
                break
    return runs


def _layer_seconds(model: Any, rows: int, clock: _Clock) -> float:
    """Seconds of a layer on so many rows, without its attention: the mean of the first two where there are three."""
    from radixmlp.optimized.integration.models import backbone_of
    from radixmlp.optimized.integration.switch import CompactCall, compact_call

    plan = _rows_of(model, rows)
    inputs = {
        "input_ids": plan.input_ids[None],
        "position_ids": plan.position_ids[None],
        "attention_mask": torch.ones(1, plan.num_nodes, dtype=torch.int64, device=plan.gather.device),
        "use_cache": False,
    }
    started = clock.now()
    try:
        with compact_call(model, CompactCall.on(model, plan, clock)):
            backbone_of(model)(**inputs)
    except _EnoughError:
        pass
    if len(clock.entered) == 1:  # one layer: its two halves, with the embedding and the last norm
        return clock.now() - clock.left[0] + clock.entered[0] - started
    gaps = [enter - leave for leave, enter in zip(clock.left, clock.entered[1:], strict=False)]
    return statistics.fmean(gaps)


def _rows_of(model: Any, rows: int) -> TriePlan:
    """Sequences with nothing in common, in ids from all over the vocabulary."""
    weight = model.get_input_embeddings().weight
    ids = (weight.shape[0] // 3 + 1499 * torch.arange(rows)) % weight.shape[0]
    batch = RaggedBatch.from_sequences(ids.split(_LENGTH))
    return TriePlan.identity(batch).to(weight.device)


def _no_wait() -> None:
    pass
