"""How good the roofline is: predicted beside published for an H100, and beside what was measured on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from radixmlp.reference import RaggedBatch
from radixmlp.verify.ideal import DecoderShape

from .data_models import QWEN3
from .published import reranking, synthetic
from .roofline import DEVICES, Path, Work, cpu_device, predict, predicted_speedup

BENCH_VOCABULARY = 16_384
TRAINING_VOCABULARY = 32_000
WITHIN = 0.15
SMOLLM2 = DecoderShape(576, 9, 3, 64, 1536, 49_152, (None,) * 30)
MSMARCO_TOKENS = 65_536
MSMARCO_PASSAGES = 10  # a query has about as many
MSMARCO_SUFFIX = 100  # tokens of a passage, about


@dataclass(frozen=True)
class Known:
    """A speed-up that was published or measured, beside the one predicted.

    Args:
        name: what over what.
        known, predicted: the two speed-ups.
        note: what one must know about the row.
    """

    name: str
    known: float
    predicted: float
    note: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over known."""
        return self.predicted / self.known

    @property
    def close(self) -> bool:
        """Whether the prediction is within 15%."""
        return abs(self.ratio - 1) <= WITHIN


@dataclass(frozen=True)
class Case:
    """One bar of the bench, as the roofline sees it.

    Args:
        bar: its name.
        shape, work: the decoder and the batch.
        path, training, dtype: as `predict` and `cpu_device` take them.
        share_of_r: the bar is the speed-up over r.
    """

    bar: str
    shape: DecoderShape
    work: Work
    path: Path
    training: bool = False
    dtype: str = "bfloat16"
    share_of_r: bool = False

    @property
    def unit(self) -> float:
        """What the bar's value is in."""
        return self.work.r if self.share_of_r else 1.0


def published_speedups() -> list[Known]:
    """The paper's synthetic workload on an H100 against its prediction."""
    rows = []
    for row in synthetic():
        work = Work.shared_prefix(row.prefix_tokens, row.suffix_tokens, row.batch).without_head()
        predicted = predicted_speedup(DEVICES["h100"], _published_shape(row.model), work, "scatter")
        rows.append(
            Known(
                f"{row.model}, {row.prefix_tokens} + {row.suffix_tokens} x {row.batch}",
                row.speedup,
                predicted,
            )
        )
    return rows


def implied_ratios() -> dict[str, float]:
    """The r of MS MARCO that each published reranking speed-up needs under the model; one corpus has one r.

    The trace was not published with its lengths. Taken are groups of 10 passages of 100 tokens behind a query and its
    instruction, in batches of 65,536 tokens; the length of what comes first is what is solved for.
    """
    return {row.model: _implied_ratio(_published_shape(row.model), row.speedup) for row in reranking()}


def cases(roofline: Mapping[str, Any]) -> list[Case]:
    """The bench's speed bars that the roofline predicts; reranking only where its batches were counted."""
    found = [*_prefill_cases(), *_training_cases()]
    for dtype, work in roofline.get("batches", {}).items():
        bar = f"rerank: trie over dense, as a share of r ({dtype})"
        found.append(Case(bar, SMOLLM2, Work.from_dict(work), "trie", dtype=dtype, share_of_r=True))
    return found


def measured_speedups(measured: Mapping[str, Any]) -> list[Known]:
    """A CPU's bars against their predictions from its own calibration; none where it has no calibration."""
    bars = {bar["name"]: bar for bar in measured["bars"]}
    rows = []
    for case in cases(measured["roofline"]) if measured.get("roofline") else []:
        bar = bars.get(case.bar)
        if bar is None or bar["wrong"] is not None:
            continue
        device = cpu_device(measured, case.dtype)
        predicted = predicted_speedup(device, case.shape, case.work, case.path, training=case.training)
        against = bar["details"].get("against", "")
        note = f"measured against {against}" if against not in ("", "dense-sdpa") else ""
        rows.append(Known(case.bar, bar["value"], predicted / case.unit, note))
    return rows


def explain(measured: Mapping[str, Any]) -> str:
    """Where the predicted seconds of each bar go, part by part, beside the measured seconds of the whole call."""
    lines = []
    bars = {bar["name"]: bar for bar in measured["bars"]}
    for case in cases(measured["roofline"]):
        details = bars.get(case.bar, {}).get("details", {})
        device = cpu_device(measured, case.dtype)
        lines.append(case.bar)
        sides: tuple[tuple[Path, str], ...] = (("dense", "against_seconds"), (case.path, "seconds"))
        for path, known in sides:
            told = predict(device, case.shape, case.work, path, training=case.training)
            seconds = f", measured {details[known]:.3f} s" if known in details else ""
            parts = ", ".join(
                f"{name} {part:.3f}" for name, part in sorted(told.parts.items(), key=_largest_first)
            )
            lines.append(f"  {path}: {told.seconds:.3f} s{seconds}: {parts}")
    return "\n".join(lines)


def _largest_first(part: tuple[str, float]) -> float:
    return -part[1]


def _prefill_cases() -> list[Case]:
    small, large = _with(QWEN3["0.6b"], BENCH_VOCABULARY, 4), _with(QWEN3["8b"], BENCH_VOCABULARY, 1)
    work, headline = Work.shared_prefix(512, 64, 16), Work.shared_prefix(2048, 256, 32)
    return [
        Case("qwen3-0.6b: trie over dense", small, work, "trie"),
        Case("qwen3-0.6b: scatter over dense", small, work, "scatter"),
        Case("qwen3-8b: trie over dense", large, headline, "trie"),
    ]


def _training_cases() -> list[Case]:
    shape = _with(QWEN3["0.6b"], TRAINING_VOCABULARY, 4)
    batch = RaggedBatch.from_sequences([[0] * 512 + [b + 1] * 64 for b in range(16)])
    completions = torch.arange(batch.num_tokens) % 576
    labels = torch.where(completions < 512, -100, 0)
    return [
        Case("training: trie over dense, loss of all tokens", shape, Work.of(batch), "trie", True),
        Case(
            "training: trie over dense, loss of completions",
            shape,
            Work.of(batch, labels=labels),
            "trie",
            True,
        ),
    ]


def _with(shape: DecoderShape, vocabulary: int, layers: int) -> DecoderShape:
    return replace(shape, vocab_size=vocabulary, layer_windows=(None,) * layers)


def _published_shape(model: str) -> DecoderShape:
    return QWEN3[model.removeprefix("Qwen3-").lower()]


def _implied_ratio(shape: DecoderShape, speedup: float) -> float:
    """Bisect the length of the shared prefix."""

    def predicted(prefix: int) -> float:
        return predicted_speedup(DEVICES["h100"], shape, _msmarco(prefix), "scatter")

    low, high = 1, 2048
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if predicted(middle) < speedup else (low, middle)
    return _msmarco(high).r


@cache
def _msmarco(prefix: int) -> Work:
    group = Work.shared_prefix(prefix, MSMARCO_SUFFIX, MSMARCO_PASSAGES).without_head()
    return group.repeated(MSMARCO_TOKENS // group.rows)
