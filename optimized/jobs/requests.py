"""Request files: one JSON object a line, read as a stream; a bad line is reported and the rest goes on."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from radixmlp.optimized.jobs.fields import BadLineError, Id, Kind, Passage, parse_line

__all__ = ["BadLine", "Kind", "Passage", "Request", "RequestFileError", "parse_request", "read_requests"]

MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
_OTHER_FORMATS = {
    b"\xff\xfe": "UTF-16 text: convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text: convert it to UTF-8",
    b"\x1f\x8b": "compressed by gzip: give `gunzip -c FILE | ... -`",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: give `zstd -dc FILE | ... -`",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"PAR1": "a Parquet file: convert it to JSON lines",
    b"\x93NUMPY": "a NumPy file",
    b"GGUF": "a GGUF model",
}


class RequestFileError(ValueError):
    """The file as a whole cannot be read; the message says why and what to do."""


@dataclass(frozen=True)
class Request:
    """One good line.

    Args:
        line: its number, from 1.
        id: as given (string or number), None where there is none.
        kind: which fields it holds.
        fields: "text": {"text": str}; "messages": {"messages": [{"role", "content", ...}, ...]}; "pair":
            {"query": str, "passages": [Passage, ...]}; "continuation": {"prompt": str, "continuation": str}.
    """

    line: int
    id: Id
    kind: Kind
    fields: dict[str, Any]


class BadLine(NamedTuple):
    """A line that is no request: its number, from 1, and why."""

    line: int
    reason: str


def read_requests(path: Path | str, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Request | BadLine]:
    """Stream the requests of a JSONL file; memory holds one line at a time.

    Each line is an object with `text`, with `messages`, with `query` and `passages` (strings, {"id"?, "text"}
    objects, or MS MARCO's {"passage_text": [...]}), or with `prompt` and `continuation`; `id` is optional and other
    keys are ignored. UTF-8 with or without byte-order mark, LF or CRLF; blank lines are skipped and counted.

    Args:
        path: the file, or "-" for standard input.
        max_line_bytes: longer lines are bad lines.

    Yields:
        `Request`, or `BadLine` with the reason, in the order of the file.

    Raises:
        RequestFileError: at the call, where the file is missing, a folder or unreadable; at the first line, where
            it is another format (UTF-16, gzip, Parquet, ...).
    """
    if str(path) != "-":
        _check_file(Path(path))
    return _stream(str(path), max_line_bytes)


def parse_request(text: str, line: int = 1) -> Request | BadLine:
    """One line of a request file, already decoded, as a request or the reason it is none."""
    try:
        kind, id, fields = parse_line(text)
    except BadLineError as reason:
        return BadLine(line, str(reason))
    return Request(line, id, kind, fields)


def _check_file(path: Path) -> None:
    if path.is_dir():
        raise RequestFileError(f"{path} is a folder: give a JSONL file in it, or - for standard input")
    if not path.exists():
        raise RequestFileError(f"there is no file {path}: give a JSONL file, or - for standard input")


def _stream(path: str, max_line_bytes: int) -> Iterator[Request | BadLine]:
    with _opened(path) as file:
        for number, raw in enumerate(_lines(file, max_line_bytes), start=1):
            if number == 1:
                _refuse_other_formats(path, raw)
                raw = raw.removeprefix(_BOM)
            if len(raw) > max_line_bytes:
                yield BadLine(number, f"the line is longer than {max_line_bytes:,} bytes: split the request")
                continue
            if not raw.strip():
                continue
            try:
                yield parse_request(_decoded(raw), number)
            except BadLineError as reason:
                yield BadLine(number, str(reason))


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """The file's bytes; standard input stays open for its owner."""
    if path == "-":
        stream = sys.stdin
        yield stream.buffer if hasattr(stream, "buffer") else io.BytesIO(stream.read().encode())
        return
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        raise RequestFileError(f"cannot read {path}: {error.strerror or error}") from None


def _lines(file: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    """Lines without their ends; of one that is too long, the first max_line_bytes + 1 bytes or more."""
    while raw := file.readline(max_line_bytes + 2):
        rest = raw
        while not rest.endswith(b"\n") and (rest := file.readline(1 << 20)):
            pass
        yield raw.removesuffix(b"\n").removesuffix(b"\r")


def _refuse_other_formats(path: str, start: bytes) -> None:
    for magic, what in _OTHER_FORMATS.items():
        if start.startswith(magic):
            raise RequestFileError(f"{path} is {what}")


def _decoded(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLineError(
            f"not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
        ) from None
    if "\0" in text:
        raise BadLineError(f"a NUL byte at byte {raw.index(0) + 1} of the line: this is not text")
    return text
