"""Values that differ from request to request: recognised where texts part."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY_NAME = r"(?:(?:mon|tue|wed|thu|fri|sat|sun)[a-z]*,? )?"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[ap]\.?m\.?)?(?: ?(?:Z|UTC|GMT|[+-]\d{2}:?\d{2}))?"
_NUMERIC_DATE = r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
_WRITTEN_DATE = (
    rf"{_DAY_NAME}(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?|\d{{1,2}}(?:st|nd|rd|th)? {_MONTH})(?:,? \d{{4}})?"
)
_DATE = rf"(?:{_NUMERIC_DATE}|{_WRITTEN_DATE})"

# In this order: the first that covers the place names it.
_PATTERNS = {
    "a UUID": r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}",
    "a date and time": rf"{_DATE}(?:[T ,]| at |, ){_TIME}",
    "a date": _DATE,
    "a time of day": _TIME,
    "an e-mail address": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "a network address": r"\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?",
    "an identifier": r"(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{8,}",
    "a number": r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?%?",
}
_COMPILED = {
    name: re.compile(rf"(?<![0-9A-Za-z])(?:{form})(?![0-9A-Za-z])", re.IGNORECASE)
    for name, form in _PATTERNS.items()
}
_NEAR = 80  # characters around a place that a value may cover
_LOOKED_AT = 4_000  # characters after a value that are compared
LONG_ENOUGH = 16  # characters that are the same again, so that the difference costs something


@dataclass(frozen=True)
class Value:
    """A value in a text: what it is, and text[start:end]."""

    kind: str
    start: int
    end: int


@dataclass(frozen=True)
class Difference:
    """What keeps texts apart that go on alike after it.

    Args:
        what: the value's kind, or the way of writing.
        place: characters before they part.
        alike: characters that are the same after it.
        samples: the texts concerned, two or more.
        removable: whether it is a value of its own.
    """

    what: str
    place: int
    alike: int
    samples: list[str]
    removable: bool


def common_length(texts: Sequence[str]) -> int:
    """Characters that all texts begin with alike."""
    low, high = min(texts), max(texts)
    return bisect_left(range(min(len(low), len(high))), True, key=lambda i: low[: i + 1] != high[: i + 1])


def value_at(text: str, place: int) -> Value | None:
    """The value that covers `place`, or ends there."""
    begin = max(0, place - _NEAR)
    near = text[begin : place + _NEAR]
    for kind, pattern in _COMPILED.items():
        for match in pattern.finditer(near):
            if begin + match.start() <= place <= begin + match.end():
                return Value(kind, begin + match.start(), begin + match.end())
    return None


def differing_values(texts: Sequence[str]) -> Difference | None:
    """Whether the texts part inside a value of one kind and go on alike after it."""
    place = common_length(texts)
    values = [value_at(text, place) for text in texts]
    kinds = [value.kind for value in values if value is not None]
    if not kinds:
        return None
    kind = max(dict.fromkeys(kinds), key=kinds.count)
    found = [(text, v) for text, v in zip(texts, values, strict=True) if v is not None and v.kind == kind]
    distinct = {text[value.start : value.end] for text, value in found}
    if 5 * len(found) < 4 * len(texts) or 2 * len(distinct) <= len(found) or len(distinct) < 2:
        return None
    alike = common_length([_masked(text[value.end : value.end + _LOOKED_AT]) for text, value in found])
    return Difference(kind, place, alike, [text for text, _ in found], True) if alike >= LONG_ENOUGH else None


def differing_form(texts: Sequence[str]) -> Difference | None:
    """Whether some of the texts part only in how the same words are written: white space, case, Unicode form."""
    place = common_length(texts)
    begin = place - (place > 0 and texts[0][place - 1].isspace())
    for name, normalised in _FORMS.items():
        written: dict[str, dict[str, str]] = {}
        for text in texts:
            tail = text[begin : begin + _LOOKED_AT]
            written.setdefault(normalised(tail)[:LONG_ENOUGH], {}).setdefault(tail[:LONG_ENOUGH], text)
        for start, ways in written.items():
            if len(start) == LONG_ENOUGH and len(ways) > 1:
                samples = list(ways.values())
                alike = common_length([normalised(text[begin : begin + _LOOKED_AT]) for text in samples])
                return Difference(name, common_length(samples), alike, samples, False)
    return None


_FORMS = {
    "white space": lambda text: "".join(text.split()),
    "upper and lower case": str.casefold,
    "the Unicode form (NFC or NFD)": lambda text: unicodedata.normalize("NFC", text),
}


def _masked(text: str) -> str:
    """The text with every value replaced, so that a second one does not hide what is common."""
    for pattern in _COMPILED.values():
        text = pattern.sub("#", text)
    return text
