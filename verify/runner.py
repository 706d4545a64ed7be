"""Run the cells of a matrix one by one; an error inside a cell becomes a failed record, never a crash."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, get_args

import torch

from radixmlp.optimized.attention import attention_backends
from radixmlp.verify import smollm2
from radixmlp.verify.compression import check_index
from radixmlp.verify.gradients import check_gradients
from radixmlp.verify.matrix import Cell, Settings
from radixmlp.verify.memory import measure_memory
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.parity import check_parity
from radixmlp.verify.records import Kind, Record, Workload
from radixmlp.verify.speed import JUDGED_INDEX_TOKENS, measure_index, measure_speed
from radixmlp.verify.subject import Subject
from radixmlp.verify.workloads import is_text, make_workload

BUILT_IN = ("dense-sdpa", "scatter-sdpa", "trie-sdpa", "auto")  # these must serve every model
# On a CPU they refuse, or compile for longer than they run: there they are on trial by name only.
FOR_GPU = ("dense-flash", "scatter-flash", "trie-flex", "trie-triton")
# Index maps are judged on the ids that SmolLM2's tokenizer gives.
_INDEX_VOCAB = 49_152
_PAIRS_QUICK, _PAIRS = 3, 5
_TINY_PARAMETERS = 1_000_000


class Runner:
    """Keeps what cells share: one loaded model, the workloads, and which parities are green."""

    def __init__(self, settings: Settings, subject: Subject) -> None:
        self.settings = settings
        self.subject = subject
        self.records: list[Record] = []
        self._loaded: tuple[tuple[str, str], LoadedModel] | None = None
        self._workloads: dict[tuple[str, str], Workload] = {}

    @property
    def attentions(self) -> list[str]:
        """The backends on trial: those named, or all that are registered and meant for the device."""
        if self.settings.attentions:
            return list(self.settings.attentions)
        on_cpu = torch.device(self.settings.device).type == "cpu"
        return [name for name in attention_backends() if not (on_cpu and name in FOR_GPU)]

    def run(self, cell: Cell, progress: Callable[[str], None]) -> list[Record]:
        """The records of one cell, also kept in `self.records`."""
        try:
            records = self._measure(cell, progress)
        except Exception as error:  # the other cells are still worth running
            records = [self._error(cell, error)]
        self.records += records
        return records

    def _measure(self, cell: Cell, progress: Callable[[str], None]) -> list[Record]:
        if cell.kind == "index":
            return self._index(cell)
        if cell.kind == "memory":
            return self._memory(cell, progress)
        progress("loading the model")
        loaded = self._model(cell)
        workload = self._workload(cell.workload, cell.model, loaded.vocab_size, lambda: loaded.tokenizer)
        if cell.kind in ("parity", "gradient"):
            return self._judge(cell, loaded, workload, progress)
        green = self._green(cell)
        if not green or _has_empty_sequence(workload):
            return []
        progress("timing " + ", ".join(green))
        pairs = _PAIRS_QUICK if self.settings.quick else _PAIRS
        return measure_speed(
            loaded.model, cell.model, workload, green, cell.dtype, self.settings.device, pairs
        )

    def _judge(
        self, cell: Cell, loaded: LoadedModel, workload: Workload, progress: Callable[[str], None]
    ) -> list[Record]:
        tiny = sum(parameter.numel() for parameter in loaded.model.parameters()) < _TINY_PARAMETERS
        with _one_thread() if tiny else nullcontext():
            if cell.kind == "gradient":
                return check_gradients(loaded, workload, self.attentions, self.subject)
            if self.settings.attentions:
                return check_parity(loaded, workload, self.attentions, self.subject, progress)
            # "auto" is a choice between the others: once for each small case is enough.
            attentions = [*self.attentions, "auto"] if tiny else self.attentions
            may_refuse = [name for name in attentions if name not in BUILT_IN]
            return check_parity(loaded, workload, attentions, self.subject, progress, may_refuse)

    def _index(self, cell: Cell) -> list[Record]:
        options = self.settings.index_options()
        tokenizer = smollm2.load_tokenizer() if is_text(cell.workload) else None
        workload = make_workload(cell.workload, tokenizer, _INDEX_VOCAB, **options)
        timed = workload.batch.num_tokens >= JUDGED_INDEX_TOKENS
        return check_index(workload, self.subject) + (measure_index(workload) if timed else [])

    def _memory(self, cell: Cell, progress: Callable[[str], None]) -> list[Record]:
        green = self._green(cell)
        workload = self._workloads.get((cell.model, cell.workload))
        if not green or workload is None or _has_empty_sequence(workload):
            return []
        if self.settings.quick:  # every backend costs a process
            green = [name for name in green if name.startswith("trie")] or green
        self._loaded = None  # room for the processes
        return measure_memory(cell.model, workload, green, cell.dtype, self.settings.device, progress)

    def _model(self, cell: Cell) -> LoadedModel:
        key = (cell.model, cell.dtype)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # never two large models at once
            self._loaded = (key, load_model(cell.model, cell.dtype, self.settings.device))
        return self._loaded[1]

    def _workload(self, name: str, model: str, vocab_size: int, tokenizer: Callable[[], Any]) -> Workload:
        key = (model, name)
        if key not in self._workloads:
            options = self.settings.workload_options()
            encoder = tokenizer() if is_text(name) else None
            self._workloads[key] = make_workload(name, encoder, vocab_size, **options)
        return self._workloads[key]

    def _green(self, cell: Cell) -> list[str]:
        """Backends whose every parity record for the cell's model, workload and dtype passed."""
        where = (cell.model, cell.workload, cell.dtype)
        parity = [r for r in self.records if r.kind == "parity" and (r.model, r.workload, r.dtype) == where]
        if any(not r.passed for r in parity if r.attention == "none"):
            return []
        judged = {r.attention for r in parity if r.limit is not None}
        red = {r.attention for r in parity if not r.passed}
        return [name for name in self.attentions if name in judged - red]

    def _error(self, cell: Cell, error: Exception) -> Record:
        kind: Kind = cell.kind if cell.kind in get_args(Kind) else "parity"  # type: ignore[assignment]
        labels = (cell.model, cell.workload, "none", cell.dtype, self.settings.device)
        reason = f"{type(error).__name__}: {error}"[:500]
        return Record(kind, *labels, "error", math.inf, 0.0, False, {"error": reason})


@contextmanager
def _one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _has_empty_sequence(workload: Workload) -> bool:
    return bool((workload.batch.lengths == 0).any())
