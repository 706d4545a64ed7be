"""Run a request file through the engine, batch by batch into the journal, then write the output."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from radixmlp.optimized.jobs.journal import Journal
from radixmlp.optimized.jobs.outputs import Row, check_output, write_output
from radixmlp.optimized.jobs.requests import BadLine, Request, RequestFileError, read_requests
from radixmlp.optimized.jobs.tasks import Task, Texts

# Units ordered together: enough for many batches that share prefixes, few enough to hold in memory.
UNITS_AT_ONCE = 32_768

Progress = Callable[[int, int], None]  # (lines finished, lines in all)


class Unit(NamedTuple):
    """One piece of work: a part of a line's request, as strings for the engine."""

    line: int
    part: int
    texts: Texts


class UnitError(ValueError):
    """The engine refuses a request; the message begins with its line."""


@dataclass(frozen=True)
class InputFile:
    """What the results depend on of an input: its bytes; and how many lines it has."""

    path: Path
    sha256: str
    lines: int

    @classmethod
    def read(cls, path: Path) -> InputFile:
        """Read it once.

        Raises:
            RequestFileError: it is missing, a folder, or unreadable.
        """
        if str(path) == "-":
            raise RequestFileError("standard input cannot be read again after an interruption: give a file")
        digest, lines, last = hashlib.sha256(), 0, b"\n"
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                    lines += block.count(b"\n")
                    last = block[-1:]
        except OSError as error:
            raise RequestFileError(f"cannot read {path}: {error.strerror or error}") from None
        return cls(path, digest.hexdigest(), lines + (last != b"\n"))


@dataclass(frozen=True)
class Outcome:
    """What a job did.

    Args:
        requests: rows of the output.
        computed: units computed by this run; `known`: those an earlier run had computed.
        bad_lines: lines left out, with reasons.
    """

    requests: int
    computed: int
    known: int
    bad_lines: list[BadLine]


def run_job(
    task: Task,
    engine: Callable[[], Any],
    source: InputFile,
    output: Path,
    journal: Journal,
    progress: Progress | None = None,
) -> Outcome:
    """Compute what the journal does not hold yet, then write `output`.

    Args:
        engine: loads the engine; called only if something is left to compute.
        progress: told after each batch.

    Raises:
        UnitError: the engine refuses a request (too long, no tokens, a result that is not finite). What was
            computed stays in the journal.
        RequestFileError: the input changed while it was read.
    """
    check_output(output, task)
    bad: list[BadLine] = []
    known, loaded = len(journal), None
    for units, last_line in _chunks(task, source.path, bad):
        done = journal.done(units[0].line, units[-1].line)
        left = [unit for unit in units if (unit.line, unit.part) not in done]
        if left:
            loaded = engine() if loaded is None else loaded
            _compute(task, loaded, left, journal, _told(progress, units[0].line, last_line, source.lines))
    computed = len(journal) - known
    if InputFile.read(source.path).sha256 != source.sha256:
        raise RequestFileError(f"{source.path} changed while it was read: run again with --restart")
    count = sum(1 for item in _accepted(task, source.path, []))
    write_output(output, task, _rows(task, source.path, journal), count, journal.width())
    return Outcome(count, computed, known, bad)


def _told(progress: Progress | None, first: int, last: int, lines: int) -> Callable[[float], None] | None:
    if progress is None:
        return None
    return lambda share: progress(int(first - 1 + share * (last - first + 1)), lines)


def _compute(
    task: Task, engine: Any, units: list[Unit], journal: Journal, told: Callable[[float], None] | None
) -> None:
    finished = 0

    def keep(indices: Sequence[int], values: Tensor) -> None:
        nonlocal finished
        numbers = values.float().reshape(len(indices), -1).numpy()
        journal.add((units[i].line, units[i].part, row) for i, row in zip(indices, numbers, strict=True))
        finished += len(indices)
        if told is not None:
            told(finished / len(units))

    try:
        task.run(engine, [unit.texts for unit in units], keep)
    except ValueError as error:
        index = getattr(error, "index", None)
        if index is None:
            raise
        raise UnitError(f"line {units[index].line}: {error}") from None


def _accepted(task: Task, path: Path, bad: list[BadLine]) -> Iterator[Request]:
    """The requests of the task's kind; everything else is added to `bad`."""
    for item in read_requests(path):
        if isinstance(item, BadLine):
            bad.append(item)
        elif item.kind != task.kind:
            bad.append(BadLine(item.line, f"{task.name} takes another kind of request than {item.kind!r}"))
        else:
            yield item


def _chunks(task: Task, path: Path, bad: list[BadLine]) -> Iterator[tuple[list[Unit], int]]:
    """(units, last line) of whole requests, at most about `UNITS_AT_ONCE` units at once."""
    units: list[Unit] = []
    for request in _accepted(task, path, bad):
        units += [Unit(request.line, part, texts) for part, texts in enumerate(task.units(request))]
        if len(units) >= UNITS_AT_ONCE:
            yield units, request.line
            units = []
    if units:
        yield units, units[-1].line


def _rows(task: Task, path: Path, journal: Journal) -> Iterator[Row]:
    """Each request with its results: both come in the order of lines."""
    for request, (line, numbers) in zip(_accepted(task, path, []), journal.lines(), strict=True):
        if line != request.line:
            raise RuntimeError(f"the journal lacks the results of line {request.line}: run with --restart")
        yield {"line": request.line, "id": request.id, **task.row(request, numbers)}, numbers
