"""Texts around queries and documents, and the tokens that answer."""

from __future__ import annotations

import string
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Template:
    """A prompt with one part that truncation may cut.

    Args:
        body: a format string, tokenised as one text; its field `cut` is the part that may be cut.
        fields: all names that `body` may use. Values are put in as they are: braces in them mean nothing.
        cut: "document" or "text".
        prefix, suffix: tokenised on their own and put around the body's ids.
        instruction: the default of the field {instruction}.

    Raises:
        ValueError: a malformed format string, or an unknown, missing or repeated field.
    """

    body: str
    fields: tuple[str, ...] = ("instruction", "query", "document")
    cut: str = "document"
    prefix: str = ""
    suffix: str = ""
    instruction: str = ""

    def __post_init__(self) -> None:
        try:
            parts = [part for part in string.Formatter().parse(self.body) if part[1] is not None]
        except ValueError as error:
            raise ValueError(f"template {self.body!r} is not a format string: {error}") from None
        used = [str(name) for _, name, _, _ in parts]
        for _, name, spec, conversion in parts:
            if spec or conversion:
                raise ValueError(
                    f"template formats {{{name}}} ({spec or conversion!r}): values are put in as they are, "
                    f"write {{{name}}}"
                )
        known = ", ".join(f"{{{name}}}" for name in self.fields)
        for name in used:
            if name not in self.fields:
                raise ValueError(
                    f"template has the field {{{name}}}: known are {known} (write {{{{ for a plain brace)"
                )
        for name in self.fields:
            least = 0 if name == "instruction" else 1
            if not least <= used.count(name) <= 1:
                raise ValueError(
                    f"template has {{{name}}} {used.count(name)} times: expected once, of {known}"
                )

    @cached_property
    def _halves(self) -> tuple[list[tuple[str, str | None]], list[tuple[str, str | None]]]:
        """(literal, field) pairs before and after the part that may be cut."""
        parts = [(literal, name) for literal, name, _, _ in string.Formatter().parse(self.body)]
        at = next(i for i, (_, name) in enumerate(parts) if name == self.cut)
        return [*parts[:at], (parts[at][0], None)], parts[at + 1 :]

    def around(self, **values: str) -> tuple[str, str]:
        """The texts before and after the part that may be cut."""
        head, tail = (
            "".join(literal + ("" if name is None else values[name]) for literal, name in half)
            for half in self._halves
        )
        return head, tail

    @property
    def takes_instruction(self) -> bool:
        """Whether there is a field {instruction}."""
        return any(name == "instruction" for half in self._halves for _, name in half)


# The published form of Qwen3-Reranker (its model card): prefix, body and suffix are tokenised apart, so that
# truncation of the body never reaches the answer's opening.
QWEN3_RERANKER = Template(
    body="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
    prefix=(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    ),
    suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
TEMPLATES = {"qwen3-reranker": QWEN3_RERANKER}


def rerank_template(given: Template | str) -> Template:
    """A template, the name of a known one, or a format string with {query} and {document}.

    Raises:
        ValueError: neither a known name nor a format string.
    """
    if isinstance(given, Template):
        return given
    if given in TEMPLATES:
        return TEMPLATES[given]
    if "{" not in given:
        raise ValueError(
            f"template is {given!r}: expected one of {', '.join(TEMPLATES)}, or a format string with {{query}} and "
            "{document}"
        )
    return Template(given)
