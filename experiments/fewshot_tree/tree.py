"""A few-shot evaluation as a tree: task, chosen examples, item, label; and ways to reuse one prefix a group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixmlp.reference import RaggedBatch
from radixmlp.verify.passages import SHIPPED_FILE, load_passages
from radixmlp.verify.prompts import FEW_SHOT_EXAMPLES
from radixmlp.verify.variants import common_prefix_length

TASKS = (
    "Name the subject of each text. Subjects are nature, cooking, society and craft.",
    "Read each text and say which part of a newspaper it would stand in: nature, cooking, society or craft.",
)
LABELS = tuple(dict.fromkeys(label for _, label in FEW_SHOT_EXAMPLES))
LEVELS = ("all", "task", "examples", "item")


@dataclass(frozen=True)
class Leaf:
    """One sequence and what it hangs below.

    Args:
        path: (task, examples, item, label) as numbers.
        text: the whole prompt with its label.
    """

    path: tuple[int, int, int, int]
    text: str


def leaves(tasks: int, subsets: int, items: int) -> list[Leaf]:
    """Every task with every subset of examples, every item, every label.

    Subset s holds the first 2, 4, 6 .. examples: a larger one begins with a smaller, so examples share too.
    """
    if not (1 <= tasks <= len(TASKS) and 1 <= subsets <= len(FEW_SHOT_EXAMPLES) // 2):
        raise ValueError(
            f"{tasks} tasks and {subsets} subsets: there are {len(TASKS)} and {len(FEW_SHOT_EXAMPLES) // 2}"
        )
    texts = [passage for entry in load_passages(SHIPPED_FILE) for passage in entry.passages][:items]
    found = []
    for t, task in enumerate(TASKS[:tasks]):
        for s in range(subsets):
            shots = "".join(
                f"Text: {text}\nSubject: {label}\n\n" for text, label in FEW_SHOT_EXAMPLES[: 2 * s + 2]
            )
            for i, item in enumerate(texts):
                stem = f"{task}\n\n{shots}Text: {item}\nSubject:"
                found += [Leaf((t, s, i, n), f"{stem} {label}") for n, label in enumerate(LABELS)]
    return found


def batch_of(found: Sequence[Leaf], encode: Callable[[str], Sequence[int]]) -> RaggedBatch:
    """The leaves' tokens."""
    return RaggedBatch.from_sequences([encode(leaf.text) for leaf in found])


def groups(found: Sequence[Leaf], level: str) -> list[list[int]]:
    """Numbers of the leaves below each node of `level`, in order."""
    depth = LEVELS.index(level)
    below: dict[tuple[int, ...], list[int]] = {}
    for number, leaf in enumerate(found):
        below.setdefault(leaf.path[:depth], []).append(number)
    return list(below.values())


def parts_of(batch: RaggedBatch, parts: Sequence[Sequence[int]]) -> list[RaggedBatch]:
    """A batch for each list of the sequences' numbers."""
    rows = batch.sequences()
    return [RaggedBatch.from_sequences([rows[number] for number in numbers]) for numbers in parts]


def reuse_rows(batch: RaggedBatch, parts: Sequence[Sequence[int]]) -> int:
    """Rows that reuse of one prefix a group computes: the prefix once, the rest padded to its longest."""
    total = 0
    for part in parts_of(batch, parts):
        prefix = common_prefix_length(part)
        total += prefix + part.num_sequences * (int(part.lengths.max()) - prefix)
    return total
