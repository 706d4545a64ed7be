"""Training's figures to reach: a step's speed and memory, loss curves, and the memory of the head.

A step is forward and backward of the mean next-token loss with fresh gradients; on the trie the plan is built within
it. Two losses: of all tokens, and of the completions alone. A speed counts only if log-probabilities, loss and
gradients are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import TRIE, Bar, Progress
from radixmlp.verify.ideal import DecoderShape
from radixmlp.verify.timing import time_interleaved
from radixmlp.verify.training_checks import (
    Gradients,
    curve,
    gradients_of,
    mean_loss,
    true_logprobs,
    wrong_gradient,
    wrong_logprobs,
    wrong_values,
)
from radixmlp.verify.training_ideal import StepFlops, step_flops
from radixmlp.verify.training_memory import HeadStep, Step, peak_megabytes_of
from radixmlp.verify.training_variants import (
    DENSE_LOSSES,
    DENSE_PADDED_ROWS,
    DENSE_RAGGED,
    build_losses,
    load_trainee,
    mask_prompts,
    step,
)
from radixmlp.verify.workloads import make_workload

SHARE_OF_IDEAL = 0.85
STEP_MEMORY = 1 / 3
HEAD_MEMORY = 1 / 10
CURVE = 1e-5
_LEAN_DENSE = (DENSE_PADDED_ROWS, DENSE_RAGGED)  # transformers' own loss keeps logits of every row besides


@dataclass(frozen=True)
class TrainingSetting:
    """What is run. The defaults are the figures' shape.

    Args:
        model, vocabulary, dtype: as `load_trainee` takes them.
        title: the model in words.
        prompt, completion, group: tokens shared, tokens of each sequence's own, sequences.
        rounds: timed steps of each path.
        curve_model, curve_workload, curve_masked, curve_steps: of the loss curves, in fp32.
        head: vocabulary, rows and hidden size of the head whose memory is measured, in fp32.
    """

    model: str = "qwen3-0.6b-width:4"
    vocabulary: int = 32_000
    dtype: str = "bfloat16"
    title: str = "Qwen3-0.6B width, 4 layers"
    prompt: int = 512
    completion: int = 64
    group: int = 16
    rounds: int = 3
    curve_model: str = "tiny-qwen3"
    curve_workload: str = "synthetic:64+16x8"
    curve_masked: int = 64
    curve_steps: int = 20
    head: tuple[int, int, int] = (150_000, 8_192, 256)

    @property
    def workload(self) -> str:
        """As `make_workload` takes it."""
        return f"synthetic:{self.prompt}+{self.completion}x{self.group}"


def training_bars(progress: Progress, setting: TrainingSetting | None = None) -> list[Bar]:
    """Forward and backward on the trie against dense: speed, memory, loss curves, and the chunked head's memory."""
    setting = setting or TrainingSetting()
    losses = {"all tokens": 0, "completions": setting.prompt}
    return [
        *_speed_bars(setting, losses, progress),
        *(_memory_bar(setting, name, masked, progress) for name, masked in losses.items()),
        _curve_bar(setting, progress),
        _head_bar(setting, progress),
    ]


def _speed_bars(setting: TrainingSetting, losses: dict[str, int], progress: Progress) -> list[Bar]:
    model = load_trainee(setting.model, setting.vocabulary, setting.dtype)
    batch = make_workload(setting.workload, None, setting.vocabulary).batch
    _warm_up(model)
    progress("truth in fp32, each sequence alone")
    truth = true_logprobs(model, batch)
    wrong = wrong_logprobs(model, batch, TRIE, truth)
    bars = []
    for name, masked in losses.items():
        labels = mask_prompts(batch, masked)
        expected = mean_loss(truth, batch, labels)
        told = partial(_prefixed, progress, name)
        bars.append(_speed_bar(setting, name, model, batch, labels, expected, wrong, told))
    return bars


def _speed_bar(
    setting: TrainingSetting,
    name: str,
    model: Any,
    batch: RaggedBatch,
    labels: Tensor,
    expected: float,
    wrong: str | None,
    progress: Progress,
) -> Bar:
    """The first step of each path is checked, and picks the dense one that is timed against the trie."""
    losses = build_losses(model, batch, labels, [*DENSE_LOSSES, TRIE])
    values: dict[str, float] = {}
    gradients: dict[str, Gradients] = {}

    def first_step(which: str) -> None:
        progress(f"first step: {which}")
        values[which] = step(model, losses[which])

    first = {}
    for which in losses:
        first[which] = time_interleaved({which: partial(first_step, which)}, 1, warmup=0).median(which)
        gradients[which] = gradients_of(model)
    dense = min(DENSE_LOSSES, key=first.__getitem__)
    dtype = next(model.parameters()).dtype
    value_reasons = wrong_values(values, expected, dtype)
    reasons = [wrong, *(f"{which}: {why}" for which, why in value_reasons.items() if which in (TRIE, dense))]
    reasons.append(wrong_gradient(gradients[TRIE], [gradients[which] for which in DENSE_LOSSES], dtype))
    gradients.clear()
    calls = {which: partial(step, model, losses[which]) for which in (dense, TRIE)}
    timings = time_interleaved(calls, setting.rounds, warmup=0, progress=progress)
    ratio = timings.ratio(dense, TRIE)
    flops = step_flops(DecoderShape.from_config(model.config), batch, radixmlp.build_plan(batch), labels)
    return Bar(
        f"training: trie over dense, loss of {name}",
        ratio.median,
        SHARE_OF_IDEAL * flops.speedup,
        "higher",
        f"{_shape(setting)}, head on {flops.dense_logits:,} against {flops.trie_logits:,} rows",
        (ratio.q20, ratio.q80),
        flops.speedup,
        "; ".join(reason for reason in reasons if reason) or None,
        {
            "seconds": timings.median(TRIE),
            "against": dense,
            "against_seconds": timings.median(dense),
            "rounds": timings.rounds,
            "first_seconds": first,
            "loss": values,
            "true_loss": expected,
            **_rows(flops),
        },
    )


def _memory_bar(setting: TrainingSetting, name: str, masked: int, progress: Progress) -> Bar:
    peaks = {}
    for variant in (*_LEAN_DENSE, TRIE):
        progress(f"{name}: memory of {variant} in a fresh process")
        asked = Step(variant, setting.model, setting.vocabulary, setting.dtype, setting.workload, masked)
        peaks[variant] = peak_megabytes_of(asked)
    return Bar(
        f"training: trie's peak memory over dense, loss of {name}",
        peaks[TRIE] / min(peaks[dense] for dense in _LEAN_DENSE),
        STEP_MEMORY,
        "lower",
        f"{_shape(setting)}; peak above weights and gradients, fresh process",
        details={"peak_mb": peaks},
    )


def _curve_bar(setting: TrainingSetting, progress: Progress) -> Bar:
    progress(f"loss curves: {setting.curve_steps} steps, shared and un-shared")
    asked = (setting.curve_model, setting.curve_workload, setting.curve_masked, setting.curve_steps)
    shared, own = curve(*asked, shared=True), curve(*asked, shared=False)
    worst = max(abs(a - b) / abs(b) for a, b in zip(shared, own, strict=True))
    targets = f"loss of the tokens after the first {setting.curve_masked}"
    shape = f"{setting.curve_model}, {setting.curve_workload}, {targets}"
    return Bar(
        "training: loss curves, shared against un-shared, largest relative difference",
        worst,
        CURVE,
        "lower",
        f"{shape}, fp32, {setting.curve_steps} AdamW steps of 1e-3, a new batch each",
        details={"shared": shared, "unshared": own},
    )


def _head_bar(setting: TrainingSetting, progress: Progress) -> Bar:
    peaks = {}
    for variant in ("chunked", "naive"):
        progress(f"the {variant} head's memory in a fresh process")
        peaks[variant] = peak_megabytes_of(HeadStep(variant, *setting.head))
    vocabulary, rows, hidden = setting.head
    shape = f"vocabulary {vocabulary:,}, {rows:,} rows, hidden size {hidden}, one layer, fp32"
    return Bar(
        "training: chunked head's peak memory over the naive head's",
        peaks["chunked"] / peaks["naive"],
        HEAD_MEMORY,
        "lower",
        f"{shape}; peak of loss and backward above the weights, fresh process",
        details={"peak_mb": peaks},
    )


def _warm_up(model: Any) -> None:
    """The checks of a model's first use, and each path's code, on a tiny batch."""
    tiny = RaggedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]])
    for loss in build_losses(model, tiny, None, [*DENSE_LOSSES, TRIE]).values():
        step(model, loss)


def _shape(setting: TrainingSetting) -> str:
    shape = f"{setting.prompt} + {setting.completion} tokens x {setting.group}"
    return f"{setting.title}, {shape}, {setting.dtype}, vocabulary {setting.vocabulary:,}; plan + forward + backward"


def _rows(flops: StepFlops) -> dict[str, int]:
    return {"dense_rows": flops.dense_rows, "trie_rows": flops.trie_rows}


def _prefixed(progress: Progress, name: str, what: str) -> None:
    progress(f"{name}, {what}")
