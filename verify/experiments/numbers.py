"""Whether an experiment's report names every number that was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

Place = tuple[Any, ...]


def unreported_numbers(report: Callable[[dict[str, Any]], str], measured: dict[str, Any]) -> list[Place]:
    """The places of numbers in `measured` that can change while the report stays the same.

    Args:
        report: makes Markdown of a measured result, as an `experiment.py` does.
        measured: what can be written as JSON; each number in turn is changed in a copy.
    """
    text = json.dumps(measured)
    whole = report(json.loads(text))
    return [
        place
        for place in _numbers(json.loads(text))
        if report(_with_other_number(json.loads(text), place)) == whole
    ]


def _numbers(node: Any, place: Place = ()) -> Iterator[Place]:
    """The way to every number in nested dicts and lists."""
    if isinstance(node, (dict, list)):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _numbers(value, (*place, key))
    elif isinstance(node, (int, float)) and not isinstance(node, bool):
        yield place


def _with_other_number(measured: dict[str, Any], place: Place) -> dict[str, Any]:
    node: Any = measured
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = 3 * node[place[-1]] + 7
    return measured
