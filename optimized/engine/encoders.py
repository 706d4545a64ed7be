"""Distinct requests in, token sequences out; each kind of request knows where it may be cut.

An encoder has the `parts` of its requests' texts, by which they are ordered, and is called with numbers of distinct
requests whenever the engine gets to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from radixmlp.optimized.engine.errors import RequestError
from radixmlp.optimized.engine.limits import Limit
from radixmlp.optimized.engine.templates import Template
from radixmlp.optimized.engine.tokens import Tokens


@dataclass(frozen=True)
class Target:
    """A continuation whose log-probability is asked for.

    Args:
        column: of the result.
        tokens: the last of them follows the sequence; those before it are the sequence's own last tokens.
    """

    column: int
    tokens: list[int]


@dataclass(frozen=True)
class Entry:
    """One sequence to run.

    Args:
        request: number of the distinct request it belongs to.
        tokens: what the model is given.
        targets: what is asked of its end.
    """

    request: int
    tokens: list[int]
    targets: tuple[Target, ...] = ()


class Encoder(Protocol):
    """What `windows` draws from."""

    @property
    def parts(self) -> Sequence[tuple[str, ...]]:
        """Of each distinct request's text. Requests are taken in the order of these tuples; what many have in common
        is one string, not a copy for each."""
        ...

    @property
    def around(self) -> int:
        """Tokens that come to those of the text."""
        ...

    @property
    def first(self) -> Sequence[int]:
        """The index of each distinct request in the list that was given."""
        ...

    @property
    def limit(self) -> Limit:
        """Of one sequence."""
        ...

    @property
    def tokens(self) -> Tokens:
        """The tokenizer."""
        ...

    def __call__(self, numbers: Sequence[int]) -> list[Entry]:
        """The sequences of some distinct requests, in their order.

        Raises:
            RequestError: one is empty, too long or no valid text.
        """
        ...


def texts_of(encoder: Encoder, numbers: Sequence[int]) -> list[str]:
    """The texts of some distinct requests."""
    return ["".join(encoder.parts[number]) for number in numbers]


class TextEncoder:
    """Texts to embed, behind one prompt, with the special tokens the tokenizer adds by itself."""

    def __init__(
        self, tokens: Tokens, prompt: str, texts: Sequence[str], first: Sequence[int], limit: Limit
    ) -> None:
        self.parts = [(prompt, text) for text in texts]
        self.first, self.limit = first, limit
        self.tokens, self._prompt = tokens, prompt
        lead, trail = tokens.added
        self.around = len(lead) + len(trail)

    def __call__(self, numbers: Sequence[int]) -> list[Entry]:
        """See `Encoder`."""
        indices = [self.first[number] for number in numbers]
        rows = self.tokens.encode_each(texts_of(self, numbers), indices, special=True)
        return [
            Entry(number, self._checked(index, row))
            for number, index, row in zip(numbers, indices, rows, strict=True)
        ]

    def _checked(self, index: int, row: list[int]) -> list[int]:
        limit = self.limit
        if not row:
            raise RequestError(index, "has no tokens: leave it out, or give it some text")
        if len(row) <= limit.tokens:
            return row
        if not limit.truncate:
            raise limit.too_long(index, len(row))
        lead, trail = self.tokens.added
        fixed = len(lead) + len(trail) + len(self.tokens.encode([self._prompt])[0])
        if fixed >= limit.tokens:
            raise limit.no_room(index, "the prompt", fixed)
        kept = limit.tokens - len(trail)
        return row[:kept] + trail


class PairEncoder:
    """Queries with documents, joined as the tokenizer joins pairs."""

    def __init__(
        self, tokens: Tokens, pairs: Sequence[tuple[str, str]], first: Sequence[int], limit: Limit
    ) -> None:
        self.parts: Sequence[tuple[str, str]] = pairs
        self.first, self.limit = first, limit
        self.tokens = tokens
        self.around = len(tokens.encode_pairs(["a"], ["a"])[0]) - 2 * len(tokens.encode(["a"])[0])

    def __call__(self, numbers: Sequence[int]) -> list[Entry]:
        """See `Encoder`."""
        indices = [self.first[number] for number in numbers]
        queries, documents = zip(*(self.parts[number] for number in numbers), strict=True)
        rows = self.tokens.naming(
            lambda: self.tokens.encode_pairs(queries, documents), texts_of(self, numbers), indices
        )
        return [
            Entry(number, self._checked(number, index, row))
            for number, index, row in zip(numbers, indices, rows, strict=True)
        ]

    def _checked(self, number: int, index: int, row: list[int]) -> list[int]:
        limit = self.limit
        if not row:
            raise RequestError(index, "has no tokens: leave it out, or give it some text")
        if len(row) <= limit.tokens:
            return row
        if not limit.truncate:
            raise limit.too_long(index, len(row))
        query, document = self.parts[number]
        alone = self.tokens.encode_pairs([query], [""])[0]
        if len(alone) >= limit.tokens:
            raise limit.no_room(index, "the query", len(alone))
        kept = limit.tokens - len(alone)
        while kept > 0:  # the tokenizer's own truncation may cut a document's beginning
            row = self.tokens.encode_pairs([query], [self.tokens.cut_text(document, kept)])[0]
            if len(row) <= limit.tokens:
                return row
            kept -= len(row) - limit.tokens
        return alone


class TemplateEncoder:
    """Filled-in templates; what is too long loses the end of its document, and nothing else.

    Args:
        parts: (head, document, tail) of each distinct request.
        reserve: tokens to leave free behind the sequence.
    """

    def __init__(
        self,
        tokens: Tokens,
        template: Template,
        parts: Sequence[tuple[str, str, str]],
        first: Sequence[int],
        limit: Limit,
        reserve: int = 0,
    ) -> None:
        self.parts: Sequence[tuple[str, str, str]] = parts
        self.first, self.limit = first, limit
        self.tokens = tokens
        self._prefix = tokens.lead + tokens.encode([template.prefix])[0]
        self._suffix = tokens.encode([template.suffix])[0]
        self.around = len(self._prefix) + len(self._suffix) + reserve

    def __call__(self, numbers: Sequence[int]) -> list[Entry]:
        """See `Encoder`."""
        return [Entry(number, row) for number, row in zip(numbers, self.ids(numbers), strict=True)]

    def ids(self, numbers: Sequence[int]) -> list[list[int]]:
        """The tokens of some distinct requests, in their order."""
        indices = [self.first[number] for number in numbers]
        bodies = self.tokens.encode_each(texts_of(self, numbers), indices)
        return [
            self._prefix + self._fitted(number, index, body) + self._suffix
            for number, index, body in zip(numbers, indices, bodies, strict=True)
        ]

    def _fitted(self, number: int, index: int, body: list[int]) -> list[int]:
        length, room = len(body) + self.around, self.limit.tokens - self.around
        if length == 0:
            raise RequestError(index, "has no tokens: leave it out, or give it some text")
        if length <= self.limit.tokens:
            return body
        if not self.limit.truncate:
            raise self.limit.too_long(index, length)
        head, document, tail = self.parts[number]
        fixed = len(self.tokens.encode([head + tail])[0])
        if fixed >= room:
            raise self.limit.no_room(index, "the template with all but its document", fixed + self.around)
        if not tail:
            return body[:room]
        kept = room - fixed
        while kept > 0:  # joints may tokenise to more than their parts
            text = head + self.tokens.cut_text(document, kept) + tail
            body = self.tokens.encode([text])[0]
            if len(body) <= room:
                return body
            kept -= len(body) - room
        return self.tokens.encode([head + tail])[0]
