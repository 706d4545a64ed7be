"""Backends of an experiment through the harness: parity, planted faults, then speed and memory if those are green."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from radixmlp.optimized.attention import AttentionBackend, attention_backends
from radixmlp.reference import AttentionSpec
from radixmlp.verify.console import Watch
from radixmlp.verify.experiments.faults import Guarded, Outcome
from radixmlp.verify.experiments.planting import PLAIN_MODEL, plant_faults, registered
from radixmlp.verify.experiments.timing import memory_rows, speed_rows, timed_dtype
from radixmlp.verify.gradients import check_gradients
from radixmlp.verify.models import load_model
from radixmlp.verify.parity import check_parity
from radixmlp.verify.records import Record
from radixmlp.verify.subject import fast_path
from radixmlp.verify.workloads import is_text, make_workload

FEATURE_MODELS = {"tiny-mistral": "sliding window", "tiny-gemma2": "softcap", "tiny-gpt-oss": "sinks"}
_ROUNDS_QUICK, _ROUNDS = 3, 5


@dataclass(frozen=True)
class TrialSettings:
    """What to run backends on.

    Args:
        quick: fewer cases, a small timed batch.
        model, workload: to time and to measure memory on; None: those of the mode.
        device: "cpu" or "cuda".
    """

    quick: bool = False
    model: str | None = None
    workload: str | None = None
    device: str = "cpu"

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of the tiny models' parity."""
        return (
            ("float64", "float32", "bfloat16")
            if self.quick
            else ("float64", "float32", "float16", "bfloat16")
        )

    @property
    def shapes(self) -> tuple[str, ...]:
        """Workloads of the tiny models' parity."""
        if self.quick:
            return ("tree", "edges")
        return ("synthetic", "tree", "edges", "nothing-shared", "all-equal", "one-sequence")

    @property
    def timed(self) -> list[tuple[str, str]]:
        """(model, workload) to time; memory is measured on the first."""
        model = self.model or "qwen3-0.6b-width"
        if self.workload is not None:
            return [(model, self.workload)]
        return [
            (model, name)
            for name in (("synthetic:64+16x4",) if self.quick else ("synthetic:512+64x16", "tree"))
        ]

    @property
    def rounds(self) -> int:
        """Timed rounds."""
        return _ROUNDS_QUICK if self.quick else _ROUNDS


@dataclass
class Trial:
    """Everything a trial found out.

    Args:
        backends: their names.
        parity: records of tiny models and of the timed ones, gradients among them.
        refused: {backend: {what: reason}} of what a backend says it does not serve.
        faults: one outcome per backend and fault.
        speed: one row per timed batch and variant.
        memory: one row per variant.
    """

    backends: list[str]
    parity: list[Record] = field(default_factory=list)
    refused: dict[str, dict[str, str]] = field(default_factory=dict)
    faults: list[Outcome] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)

    def red(self, name: str) -> list[Record]:
        """Failed parity records of one backend, and those that concern all of them."""
        return [r for r in self.parity if not r.passed and r.attention in (name, "none")]

    def judged(self, name: str) -> int:
        """Parity records of one backend that had a limit."""
        return sum(r.limit is not None for r in self.parity if r.attention == name)

    def planted(self, name: str, fault: str) -> list[Outcome]:
        """What became of one fault in one backend, case by case."""
        return [each for each in self.faults if (each.attention, each.fault) == (name, fault)]

    def serves(self, name: str) -> bool:
        """Whether the backend serves plain causal attention on this device."""
        return "plain causal attention" not in self.refused.get(name, {})

    def green(self, name: str) -> bool:
        """Whether parity judged something, nothing failed, and every planted fault was caught."""
        return (
            self.judged(name) > 0
            and not self.red(name)
            and all(outcome.caught for outcome in self.faults if outcome.attention == name)
        )

    @property
    def passed(self) -> bool:
        """Whether every backend that serves here is green."""
        return all(self.green(name) for name in self.backends if self.serves(name))


def run_trial(
    backends: Sequence[AttentionBackend], settings: TrialSettings, watch: Watch, folder: Path
) -> Trial:
    """Put backends through the harness.

    Args:
        folder: of the experiment; the fresh processes that measure memory load its backends from there.

    Raises:
        ValueError: no backends, or a name that is taken.
    """
    _check_backends(backends)
    trial = Trial([backend.name for backend in backends])
    for backend in backends:
        reason = _refusal(backend, settings)
        if reason is not None:
            trial.refused[backend.name] = {"plain causal attention": reason}
    serving = [backend for backend in backends if trial.serves(backend.name)]
    if serving:
        with registered([Guarded(backend) for backend in serving]):
            _check_parity(trial, serving, settings, watch)
        for backend in serving:
            if trial.red(backend.name):
                continue  # a fault more would prove nothing
            watch.start(f"planted faults: {backend.name}")
            refused = trial.refused.get(backend.name, {})
            trial.faults += plant_faults(backend, refused, settings.device, watch.say)
            watch.finish([])
    if serving and trial.passed:
        with registered(serving):
            _measure(trial, serving, settings, watch, folder)
    return trial


def steps(backends: Sequence[AttentionBackend], settings: TrialSettings) -> int:
    """How many steps `run_trial` tells its watch of, where nothing is refused and nothing is red."""
    return len(_parity_cells(settings)) + 1 + len(backends) + 2 * len(settings.timed) + 1 if backends else 0


def _check_backends(backends: Sequence[AttentionBackend]) -> None:
    if not backends:
        raise ValueError("backends() returned none: leave it out where there is nothing to put on trial")
    for backend in backends:
        if not isinstance(backend, AttentionBackend):
            raise ValueError(
                f"{backend!r} is no attention backend: it needs name, unsupported() and __call__()"
            )
        if backend.name in attention_backends():
            raise ValueError(f"a backend called {backend.name!r} is registered already: choose another name")


def _refusal(backend: AttentionBackend, settings: TrialSettings) -> str | None:
    return backend.unsupported(AttentionSpec(1.0), torch.device(settings.device), torch.float32, False)


def _parity_cells(settings: TrialSettings) -> list[tuple[str, str, str]]:
    """(model, dtype, workload), model by model."""
    cells = [(PLAIN_MODEL, dtype, shape) for dtype in settings.dtypes for shape in settings.shapes]
    shapes = ("tree",) if settings.quick else ("tree", "edges")
    return cells + [(model, "float32", shape) for model in FEATURE_MODELS for shape in shapes]


def _check_parity(
    trial: Trial, backends: Sequence[AttentionBackend], settings: TrialSettings, watch: Watch
) -> None:
    names = [backend.name for backend in backends]
    for model, dtype, shape in _parity_cells(settings):
        watch.start(f"parity: {model}, {shape}, {dtype}")
        loaded = load_model(model, dtype, settings.device)
        workload = make_workload(shape, None, loaded.vocab_size)
        records = check_parity(loaded, workload, names, fast_path(), watch.say, may_refuse=names)
        _keep(trial, records, FEATURE_MODELS.get(model, dtype))
        watch.finish(records)
    watch.start(f"gradients: {PLAIN_MODEL}, edges, float64")
    spec, device = AttentionSpec(1.0), torch.device(settings.device)
    training = []
    for backend in backends:
        reason = backend.unsupported(spec, device, torch.float64, True)
        if reason is None:
            training.append(backend.name)
        else:
            trial.refused.setdefault(backend.name, {})["training"] = reason
    records = []
    if training:
        loaded = load_model(PLAIN_MODEL, "float64", settings.device)
        records = check_gradients(
            loaded, make_workload("edges", None, loaded.vocab_size), training, fast_path()
        )
    trial.parity += records
    watch.finish(records)


def _keep(trial: Trial, records: Sequence[Record], what: str) -> None:
    """Records into the trial; what a backend refused goes where refusals are."""
    for record in records:
        if record.metric == "refused":
            trial.refused.setdefault(record.attention, {})[what] = record.details["reason"]
        else:
            trial.parity.append(record)


def _measure(
    trial: Trial, backends: Sequence[AttentionBackend], settings: TrialSettings, watch: Watch, folder: Path
) -> None:
    """Speed where parity is green on the very batch that is timed, then memory on the first of those batches."""
    for index, (model, name) in enumerate(settings.timed):
        dtype = timed_dtype(backends, settings.device)
        watch.start(f"parity: {model}, {name}, {dtype}")
        loaded = load_model(model, dtype, settings.device)
        workload = make_workload(name, loaded.tokenizer if is_text(name) else None, loaded.vocab_size)
        names = [backend.name for backend in backends]
        records = check_parity(loaded, workload, names, fast_path(), watch.say, may_refuse=names)
        _keep(trial, records, f"{model}, {name}, {dtype}")
        watch.finish(records)
        judged = {record.attention for record in records if record.limit is not None}
        green = [each for each in names if each in judged and not trial.red(each)]
        if not green:
            continue
        watch.start(f"speed: {model}, {name}, {dtype}")
        trial.speed += speed_rows(loaded, workload, green, dtype, settings.rounds, watch.say)
        watch.finish([])
        if index == 0:
            watch.start(f"memory: {model}, {name}, {dtype}")
            del loaded
            trial.memory += memory_rows(model, workload, green, dtype, settings.device, watch.say, folder)
            watch.finish([])
