"""Which models meet which workloads, dtypes and kinds of measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from radixmlp.verify.models import DTYPES, SMOLLM2
from radixmlp.verify.passages import msmarco_is_local

CellKind = Literal["index", "parity", "gradient", "speed", "memory"]


@dataclass(frozen=True)
class Settings:
    """What a person asked for; empty tuples and None leave the choice to the harness.

    Args:
        quick: the short matrix.
        models, workloads, attentions, dtypes: names.
        data: a JSONL file for the text workloads.
        prefix_lengths: shared tokens of additional synthetic workloads.
        device: "cpu", "cuda".
        out: folder of the report.
    """

    quick: bool = False
    models: tuple[str, ...] = ()
    workloads: tuple[str, ...] = ()
    attentions: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    data: Path | None = None
    prefix_lengths: tuple[int, ...] = ()
    device: str = "cpu"
    out: Path = Path("build/verify")

    def workload_options(self) -> dict[str, Any]:
        """Sizes of the text workloads that models run: one query, the same for every kind of measurement."""
        options: dict[str, Any] = {"passages": 5, "max_length": 88} if self.quick else {"passages": 10}
        return options if self.data is None else {**options, "data": self.data}

    def index_options(self) -> dict[str, Any]:
        """Sizes of the text workloads whose index alone is judged, which costs little: many queries."""
        options: dict[str, Any] = {"queries": 5 if self.quick else 30, "passages": 20}
        return options if self.data is None else {**options, "data": self.data}


@dataclass(frozen=True)
class Cell:
    """One measurement to make. `index` cells have neither model nor dtype."""

    kind: CellKind
    workload: str
    model: str = "none"
    dtype: str = "none"

    def __str__(self) -> str:
        where = [part for part in (self.model, self.workload, self.dtype) if part != "none"]
        return f"{self.kind}: {', '.join(where)}"


@dataclass(frozen=True)
class Step:
    """All combinations of these, for each kind."""

    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    workloads: tuple[str, ...]
    kinds: tuple[CellKind, ...] = ("parity",)


_ALL_DTYPES = tuple(DTYPES)
_TINY = ("tiny-qwen3", "tiny-llama", "tiny-mistral", "tiny-gemma2", "tiny-gpt-oss")
_SHAPES = ("synthetic", "tree", "edges", "nothing-shared", "all-equal", "one-sequence")
_TEXTS = ("rerank-query-first", "rerank-document-first", "embed-system-prompt", "few-shot")
_MSMARCO = ("msmarco-query-first", "msmarco-document-first")
_MEASURED: tuple[CellKind, ...] = ("parity", "speed")
_SUFFIX, _BATCH = 64, 8  # of the synthetic workloads over prefix length

_QUICK = (
    Step(("tiny-qwen3", "tiny-mistral", "tiny-gpt-oss"), _ALL_DTYPES, ("synthetic", "tree", "edges")),
    Step(("tiny-qwen3",), ("float64",), ("edges",), ("gradient",)),
    Step((SMOLLM2,), ("float32",), ("rerank-query-first",)),
    Step((SMOLLM2,), ("bfloat16",), ("rerank-query-first",), _MEASURED),
    Step(("qwen3-0.6b-width",), ("float16",), ("synthetic:32+16x4",)),
    Step(("qwen3-0.6b-width",), ("bfloat16",), ("synthetic:256+32x8",), ("parity", "speed", "memory")),
)
_FULL = (
    Step(_TINY, _ALL_DTYPES, _SHAPES + _TEXTS),
    Step(_TINY, ("float64",), ("tree", "edges"), ("gradient",)),
    Step((SMOLLM2,), ("float64", "float16"), ("edges",)),
    Step((SMOLLM2,), ("float32",), ("rerank-query-first", "rerank-document-first", "embed-system-prompt")),
    Step((SMOLLM2,), ("bfloat16",), ("rerank-query-first",), ("parity", "speed", "memory")),
    Step((SMOLLM2,), ("bfloat16",), ("few-shot",), _MEASURED),
    Step(("qwen3-0.6b-width",), ("float16", "bfloat16"), ("synthetic:64+16x4", "nothing-shared")),
    Step(
        ("qwen3-0.6b-width:2",),
        ("bfloat16",),
        tuple(f"synthetic:{prefix}+{_SUFFIX}x{_BATCH}" for prefix in (64, 256, 512)),
        _MEASURED,
    ),
    Step(("qwen3-8b-width",), ("float16",), ("synthetic:64+16x4",)),
    Step(("qwen3-4b-width",), ("bfloat16",), ("synthetic:128+32x8",), ("parity", "speed", "memory")),
)


def plan_cells(settings: Settings) -> list[Cell]:
    """The measurements of a run, none twice: indices first, then model by model and dtype by dtype."""
    cells = dict.fromkeys(cell for step in _steps(settings) for cell in _cells_of(step))
    workloads = dict.fromkeys(
        settings.workloads or [*_index_workloads(settings), *(c.workload for c in cells)]
    )
    index = [Cell("index", workload) for workload in workloads]
    # Stable sort: a loaded model serves all its cells; memory runs in processes of its own, so it goes last.
    first_seen = {pair: i for i, pair in enumerate(dict.fromkeys((c.model, c.dtype) for c in cells))}
    return index + sorted(cells, key=lambda c: (c.kind == "memory", first_seen[c.model, c.dtype]))


def _index_workloads(settings: Settings) -> tuple[str, ...]:
    return (*_SHAPES, *_TEXTS, *(_MSMARCO if msmarco_is_local() else ()))


def _steps(settings: Settings) -> Iterator[Step]:
    table = _QUICK if settings.quick else _FULL
    models = settings.models or tuple(dict.fromkeys(model for step in table for model in step.models))
    lengths = tuple(f"synthetic:{n}+{_SUFFIX}x{_BATCH}" for n in settings.prefix_lengths)
    for model in models:
        for step in _steps_of(table, model):
            workloads = settings.workloads or step.workloads
            if "speed" in step.kinds or settings.models:
                workloads += lengths
            yield Step((model,), settings.dtypes or step.dtypes, workloads, step.kinds)


def _steps_of(table: Sequence[Step], model: str) -> list[Step]:
    """The steps that name a model; for one that none names, those of a model of its kind."""
    own = [step for step in table if model in step.models]
    if own:
        return own
    if model.startswith("tiny-"):
        alike = "tiny-qwen3"
    elif model.startswith("qwen3-") and "-width" in model:
        alike = "qwen3-0.6b-width" if table is _QUICK else "qwen3-4b-width"
    else:
        alike = SMOLLM2
    return [step for step in table if alike in step.models]


def _cells_of(step: Step) -> Iterator[Cell]:
    for model in step.models:
        for dtype in step.dtypes:
            for workload in step.workloads:
                for kind in step.kinds:
                    if kind != "gradient" or dtype == "float64":
                        yield Cell(kind, workload, model, dtype)
