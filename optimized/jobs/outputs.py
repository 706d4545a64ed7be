"""Where results go: JSON lines, Parquet or .npy, by the file's suffix. A file appears only when it is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from radixmlp.optimized.jobs.tasks import Task

SUFFIXES = (".jsonl", ".parquet", ".npy")
_ROW_GROUP = 4096

# (fields of the row, [units, width] numbers behind it)
Row = tuple[dict[str, Any], np.ndarray]


class OutputError(ValueError):
    """The output cannot be written as asked; the message says why and what to do."""


def check_output(path: Path, task: Task) -> None:
    """Refuse an output before anything is computed.

    Raises:
        OutputError: an unknown suffix, a format the task has no shape for, a missing package or folder.
    """
    if path.suffix not in SUFFIXES:
        raise OutputError(
            f"{path.name} ends in {path.suffix or 'nothing'!r}: give one of {', '.join(SUFFIXES)}"
        )
    if path.suffix == ".npy" and task.numbers is None:
        raise OutputError(
            f"{task.name} gives each request as many numbers as it has passages, which is no array: "
            "write .jsonl or .parquet"
        )
    if path.suffix == ".parquet":
        _pyarrow()
    if path.is_dir():
        raise OutputError(f"{path} is a folder: give a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder {path.parent}: make it first")
    if not os.access(path.parent, os.W_OK):
        raise OutputError(f"the folder {path.parent} cannot be written to")


def write_output(path: Path, task: Task, rows: Iterable[Row], count: int, width: int) -> None:
    """Write all rows beside `path` and move the file there.

    Args:
        rows: in the order of the input; consumed as they are written.
        count, width: rows there are, and numbers behind each unit; an .npy file is [count, width of a row].
    """
    with _replaced(path) as part:
        if path.suffix == ".jsonl":
            _write_jsonl(part, rows)
        elif path.suffix == ".parquet":
            _write_parquet(part, task, rows)
        else:
            _write_npy(part, task, rows, count, width)


def part_of(path: Path) -> Path:
    """Where an output lies until it is whole."""
    return path.with_name(f".{path.name}.part")


@contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    part = part_of(path)
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_jsonl(part: Path, rows: Iterable[Row]) -> None:
    with part.open("w", encoding="utf-8", newline="\n") as file:
        for row, _numbers in rows:
            file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")


def _write_parquet(part: Path, task: Task, rows: Iterable[Row]) -> None:
    """Columns as in JSON lines; ids, and rankings by ids, are strings, as a column has one type."""
    pyarrow, parquet = _pyarrow()
    text, number = pyarrow.string(), pyarrow.float32()
    types = {
        "line": pyarrow.int64(),
        "id": text,
        "embedding": pyarrow.list_(number),
        "scores": pyarrow.list_(number),
        "ranking": pyarrow.list_(text),
        "logprob": number,
        "num_tokens": pyarrow.int64(),
    }
    schema = pyarrow.schema([(name, types[name]) for name in ("line", "id", *task.columns)])
    with parquet.ParquetWriter(part, schema) as writer:
        for group in _groups(rows):
            for row in group:
                row["id"] = None if row["id"] is None else str(row["id"])
                if "ranking" in row:
                    row["ranking"] = [str(name) for name in row["ranking"]]
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))


def _write_npy(part: Path, task: Task, rows: Iterable[Row], count: int, width: int) -> None:
    assert task.numbers is not None
    example = task.numbers(np.zeros((1, width), dtype=np.float32)) if width else np.zeros(0, dtype=np.float32)
    shape = (count, *example.shape)
    if count == 0 or 0 in shape:
        with part.open("wb") as file:
            np.save(file, np.zeros(shape, dtype=np.float32))
        return
    array = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
    for i, (_row, numbers) in enumerate(rows):
        array[i] = task.numbers(numbers)
    array.flush()


def _groups(rows: Iterable[Row]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for row, _numbers in rows:
        group.append(row)
        if len(group) == _ROW_GROUP:
            yield group
            group = []
    if group:
        yield group


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise OutputError(
            "writing .parquet needs the package pyarrow: pip install pyarrow, or write .jsonl"
        ) from None
    return pyarrow, parquet
