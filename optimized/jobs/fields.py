"""What one line of a request file may hold, and the reason where it holds something else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Kind = Literal["text", "messages", "pair", "continuation"]
Id = str | int | float | None

# What a line must hold to be of a kind.
FIELDS: dict[Kind, tuple[str, ...]] = {
    "text": ("text",),
    "messages": ("messages",),
    "pair": ("query", "passages"),
    "continuation": ("prompt", "continuation"),
}


class Passage(NamedTuple):
    """One passage of a query, with its own id where it has one."""

    text: str
    id: Id = None


class Parsed(NamedTuple):
    """A good line: its kind, its id (None where it has none), and the fields of that kind."""

    kind: Kind
    id: Id
    fields: dict[str, Any]


class BadLineError(ValueError):
    """The reason a line is refused."""


def parse_line(text: str) -> Parsed:
    """One line as a request.

    Raises:
        BadLineError: it is none; the message says why.
    """
    entry = _object(text)
    kind = _kind(entry)
    fields = {name: _READERS[name](name, entry[name]) for name in FIELDS[kind]}
    return Parsed(kind, _id("`id`", entry.get("id")), fields)


def _object(text: str) -> dict[str, Any]:
    try:
        entry = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise BadLineError(f"not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise BadLineError("not JSON we read: nested too deeply") from None
    except BadLineError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise BadLineError(f"not JSON we read: {error}") from None
    if not isinstance(entry, dict):
        raise BadLineError(f"expected a JSON object, got {_type(entry)}")
    return entry


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise BadLineError(f"the key {_short(twice)} is given twice: which one counts?")
    return entry


def _no_constant(name: str) -> Any:
    raise BadLineError(f"{name} is no JSON number")


def _kind(entry: dict[str, Any]) -> Kind:
    """The one kind whose fields the object has."""
    begun = [kind for kind, names in FIELDS.items() if any(name in entry for name in names)]
    if not begun:
        keys = ", ".join(_short(key) for key in list(entry)[:5]) or "no keys"
        raise BadLineError(
            "expected `text`, `messages`, `query` and `passages`, or `prompt` and `continuation`; "
            f"the object has {keys}"
        )
    if len(begun) > 1:
        given = ", ".join(f"`{name}`" for kind in begun for name in FIELDS[kind] if name in entry)
        raise BadLineError(f"{given} in one request: keep those of one kind")
    missing = [name for name in FIELDS[begun[0]] if name not in entry]
    if missing:
        present = next(name for name in FIELDS[begun[0]] if name in entry)
        raise BadLineError(f"`{present}` without `{missing[0]}`: give both")
    return begun[0]


def _string(what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadLineError(f"{what} is {_type(value)}: expected a string")
    # Neither survives a tokenizer: half of a pair has no UTF-8, and NUL ends the text for some.
    if not value.isascii():
        lone = next((i for i, c in enumerate(value) if "\ud800" <= c <= "\udfff"), None)
        if lone is not None:
            raise BadLineError(
                f"{what} holds a lone surrogate (\\u{ord(value[lone]):04x}) at character {lone + 1}: half of a pair"
            )
    if "\0" in value:
        raise BadLineError(f"{what} holds a NUL character at character {value.index(chr(0)) + 1}")
    return value


def _messages(what: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadLineError(f"{what} is {_type(value)}: expected a list of one or more messages")
    for i, message in enumerate(value):
        where = f"{what}[{i}]"
        if not isinstance(message, dict):
            raise BadLineError(f"{where} is {_type(message)}: expected an object with `role` and `content`")
        if not _string(f"{where}.role", message.get("role")):
            raise BadLineError(f"{where}.role is empty")
        _check_content(f"{where}.content", message)
        _check_strings(where, message)
    return value


def _check_content(what: str, message: dict[str, Any]) -> None:
    """Text, a list of text parts, or nothing beside tool calls."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        raise BadLineError(f"{what} is {_type(content)}: expected a string or a list of text parts")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadLineError(f"{what}[{i}] is {_short(kind)}: only parts of type text are read")
        _string(f"{what}[{i}].text", part.get("text"))


def _check_strings(what: str, value: Any) -> None:
    """Every string and key inside is text that a tokenizer takes."""
    if isinstance(value, str):
        _string(what, value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            _string(f"a key of {what}", name)
            _check_strings(f"{what}.{name}", inner)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            _check_strings(f"{what}[{i}]", inner)


def _passages(what: str, value: Any) -> list[Passage]:
    if isinstance(value, dict) and "passage_text" in value:
        value = value["passage_text"]
    if not isinstance(value, list) or not value:
        raise BadLineError(f"{what} is {_type(value)}: expected a list of one or more strings or objects")
    return [_passage(f"{what}[{i}]", passage) for i, passage in enumerate(value)]


def _passage(what: str, value: Any) -> Passage:
    if not isinstance(value, dict):
        return Passage(_string(what, value))
    if "text" not in value:
        raise BadLineError(f"{what} has no `text`")
    return Passage(_string(f"{what}.text", value["text"]), _id(f"{what}.id", value.get("id")))


def _id(what: str, value: Any) -> Id:
    if isinstance(value, bool) or not (value is None or isinstance(value, str | int | float)):
        raise BadLineError(f"{what} is {_type(value)}: expected a string or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise BadLineError(f"{what} is too large a number")
    return _string(what, value) if isinstance(value, str) else value


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "text": lambda name, value: _string(f"`{name}`", value),
    "messages": lambda name, value: _messages(f"`{name}`", value),
    "query": lambda name, value: _string(f"`{name}`", value),
    "passages": lambda name, value: _passages(f"`{name}`", value),
    "prompt": lambda name, value: _string(f"`{name}`", value),
    "continuation": lambda name, value: _string(f"`{name}`", value),
}


def _type(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "object", list: "list", str: "string", bool: "true or false", type(None): "null"}
    name = names.get(type(value), "number")
    if name in ("object", "list", "string") and not value:
        return f"an empty {name}"
    article = {"object": "an ", "true or false": "", "null": ""}.get(name, "a ")
    return article + name


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:36]}...{text[-1]}"
