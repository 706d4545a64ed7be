"""The result for a terminal: numbers, where sequences part, advice, and the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text as Styled

from radixmlp.verify.inspect.excerpts import first_branch, segment_text
from radixmlp.verify.inspect.inspection import Inspection, Line
from radixmlp.verify.inspect.numbers import POOLS_NOTE, quantiles
from radixmlp.verify.inspect.predictions import MEMORY_FORMULA, Prediction
from radixmlp.verify.inspect.printable import printable, shorten
from radixmlp.verify.inspect.survey import BatchSum
from radixmlp.verify.inspect.tokenizing import TextTokenizer
from radixmlp.verify.inspect.tree import Tree
from radixmlp.verify.inspect.verdict import advice, is_worth_it, verdict

_BAR = 12  # characters of a full bar
_BLOCKS = " ▏▎▍▌▋▊▉█"
_INDENT = 2
_MOST_INDENT = 12  # levels; deeper ones stand below each other
_POLICY_NAMES = {"prefix": "prefix-aware", "fifo": "first in, first out"}


class TreeLine(NamedTuple):
    """One line of the tree: a segment, or how many of its parent's are not shown."""

    level: int
    segment: int
    hidden: int = 0


def show(
    console: Console,
    source: str,
    found: Inspection,
    predictions: Sequence[Prediction],
    tokenizer: TextTokenizer,
    tree_lines: int,
) -> None:
    """Print everything."""
    total = found.survey.total
    console.print(
        Styled(
            f"{source}: {found.requests:,} requests, {found.sequences:,} sequences, {total.tokens:,} "
            f"tokens (tokenizer {printable(found.tokenizer)}, template {printable(found.main.template)})"
        )
    )
    good = is_worth_it(found)
    console.print(Styled(verdict(found, predictions), style="bold green" if good else "bold yellow"))
    for line in advice(found):
        console.print(Styled("- " + line))
    if total.tokens:
        console.print(_batch_table(found))
        if found.survey.pools > 1:
            console.print(Styled(POOLS_NOTE, style="dim"))
        console.print(_prediction_table(predictions))
        console.print(Styled(f"memory: {MEMORY_FORMULA}; beside the weights", style="dim"))
        _show_divergence(console, found, tokenizer)
        _show_tree(console, found, tokenizer, tree_lines)


def tree_outline(tree: Tree, most: int) -> list[TreeLine]:
    """The largest segments as an outline of at most `most` lines, where the roots leave room for that."""
    count = most
    lines = _outline(tree, tree.largest(count))
    while len(lines) > most and count > 1:
        count = max(1, count - max(1, (len(lines) - most) // 2))
        lines = _outline(tree, tree.largest(count))
    return lines


def _outline(tree: Tree, shown: set[int]) -> list[TreeLine]:
    lines: list[TreeLine] = []
    stack = [_below(tree, -1, 0, shown)]
    while stack:
        if not stack[-1]:
            stack.pop()
            continue
        line = stack[-1].pop(0)
        lines.append(line)
        if not line.hidden:
            stack.append(_below(tree, line.segment, line.level + 1, shown))
    return lines


def _below(tree: Tree, segment: int, level: int, shown: set[int]) -> list[TreeLine]:
    children = tree.children[segment]
    lines = [TreeLine(level, child) for child in children if child in shown]
    hidden = len(children) - len(lines)
    return [*lines, TreeLine(level, segment, hidden)] if hidden else lines


def _batch_table(found: Inspection) -> Table:
    table = Table(title=f"Batches of up to {found.options.max_batch_tokens:,} rows", title_justify="left")
    for name in ("order of requests", "template"):
        table.add_column(name)
    for name in ("batches", "tokens N", "rows N'", "gamma", "r", "r by batch: least 20% 50% 80% most"):
        table.add_column(name, justify="right")
    for line in (found.main, found.swapped):
        if line is not None:
            _add_line(table, line)
    return table


def _add_line(table: Table, line: Line) -> None:
    name = shorten(line.template, 24)
    for policy, survey in line.surveys.items():
        spread = [f"{value:.2f}" for value in quantiles([batch.ratio for batch in survey.batches])]
        sums = _sums(survey.total)
        table.add_row(
            Styled(_POLICY_NAMES[policy]), Styled(name), f"{len(survey.batches):,}", *sums, "  ".join(spread)
        )
    if line.whole is not None:
        table.add_row(Styled("all in one batch"), Styled(name), "1", *_sums(line.whole))


def _sums(total: BatchSum) -> list[str]:
    return [f"{total.tokens:,}", f"{total.rows:,}", f"{total.gamma:.3f}", f"{total.ratio:.2f}"]


def _prediction_table(predictions: Sequence[Prediction]) -> Table:
    table = Table(
        title="Predicted from the model's shape (ideal: FLOPs of dense over FLOPs)", title_justify="left"
    )
    table.add_column("model")
    for name in ("trie", "paper's path", "activations, largest batch", "dense", "ratio"):
        table.add_column(name, justify="right")
    for one in predictions:
        table.add_row(
            Styled(printable(one.model)),
            f"{one.trie:.2f}x",
            f"{one.scatter:.2f}x",
            _size(one.activation_bytes),
            _size(one.dense_activation_bytes),
            f"{one.rows / one.tokens:.2f}",
        )
    return table


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _show_divergence(console: Console, found: Inspection, tokenizer: TextTokenizer) -> None:
    tree = found.head.tree
    if tree is None or not tree.num_segments:
        return
    width = max(40, console.width - 12)
    shared, ways = first_branch(tree)
    those = "All sequences" if found.head.complete else f"The first {len(found.head.texts):,} sequences"
    if shared is None:
        console.print(Styled(f"\n{those} part at the first token, into {len(ways):,} ways:"))
    else:
        text = segment_text(tree, shared, tokenizer)
        count = int(tree.rows[shared])
        if not ways:
            console.print(Styled(f"\n{those} are the same {count:,} tokens."))
            return
        console.print(Styled(f"\n{those} share their first {count:,} tokens, then go {len(ways):,} ways:"))
        console.print(Styled("  " + shorten(text, width)))
    for child in sorted(ways, key=lambda way: -int(tree.sequences[way]))[:4]:
        text = shorten(segment_text(tree, child, tokenizer), width - 12)
        console.print(Styled(f"  {int(tree.sequences[child]):>6,}x  {text}"))
    if found.head.causes is not None:
        for cause in found.head.causes.found:
            console.print(
                Styled(f"{cause.what} after {cause.token:,} tokens: {shorten(cause.before, width)}")
            )
            for example in cause.examples:
                console.print(Styled(f"          … {shorten(example, width - 12)}"))


def _show_tree(console: Console, found: Inspection, tokenizer: TextTokenizer, count: int) -> None:
    tree = found.head.tree
    if tree is None or not tree.num_segments or count < 1:
        return
    scope = "all sequences" if found.head.complete else f"the first {len(found.head.texts):,} sequences"
    console.print(
        Styled(f"\nTree of {scope}: {tree.num_rows:,} rows for {tree.num_tokens:,} tokens", style="bold")
    )
    console.print(Styled(f"{'of rows':<{_BAR}} {'sequences':>9} {'rows':>7} {'saved':>9} text", style="dim"))
    for line in tree_outline(tree, count):
        console.print(
            _tree_line(tree, line, tokenizer, console.width), no_wrap=True, overflow="ellipsis", crop=True
        )


def _tree_line(tree: Tree, line: TreeLine, tokenizer: TextTokenizer, width: int) -> Styled:
    indent = " " * (_INDENT * min(line.level, _MOST_INDENT))
    if line.hidden:
        return Styled(" " * (_BAR + 29) + f"{indent}… and {line.hidden:,} more", style="dim")
    segment = line.segment
    sequences, rows = int(tree.sequences[segment]), int(tree.rows[segment])
    saved = rows * (sequences - 1)
    numbers = f" {sequences:>8,}x {rows:>7,} {saved:>9,} "
    text = shorten(segment_text(tree, segment, tokenizer), max(16, width - _BAR - 29 - len(indent)))
    styled = Styled(_bar(int(tree.subtree_rows[segment]) / tree.num_rows), style="blue")
    return styled.append(numbers, style="dim").append(indent + text, style="" if sequences == 1 else "bold")


def _bar(share: float) -> str:
    eighths = max(1, round(8 * _BAR * share))
    return ("█" * (eighths // 8) + _BLOCKS[eighths % 8].strip()).ljust(_BAR)
