"""The published numbers of arXiv 2601.15013, as typed rows; each says where it was published.

A column's unit is the end of its name: `_s` seconds, `_us` microseconds, `_gb` gigabytes, `_percent`, `_tokens`,
`_mtok_per_s` millions of tokens a second. What was left empty is None.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

FOLDER = Path(__file__).resolve().parent / "published"
_YES_NO = {"yes": True, "no": False}

Row = TypeVar("Row")


@dataclass(frozen=True)
class Latency:
    """Percentiles over requests, from the paper's raw timing files (H100, fp16).

    `run`: msmarco_v1.1_validation, query_first_vs_vllm or document_first_vs_vllm. `engine`: tei, tei+radixmlp, vllm.
    """

    run: str
    engine: str
    model: str
    max_batch_tokens: int
    requests: int
    p50_s: float
    p90_s: float
    mean_s: float
    source: str


@dataclass(frozen=True)
class RowCopies:
    """One gather or scatter of `rows` rows of `width` elements: the framework's own kernel and the paper's."""

    rows: int
    width: int
    shape: str
    dtype: str
    device: str
    native_us: float
    kernel_us: float
    speedup: float
    source: str


@dataclass(frozen=True)
class IndexTime:
    """Building the index maps of one batch; `at_most`: the time is an upper bound."""

    sequences: int | None
    tokens_per_sequence: int | None
    tokens: int
    time_us: float
    at_most: bool
    throughput_mtok_per_s: float | None
    source: str


@dataclass(frozen=True)
class Rerank:
    """The paper's MS MARCO table; `memory_percent` is its memory column as printed."""

    model: str
    max_batch_tokens: int
    dense_s: float
    radix_s: float
    speedup: float
    memory_percent: float
    source: str


@dataclass(frozen=True)
class Synthetic:
    """The synthetic workload's largest speed-ups; `at_most`: published as "up to"."""

    model: str
    prefix_tokens: int
    suffix_tokens: int
    batch: int
    r: float
    speedup: float
    at_most: bool
    source: str


@dataclass(frozen=True)
class AgainstVllm:
    """One statistic of latency beside vLLM's, on one of the paper's datasets."""

    dataset: str
    order: str
    statistic: str
    radix_s: float
    vllm_s: float
    radix_memory_gb: float | None
    vllm_memory_gb: float | None
    source: str


@dataclass(frozen=True)
class Claim:
    """A single number: a serving setting or a limit."""

    name: str
    value: float
    unit: str
    source: str


def latencies() -> list[Latency]:
    """Every run of latency.csv."""
    return read_rows(FOLDER / "latency.csv", Latency)


def row_copies() -> list[RowCopies]:
    """The gather/scatter kernel table."""
    return read_rows(FOLDER / "copies.csv", RowCopies)


def index_times() -> list[IndexTime]:
    """The CPU index builder's times."""
    return read_rows(FOLDER / "index.csv", IndexTime)


def reranking() -> list[Rerank]:
    """The MS MARCO table."""
    return read_rows(FOLDER / "rerank.csv", Rerank)


def synthetic() -> list[Synthetic]:
    """The synthetic speed-ups."""
    return read_rows(FOLDER / "synthetic.csv", Synthetic)


def against_vllm() -> list[AgainstVllm]:
    """The comparison with vLLM, as printed."""
    return read_rows(FOLDER / "vllm.csv", AgainstVllm)


def claims() -> dict[str, Claim]:
    """Single numbers by name."""
    return {claim.name: claim for claim in read_rows(FOLDER / "claims.csv", Claim)}


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a CSV file whose columns are the fields of the dataclass `kind`.

    Raises:
        ValueError: other columns, a cell that is not of its field's type, or a row without a source; names the file,
            the line and the column.
    """
    names, types = [field.name for field in fields(kind)], get_type_hints(kind)  # type: ignore[arg-type]
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != names:
            raise ValueError(f"{path.name} has columns {reader.fieldnames}: expected {names}")
        rows = []
        for cells in reader:
            where = f"{path.name}, line {reader.line_num}"
            if None in cells or None in cells.values():
                raise ValueError(f"{where}: expected {len(names)} cells")
            rows.append(kind(**{name: _cell(cells[name], types[name], f"{where}, {name}") for name in names}))
    return rows


def _cell(text: str, kind: Any, where: str) -> Any:
    optional = get_origin(kind) is UnionType
    if optional:
        if text == "":
            return None
        kind = next(part for part in get_args(kind) if part is not type(None))
    try:
        if kind is bool:
            return _YES_NO[text]
        if text == "":
            raise ValueError
        return kind(text)
    except (KeyError, ValueError):
        expected = "yes or no" if kind is bool else f"a {kind.__name__}"
        raise ValueError(f"{where}: {text!r} is not {expected}") from None
