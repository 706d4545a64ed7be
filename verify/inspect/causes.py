"""Why sequences part: the causes that can be taken out of a prompt, found at the branches of the trie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from radixmlp.verify.inspect.ragged import Tokens
from radixmlp.verify.inspect.tree import Tree
from radixmlp.verify.inspect.values import (
    Difference,
    common_length,
    differing_form,
    differing_values,
    value_at,
)

_BRANCHES = 500  # places looked at, those of most sequences first
_SAMPLES = 16  # ways on looked at, of each place
_ROUNDS = 3  # a second value is seen once the first is taken out
_WORTH_SAYING = 0.01  # of all text: what is repeated only because of a cause
_CONTEXT = 60  # characters shown on each side of a place

Encode = Callable[[Sequence[str]], Tokens]
Span = tuple[int, int]


@dataclass(frozen=True)
class Cause:
    """One kind of difference that keeps sequences apart although they go on alike after it.

    Args:
        what: "a date", "a UUID", "white space", ...
        places: branches of the trie where it was seen.
        sequences: how many pass through those.
        token: tokens before the first of those places.
        before: the end of the common text there.
        examples: how some sequences go on there.
        repeated: characters that are the same after it, over all ways but one, about.
        removable: whether it is a value of its own, that could stand at the end of the prompt.
    """

    what: str
    places: int
    sequences: int
    token: int
    before: str
    examples: list[str]
    repeated: int
    removable: bool


@dataclass(frozen=True)
class Causes:
    """What was found.

    Args:
        found: causes; one that hides behind another comes after it, its place counted without that.
        rows_now, tokens_now: N' and N of the looked-at sequences as one batch.
        rows_without, tokens_without: the same with the removable values taken out where they keep sequences apart;
            None where there are none.
    """

    found: list[Cause]
    rows_now: int
    tokens_now: int
    rows_without: int | None = None
    tokens_without: int | None = None


@dataclass(frozen=True)
class _Branch:
    """A place where sequences part: tokens before it, who passes, and one text of each way on."""

    token: int
    through: list[int]
    samples: list[str]


def find_causes(texts: Sequence[str], tree: Tree, encode: Encode) -> Causes:
    """Look at the branches of `tree`, the trie of `texts`; take out the values that differ, and look again.

    Args:
        texts: of the sequences of `tree`, in its order of indices.
        encode: texts like these to tokens, for what is left without the values.
    """
    least = _WORTH_SAYING * sum(map(len, texts))
    found: dict[str, Cause] = {}
    now, current = tree, list(texts)
    for _ in range(_ROUNDS):
        causes, spans = _look(current, tree)
        worth = [what for what, cause in causes.items() if cause.repeated >= least]
        for what in worth:
            found.setdefault(what, causes[what])
        taken: dict[int, list[Span]] = defaultdict(list)
        for what in worth:
            for sequence, span in spans[what].items():
                taken[sequence].append(span)
        if not taken:
            break
        for sequence, cut in taken.items():
            current[sequence] = without(current[sequence], cut)
        tree = Tree.of(encode(current))
    ordered = list(found.values())
    if tree is now:
        return Causes(ordered, now.num_rows, now.num_tokens)
    return Causes(ordered, now.num_rows, now.num_tokens, tree.num_rows, tree.num_tokens)


def without(text: str, spans: Sequence[Span]) -> str:
    """The text with these parts left out; they may overlap."""
    kept, at = [], 0
    for start, end in sorted(spans):
        kept.append(text[at : max(at, start)])
        at = max(at, end)
    return "".join(kept) + text[at:]


def _look(texts: Sequence[str], tree: Tree) -> tuple[dict[str, Cause], dict[str, dict[int, Span]]]:
    """(causes by name, and by name where the value stands in each sequence's text) of one tree."""
    causes: dict[str, Cause] = {}
    spans: dict[str, dict[int, Span]] = defaultdict(dict)
    explained: dict[int, int] = {}  # for a sequence: where the last value ends that a branch above is in
    for segment in _forks(tree):
        branch = _branch(texts, tree, segment)
        place = common_length(branch.samples)
        if any(place <= explained.get(sequence, -1) for sequence in branch.through):
            continue  # another digit of the same value
        difference = differing_values(branch.samples)
        if difference is not None:
            own = _spans(texts, branch, difference)
            explained.update({sequence: end for sequence, (_, end) in own.items()})
            spans[difference.what].update(own)
            values = {texts[sequence][start:end] for sequence, (start, end) in own.items()}
            _add(causes, branch, difference, len(values))
        elif (form := differing_form(branch.samples)) is not None:
            _add(causes, branch, form, len(form.samples))
    return causes, spans


def _forks(tree: Tree) -> list[int]:
    """Segments with two ways on or more, in depth-first order; -1 where sequences differ from the start."""
    forks = [segment for segment in range(tree.num_segments) if len(tree.children[segment]) > 1]
    forks.sort(key=lambda segment: -int(tree.sequences[segment]))
    chosen = sorted(forks[:_BRANCHES])
    return [-1, *chosen] if len(tree.roots) > 1 else chosen


def _branch(texts: Sequence[str], tree: Tree, segment: int) -> _Branch:
    below = tree.children[segment]
    through = [s for root in below for s in tree.through(root)] if segment < 0 else tree.through(segment)
    step = max(1, len(below) // _SAMPLES)
    samples = [texts[tree.first_through(child)] for child in below[::step][:_SAMPLES]]
    token = 0 if segment < 0 else int(tree.depth[segment] + tree.rows[segment])
    return _Branch(token, through, samples)


def _spans(texts: Sequence[str], branch: _Branch, difference: Difference) -> dict[int, Span]:
    """Where the value stands in each sequence through a branch; nowhere in one that parted before it."""
    common = branch.samples[0][: difference.place]
    spans = {}
    for sequence in branch.through:
        value = value_at(texts[sequence], difference.place)
        if value is None or value.kind != difference.what:
            continue
        if texts[sequence].startswith(common[: value.start]):
            spans[sequence] = (value.start, value.end)
    return spans


def _add(causes: dict[str, Cause], branch: _Branch, difference: Difference, ways: int) -> None:
    repeated = difference.alike * (ways - 1)
    known = causes.get(difference.what)
    if known is not None:
        causes[difference.what] = replace(
            known,
            places=known.places + 1,
            sequences=known.sequences + len(branch.through),
            repeated=known.repeated + repeated,
        )
        return
    place = difference.place
    causes[difference.what] = Cause(
        difference.what,
        1,
        len(branch.through),
        branch.token,
        difference.samples[0][max(0, place - _CONTEXT) : place],
        [sample[place : place + _CONTEXT] for sample in difference.samples[:3]],
        repeated,
        difference.removable,
    )
