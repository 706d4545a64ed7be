"""What a job has computed so far, on disk: killed at any moment, it goes on where it stopped.

One SQLite file beside the output. Each batch's results are one transaction, so a batch is there whole or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

_TABLES = """
CREATE TABLE IF NOT EXISTS job (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS pins (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    line INTEGER NOT NULL, part INTEGER NOT NULL, value BLOB NOT NULL, PRIMARY KEY (line, part)
) WITHOUT ROWID;
"""


class JournalError(ValueError):
    """The journal belongs to another job, to a running one, or is no journal."""


class Journal:
    """Results by (line, part), float32 vectors, of one job.

    Args:
        path: the file; made where it is missing.
        job: what the results depend on (model, options, the input's hash), JSON-able.
        restart: forget what it holds, whosever it is.

    Raises:
        JournalError: the file is another job's (the message says what differs), another process works on it,
            or it is not a journal.
    """

    def __init__(self, path: Path, job: dict[str, Any], restart: bool = False) -> None:
        self.path = path
        self._connection = sqlite3.connect(path, timeout=0.2, isolation_level=None)
        try:
            self._open(job, restart)
        except sqlite3.OperationalError as error:
            self._connection.close()
            if "locked" in str(error):
                raise JournalError(f"{path} is in use: another process works on the same output") from None
            raise _unwritten(path, error) from None
        except sqlite3.DatabaseError as error:
            self._connection.close()
            raise JournalError(f"{path} is no journal of a job ({error}): move it away") from None
        except JournalError:
            self._connection.close()
            raise

    def _open(self, job: dict[str, Any], restart: bool) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("BEGIN EXCLUSIVE")
        for statement in _TABLES.split(";"):
            run(statement)
        if restart:
            run("DELETE FROM results")
        known = {key: json.loads(value) for key, value in run("SELECT key, value FROM job")}
        wanted = json.loads(json.dumps(job))
        differing = sorted(key for key in {*known, *wanted} if known.get(key) != wanted.get(key))
        if differing and run("SELECT 1 FROM results LIMIT 1").fetchone() is not None:
            run("ROLLBACK")
            was = "; ".join(f"{key} was {known.get(key)!r}, is {wanted.get(key)!r}" for key in differing)
            raise JournalError(
                f"{self.path} holds results of another job: {was}. Run that one again, or start anew with --restart"
            )
        if differing or not known:
            run("DELETE FROM job")
            run("DELETE FROM pins")
            rows = [(key, json.dumps(value, sort_keys=True)) for key, value in job.items()]
            self._connection.executemany("INSERT INTO job VALUES (?, ?)", rows)
        run("COMMIT")

    def pin(self, key: str, value: str) -> None:
        """Keep what results depend on and is known only once the model is loaded.

        Raises:
            JournalError: earlier results were made with another value.
        """
        row = self._connection.execute("SELECT value FROM pins WHERE key = ?", (key,)).fetchone()
        if row is None:
            self._connection.execute("INSERT INTO pins VALUES (?, ?)", (key, value))
        elif row[0] != value:
            raise JournalError(f"{self.path} holds results made with other {key}: start anew with --restart")

    def add(self, results: Iterable[tuple[int, int, np.ndarray]]) -> None:
        """Keep a batch's (line, part, vector): all of them, or none where the process dies here.

        Raises:
            sqlite3.IntegrityError: one of them is there already: it would have been computed twice.
            JournalError: the disk does not take it.
        """
        rows = [(line, part, np.ascontiguousarray(v, dtype="<f4").tobytes()) for line, part, v in results]
        try:
            with self._transaction():
                self._connection.executemany("INSERT INTO results VALUES (?, ?, ?)", rows)
        except sqlite3.OperationalError as error:
            raise _unwritten(self.path, error) from None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def done(self, first_line: int, last_line: int) -> set[tuple[int, int]]:
        """(line, part) of the results there are on these lines, both ends included."""
        query = "SELECT line, part FROM results WHERE line BETWEEN ? AND ?"
        return set(self._connection.execute(query, (first_line, last_line)))

    def __len__(self) -> int:
        return int(self._connection.execute("SELECT COUNT(*) FROM results").fetchone()[0])

    def width(self) -> int:
        """Numbers in a result; 0 where there is none yet."""
        row = self._connection.execute("SELECT LENGTH(value) FROM results LIMIT 1").fetchone()
        return 0 if row is None else int(row[0]) // 4

    def lines(self) -> Iterator[tuple[int, np.ndarray]]:
        """(line, [parts, width] float32) in the order of lines."""
        line = -1
        parts: list[np.ndarray] = []
        for at, value in self._connection.execute("SELECT line, value FROM results ORDER BY line, part"):
            if at != line and parts:
                yield line, np.stack(parts)
                parts = []
            line = at
            parts.append(np.frombuffer(value, dtype="<f4"))
        if parts:
            yield line, np.stack(parts)

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._connection.close()

    def remove(self) -> None:
        """The job is finished: delete and close, in this order: once closed it may be another process's."""
        for suffix in ("", "-journal"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self.close()


def _unwritten(path: Path, error: sqlite3.Error) -> JournalError:
    return JournalError(
        f"cannot write {path} ({error}): free space there, then run the same command to go on"
    )
