"""Encoders of requests that ask for the log-probability of what follows a prompt."""

from __future__ import annotations

from collections.abc import Sequence

from radixmlp.optimized.engine.encoders import Entry, Target, TemplateEncoder, texts_of
from radixmlp.optimized.engine.errors import RequestError
from radixmlp.optimized.engine.limits import Limit
from radixmlp.optimized.engine.tokens import Tokens


class LabelEncoder:
    """Texts in a template, each with every label's tokens behind it."""

    def __init__(self, prompts: TemplateEncoder, labels: Sequence[list[int]]) -> None:
        self.parts, self.first, self.limit = prompts.parts, prompts.first, prompts.limit
        self.around = prompts.around
        self.tokens, self._prompts = prompts.tokens, prompts
        groups: dict[
            tuple[int, ...], list[Target]
        ] = {}  # labels that differ in their last token share a sequence
        for column, label in enumerate(labels):
            groups.setdefault(tuple(label[:-1]), []).append(Target(column, label))
        self._groups = {beginning: tuple(targets) for beginning, targets in groups.items()}

    def __call__(self, numbers: Sequence[int]) -> list[Entry]:
        """See `Encoder`."""
        return [
            Entry(number, [*row, *beginning], targets)
            for number, row in zip(numbers, self._prompts.ids(numbers), strict=True)
            for beginning, targets in self._groups.items()
        ]


class ContinuationEncoder:
    """Prompts with continuations, each tokenised as one text and cut where the continuation begins.

    Whitespace at the end of a prompt counts to its continuation: most tokenizers join it to the next word.
    """

    def __init__(
        self, tokens: Tokens, pairs: Sequence[tuple[str, str]], first: Sequence[int], limit: Limit
    ) -> None:
        self.parts: Sequence[tuple[str, str]] = pairs
        self.first, self.limit = first, limit
        self.tokens = tokens
        self._prompts = [prompt.rstrip() for prompt, _ in pairs]
        self.around = len(tokens.lead)

    def __call__(self, numbers: Sequence[int]) -> list[Entry]:
        """See `Encoder`."""
        indices = [self.first[number] for number in numbers]
        lead = self.tokens.lead
        wholes = self.tokens.encode_each(texts_of(self, numbers), indices)
        distinct = list(dict.fromkeys(self._prompts[number] for number in numbers))
        known = dict(zip(distinct, self.tokens.encode(distinct), strict=True))
        return [
            self._entry(number, index, lead + known[self._prompts[number]], lead + whole)
            for number, index, whole in zip(numbers, indices, wholes, strict=True)
        ]

    def _entry(self, number: int, index: int, prompt: list[int], whole: list[int]) -> Entry:
        limit, cut = self.limit, len(prompt)
        if not prompt:
            raise RequestError(index, "has an empty prompt: the first token is predicted from nothing")
        if whole[:cut] != prompt:
            raise RequestError(
                index,
                f"is tokenised across the end of its prompt ({self._prompts[number][-20:]!r}): end the prompt where "
                "a word ends",
            )
        continuation = whole[cut:]
        if not continuation or not self.parts[number][1]:
            raise RequestError(index, "has an empty continuation: there is nothing to score")
        length = len(whole) - 1
        if length > limit.tokens:
            if not limit.truncate:
                raise limit.too_long(index, length)
            lead = len(self.tokens.lead)
            fixed = lead + len(continuation)
            if fixed > limit.tokens:
                raise limit.no_room(index, "the continuation", fixed)
            whole = whole[:lead] + whole[lead + length - limit.tokens :]
        return Entry(number, whole[:-1], (Target(0, continuation),))
