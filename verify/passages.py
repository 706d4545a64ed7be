"""Queries with candidate passages: the file we ship, any JSONL file, or MS MARCO."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED_FILE = Path(__file__).parent / "data" / "passages.jsonl"
# MS MARCO is for non-commercial research: it stays outside the project, beside a checkout.
MSMARCO_FILE = Path(__file__).resolve().parents[1] / "../shared/data/msmarco_dl19_bm25_top20.jsonl"
MSMARCO_HUB = ("microsoft/ms_marco", "v1.1")


@dataclass(frozen=True)
class RankedPassages:
    """One query and the passages to rank for it."""

    query: str
    passages: list[str]


def load_passages(path: Path | str = SHIPPED_FILE) -> list[RankedPassages]:
    """Read a JSONL file: one object a line with `query` and `passages`.

    `passages` is a list of strings, a list of {"id", "text"}, or MS MARCO's {"passage_text": [...]}.

    Raises:
        ValueError: names the file and the line that is not of this form.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no passage file at {path}: give a JSONL file with `query` and `passages`")
    entries = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                entries.append(_parse_line(line, f"{path}, line {number}"))
    if not entries:
        raise ValueError(f"{path} holds no queries: expected one JSON object a line")
    return entries


def msmarco_is_local() -> bool:
    """Whether the MS MARCO sample lies beside this checkout."""
    return MSMARCO_FILE.is_file()


def load_msmarco(limit: int = 30) -> list[RankedPassages]:
    """MS MARCO: the sample beside the checkout where it exists, otherwise `microsoft/ms_marco` v1.1.

    Args:
        limit: at most this many queries.

    Raises:
        ValueError: there is neither a local sample nor a way to download the data set.
    """
    if msmarco_is_local():
        return load_passages(MSMARCO_FILE)[:limit]
    return load_msmarco_from_hub(limit)


def load_msmarco_from_hub(limit: int = 30) -> list[RankedPassages]:
    """The first `limit` queries of `microsoft/ms_marco` v1.1, validation split, through `datasets`.

    Raises:
        ValueError: `datasets` is not installed, or the data set cannot be reached.
    """
    name, config = MSMARCO_HUB
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(
            f"{name} needs the package `datasets`: pip install 'radixmlp[datasets]', or give a JSONL file"
        ) from None
    try:
        # Streaming reads only the first rows, not the whole split.
        rows = list(load_dataset(name, config, split="validation", streaming=True).take(limit))
    except Exception as error:  # whichever HTTP client is underneath has its own errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot download {name} {config} ({reason}): check the network, or give --data FILE.jsonl"
        ) from None
    return [_parse_entry(row, f"{name} row {i}") for i, row in enumerate(rows)]


def _parse_line(line: str, where: str) -> RankedPassages:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    return _parse_entry(entry, where)


def _parse_entry(entry: Any, where: str) -> RankedPassages:
    if not isinstance(entry, dict):
        raise ValueError(
            f"{where}: expected an object with `query` and `passages`, got {type(entry).__name__}"
        )
    query = entry.get("query")
    if not isinstance(query, str) or not query.strip():
        raise ValueError(f"{where}: `query` is {query!r}: expected text")
    passages = entry.get("passages")
    if isinstance(passages, dict):
        passages = passages.get("passage_text")
    if not isinstance(passages, list) or not passages:
        raise ValueError(
            f"{where}: `passages` must be a list of strings, of {{id, text}}, or {{passage_text: [...]}}"
        )
    return RankedPassages(query, [_passage_text(p, f"{where}, passage {i}") for i, p in enumerate(passages)])


def _passage_text(passage: Any, where: str) -> str:
    text = passage.get("text") if isinstance(passage, dict) else passage
    if not isinstance(text, str):
        raise ValueError(f"{where}: {passage!r} is neither a string nor an object with `text`")
    return text
