"""The zoomable picture of the trie: one HTML file that needs nothing else, and in which no text is ever markup."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from radixmlp.verify.inspect.excerpts import segment_text
from radixmlp.verify.inspect.inspection import Inspection
from radixmlp.verify.inspect.numbers import document
from radixmlp.verify.inspect.predictions import Prediction
from radixmlp.verify.inspect.printable import shorten
from radixmlp.verify.inspect.tokenizing import TextTokenizer
from radixmlp.verify.inspect.tree import Tree

MOST_SEGMENTS = 4_000
_TEXT_WIDTH = 600  # characters of a segment's text
_PIXELS = 2_000  # segments narrower than one of so many are merged, unless the picture has room for all
_TEMPLATE = Path(__file__).resolve().parent / "page.html.j2"


def write_page(
    path: Path, source: str, found: Inspection, predictions: Sequence[Prediction], tokenizer: TextTokenizer
) -> None:
    """Write the picture with the numbers above it."""
    tree = found.head.tree
    assert tree is not None
    drawing = {
        "rows": tree.num_rows,
        "tokens": tree.num_tokens,
        "sequences": int(tree.order.size),
        "segments": drawn_segments(tree, tokenizer),
    }
    engine = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    page = engine.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        numbers=document(source, found, predictions, tokenizer),
        source=source,
        head=len(found.head.texts),
        complete=found.head.complete,
        drawing=Markup(script_json(drawing)),
    )
    path.write_text(page, encoding="utf-8")


def script_json(value: Any) -> str:
    """JSON that can stand inside a <script> element: nothing in it ends the element or opens a comment."""
    text = json.dumps(value, separators=(",", ":"))  # ASCII, so U+2028 is an escape already
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def drawn_segments(tree: Tree, tokenizer: TextTokenizer) -> list[list[Any]]:
    """What is drawn, depth-first: the largest segments, and one for each run of smaller siblings between them.

    Returns:
        Lists of [level, merged, first sequence, sequences, first row, rows of the subtree, own rows, tokens before,
        text]; `merged` is 0 for a segment, else how many segments are drawn as one.
    """
    chosen = _chosen(tree)
    drawn: list[list[Any]] = []
    stack = [(0, segments) for segments in reversed(_runs(tree.roots, chosen))]
    while stack:
        level, segments = stack.pop()
        drawn.append(_drawn(tree, tokenizer, level, segments, merged=segments[0] not in chosen))
        if segments[0] in chosen:
            below = _runs(tree.children[segments[0]], chosen)
            stack += [(level + 1, run) for run in reversed(below)]
    return drawn


def _chosen(tree: Tree) -> set[int]:
    """The largest segments; where there are many, only those a pixel wide."""
    chosen = tree.largest(MOST_SEGMENTS)
    if tree.num_segments <= MOST_SEGMENTS // 2:
        return chosen
    wide = {
        segment
        for segment in chosen
        if _PIXELS * tree.sequences[segment] >= tree.order.size
        or _PIXELS * tree.subtree_rows[segment] >= tree.num_rows
    }
    return wide


def _runs(siblings: Sequence[int], chosen: set[int]) -> list[list[int]]:
    """Each chosen sibling alone, those between them together."""
    runs: list[list[int]] = []
    for is_chosen, group in groupby(siblings, key=lambda segment: segment in chosen):
        members = list(group)
        runs += [[segment] for segment in members] if is_chosen else [members]
    return runs


def _drawn(
    tree: Tree, tokenizer: TextTokenizer, level: int, segments: Sequence[int], merged: bool
) -> list[Any]:
    first = segments[0]
    text = "" if merged else shorten(segment_text(tree, first, tokenizer), _TEXT_WIDTH)
    return [
        level,
        len(segments) if merged else 0,
        int(tree.first[first]),
        int(sum(tree.sequences[segment] for segment in segments)),
        int(tree.start[first]),
        int(sum(tree.subtree_rows[segment] for segment in segments)),
        int(sum(tree.rows[segment] for segment in segments)),
        int(tree.depth[first]),
        text,
    ]
