"""Named batches: synthetic shapes and text, from a whole trie's worth of sharing to none."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from radixmlp.reference import RaggedBatch
from radixmlp.verify import prompts
from radixmlp.verify.passages import SHIPPED_FILE, RankedPassages, load_msmarco, load_passages
from radixmlp.verify.records import Workload


class Tokenizer(Protocol):
    """The one call we make of a Hugging Face tokenizer."""

    def encode(self, text: str, /) -> list[int]: ...


@dataclass(frozen=True)
class WorkloadOptions:
    """Sizes of a workload; each builder has its own default where a size is None.

    Args:
        prefix_length, suffix_length: tokens of the shared prefix and of each sequence's own part (of each
            step in a tree).
        batch_size: sequences; in `tree` the children of a branch.
        queries, passages: how many of each to take from the text.
        max_length: text sequences are cut to this many tokens.
        data: a JSONL file with `query` and `passages` instead of the shipped one.
        seed: of the synthetic ids.
    """

    prefix_length: int | None = None
    suffix_length: int | None = None
    batch_size: int | None = None
    queries: int | None = None
    passages: int | None = None
    max_length: int | None = None
    data: Path | str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prefix_length", "suffix_length", "batch_size", "queries", "passages", "max_length"):
            value = getattr(self, name)
            if value is not None and value < (0 if name in ("prefix_length", "suffix_length") else 1):
                raise ValueError(f"{name} is {value}: expected a positive number")


@dataclass(frozen=True)
class _Source:
    """What a builder draws tokens from."""

    tokenizer: Tokenizer | None
    vocab_size: int
    options: WorkloadOptions

    @property
    def rng(self) -> random.Random:
        return random.Random(self.options.seed)

    def size(self, name: str, default: int) -> int:
        value = getattr(self.options, name)
        return default if value is None else int(value)

    def encode(self, text: str) -> list[int]:
        """Token ids below the vocabulary size; UTF-8 bytes where there is no tokenizer."""
        ids = list(text.encode()) if self.tokenizer is None else list(self.tokenizer.encode(text))
        limit = self.options.max_length
        return [i % self.vocab_size for i in (ids if limit is None else ids[:limit])]


_Builder = Callable[[_Source], tuple[RaggedBatch, int | None, str]]
_SYNTHETIC = re.compile(r"synthetic:(\d+)\+(\d+)x(\d+)")


def workload_names() -> list[str]:
    """The names `make_workload` takes; `synthetic` also as `synthetic:PREFIX+SUFFIXxBATCH`."""
    return list(_BUILDERS)


def is_workload(name: str) -> bool:
    """Whether `make_workload` knows the name."""
    return name in _BUILDERS or _SYNTHETIC.fullmatch(name) is not None


def is_text(name: str) -> bool:
    """Whether the workload called `name` is made of text, and so depends on a tokenizer."""
    return name in _TEXTS


def make_workload(
    name: str, tokenizer: Tokenizer | None, vocab_size: int, **options: int | str | Path | None
) -> Workload:
    """Build the batch called `name`.

    Args:
        name: one of `workload_names()`, or `synthetic:PREFIX+SUFFIXxBATCH` such as `synthetic:512+64x16`.
        tokenizer: for text workloads; None: UTF-8 bytes. Ids are taken modulo `vocab_size`.
        vocab_size: ids stay below it.
        options: fields of `WorkloadOptions`.

    Raises:
        ValueError: an unknown name (the message lists the known ones), or text that cannot be read.
    """
    given = WorkloadOptions(**options)  # type: ignore[arg-type]
    shape = _SYNTHETIC.fullmatch(name)
    if shape is not None:
        prefix, suffix, batch = (int(n) for n in shape.groups())
        given = WorkloadOptions(prefix, suffix, batch, seed=given.seed)
    elif name not in _BUILDERS:
        known = ", ".join(workload_names())
        raise ValueError(f"unknown workload {name!r}: known are {known}, synthetic:PREFIX+SUFFIXxBATCH")
    builder = _synthetic if shape is not None else _BUILDERS[name]
    batch_, prefix_length, description = builder(_Source(tokenizer, vocab_size, given))
    return Workload(name, batch_, prefix_length, description)


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def _distinct_starts(rng: random.Random, rows: list[list[int]], vocab_size: int) -> list[list[int]]:
    """Give every row another first token, so that none share anything."""
    if len(rows) > vocab_size:
        raise ValueError(f"{len(rows)} sequences cannot all start differently with {vocab_size} token ids")
    starts = rng.sample(range(vocab_size), len(rows))
    return [[start, *row[1:]] if row else row for start, row in zip(starts, rows, strict=True)]


def _synthetic(source: _Source) -> tuple[RaggedBatch, int, str]:
    prefix_length, suffix_length = source.size("prefix_length", 128), source.size("suffix_length", 32)
    batch_size, rng, vocab = source.size("batch_size", 8), source.rng, source.vocab_size
    prefix = _ids(rng, prefix_length, vocab)
    suffixes = [_ids(rng, suffix_length, vocab) for _ in range(batch_size)]
    if suffix_length and batch_size <= vocab:
        suffixes = _distinct_starts(rng, suffixes, vocab)
    batch = RaggedBatch.from_sequences([prefix + suffix for suffix in suffixes])
    return (
        batch,
        prefix_length,
        f"{batch_size} sequences of {prefix_length} shared and {suffix_length} own tokens",
    )


def _tree(source: _Source) -> tuple[RaggedBatch, int, str]:
    """Rollouts of an agent: a prompt, then three steps, each continued in `batch_size` ways."""
    prompt_length, step_length = source.size("prefix_length", 48), source.size("suffix_length", 12)
    children, rng, vocab = source.size("batch_size", 3), source.rng, source.vocab_size
    paths = [_ids(rng, prompt_length, vocab)]
    for _ in range(3):
        paths = [path + _ids(rng, step_length, vocab) for path in paths for _ in range(children)]
    rng.shuffle(paths)  # rollouts finish in any order, so first occurrence is not depth-first
    text = (
        f"{len(paths)} rollouts from {prompt_length} tokens: 3 steps of {step_length}, {children} ways each"
    )
    return RaggedBatch.from_sequences(paths), prompt_length, text


def _nothing_shared(source: _Source) -> tuple[RaggedBatch, int, str]:
    length, count, rng = source.size("suffix_length", 64), source.size("batch_size", 8), source.rng
    rows = [_ids(rng, max(length - i, 1), source.vocab_size) for i in range(count)]
    batch = RaggedBatch.from_sequences(_distinct_starts(rng, rows, source.vocab_size))
    return batch, 0, f"{count} sequences that differ from the first token on"


def _all_equal(source: _Source) -> tuple[RaggedBatch, int, str]:
    length, count = source.size("prefix_length", 64), source.size("batch_size", 8)
    row = _ids(source.rng, length, source.vocab_size)
    return (
        RaggedBatch.from_sequences([row] * count),
        length,
        f"{count} copies of one sequence of {length} tokens",
    )


def _one_sequence(source: _Source) -> tuple[RaggedBatch, int, str]:
    length = source.size("prefix_length", 64)
    return (
        RaggedBatch.from_sequences([_ids(source.rng, length, source.vocab_size)]),
        0,
        f"{length} tokens, alone",
    )


def _edges(source: _Source) -> tuple[RaggedBatch, int, str]:
    """Where builders and masks go wrong.

    Empty and one-token rows, a row that is another's prefix, a row that equals another but for its first token,
    rows equal in tokens but not in positions (all shifted; a gap in the middle, which rotary attention cannot
    take for a shift), rows kept apart by their keys, and branches that return after others.
    """
    rng, vocab = source.rng, source.vocab_size
    length = source.size("prefix_length", 24)
    stem, left, right = (_ids(rng, n, vocab) for n in (length, length // 2, length // 3))
    other = [(stem[0] + 1) % vocab, *stem[1:]] if stem else []
    whole = stem + left
    gap = [*range(length), *range(length + 9, length + 9 + len(left))]
    shifted = list(range(7, 7 + len(stem + right)))
    rows: list[tuple[list[int], list[int] | None, str]] = [
        (whole, None, "a"),
        ([], None, "a"),
        (stem[:1], None, "a"),
        (stem + right, None, "a"),
        (stem, None, "a"),
        (other + left, None, "a"),
        (stem + left[:-1] + right, None, "a"),
        (stem + right, shifted, "a"),
        (whole, gap, "a"),
        (whole, None, "b"),
        ([], None, "b"),
        (right, None, "a"),
        (whole, None, "a"),
    ]
    ids, given, keys = zip(*rows, strict=True)
    positions = [p or list(range(len(row))) for row, p in zip(ids, given, strict=True)]
    batch = RaggedBatch.from_sequences(ids, positions, keys)
    return batch, length, "empty, one-token, contained, shifted, gapped and key-separated sequences"


def _rerank(form: Callable[[str, str], str], load: Callable[[_Source], list[RankedPassages]]) -> _Builder:
    def build(source: _Source) -> tuple[RaggedBatch, None, str]:
        entries = load(source)[: source.size("queries", 1)]
        passages = source.size("passages", 20)
        texts = [form(entry.query, text) for entry in entries for text in entry.passages[:passages]]
        return _tokenized(source, texts), None, f"{len(entries)} queries, up to {passages} passages each"

    return build


def _embed_system_prompt(source: _Source) -> tuple[RaggedBatch, None, str]:
    texts = [prompts.embed_with_system_prompt(text) for text in _passage_texts(source)]
    return _tokenized(source, texts), None, f"{len(texts)} passages under one system prompt"


def _few_shot(source: _Source) -> tuple[RaggedBatch, None, str]:
    texts = [prompts.few_shot(text) for text in _passage_texts(source)]
    shots = len(prompts.FEW_SHOT_EXAMPLES)
    return _tokenized(source, texts), None, f"{len(texts)} texts to label after {shots} examples"


def _tokenized(source: _Source, texts: Sequence[str]) -> RaggedBatch:
    return RaggedBatch.from_sequences([source.encode(text) for text in texts])


def _read_data(source: _Source) -> list[RankedPassages]:
    return load_passages(source.options.data or SHIPPED_FILE)


def _read_msmarco(source: _Source) -> list[RankedPassages]:
    return load_msmarco(source.size("queries", 1))


def _passage_texts(source: _Source) -> list[str]:
    """`passages` texts, taken from all queries in turn."""
    columns = zip(*(entry.passages for entry in _read_data(source)), strict=False)
    texts = [text for column in columns for text in column]
    return texts[: source.size("passages", 16)]


_SHAPES: dict[str, _Builder] = {
    "synthetic": _synthetic,
    "tree": _tree,
    "nothing-shared": _nothing_shared,
    "all-equal": _all_equal,
    "one-sequence": _one_sequence,
    "edges": _edges,
}
_TEXTS: dict[str, _Builder] = {
    "rerank-query-first": _rerank(prompts.rerank_query_first, _read_data),
    "rerank-document-first": _rerank(prompts.rerank_document_first, _read_data),
    "embed-system-prompt": _embed_system_prompt,
    "few-shot": _few_shot,
    "msmarco-query-first": _rerank(prompts.rerank_query_first, _read_msmarco),
    "msmarco-document-first": _rerank(prompts.rerank_document_first, _read_msmarco),
}
_BUILDERS = {**_SHAPES, **_TEXTS}
