"""How a request becomes the texts a model reads: by its kind, by a named template, or by a format string."""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixmlp.optimized.engine.templates import QWEN3_RERANKER
from radixmlp.optimized.engine.templates import Template as EngineTemplate
from radixmlp.optimized.jobs.requests import Kind, Request
from radixmlp.verify import prompts
from radixmlp.verify.inspect.tokenizing import TextTokenizer

Render = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Text:
    """One sequence's text.

    Args:
        text: what is tokenized.
        special: whether the tokenizer adds its own special tokens (a chat template has written them already).
    """

    text: str
    special: bool


@dataclass(frozen=True)
class Template:
    """One way to write requests of one kind.

    Args:
        name: as the report shows it.
        kind: of the requests it takes.
        render: from a request's fields, one passage at a time, to text.
        special: as in `Text`.
        swapped: the same with query and passage in the other order.
    """

    name: str
    kind: Kind
    render: Render
    special: bool = True
    swapped: Template | None = None

    def texts(self, request: Request) -> list[Text]:
        """One text a passage for pairs, one for everything else."""
        if request.kind != self.kind:
            raise ValueError(
                f"line {request.line} holds {_NEEDS[request.kind]}, but the template {self.name!r} needs "
                f"{_NEEDS[self.kind]}: leave --template out to choose by what each line holds"
            )
        fields = request.fields
        if self.kind != "pair":
            return [Text(self._rendered(fields, request.line), self.special)]
        pairs = ({"query": fields["query"], "passage": passage.text} for passage in fields["passages"])
        return [Text(self._rendered(pair, request.line), self.special) for pair in pairs]

    def _rendered(self, fields: Mapping[str, Any], line: int) -> str:
        try:
            return self.render(fields)
        except ValueError:
            raise
        except Exception as error:  # a chat template is a program of its author's
            raise ValueError(
                f"line {line}: the chat template refuses the messages ({error}): correct them, or add "
                "--template chatml"
            ) from None


_NEEDS: dict[Kind, str] = {
    "text": "`text`",
    "messages": "`messages`",
    "pair": "`query` and `passages`",
    "continuation": "`prompt` and `continuation`",
}
_OWN = {"document": "passage"}  # two words for one thing
_SWAPPED = {"query": "passage", "passage": "query", "document": "query"}
_FORMAT_FIELDS: dict[str, Kind] = {
    "text": "text",
    "query": "pair",
    "passage": "pair",
    "document": "pair",
    "prompt": "continuation",
    "continuation": "continuation",
}


def template_names() -> list[str]:
    """The names `find_templates` knows; it also takes a format string such as "Q: {query} D: {passage}"."""
    return ["query-first", "document-first", "qwen3-reranker", "chat", "chatml"]


def find_templates(name: str | None, tokenizer: TextTokenizer) -> dict[Kind, Template]:
    """The template for each kind of request that can be written.

    Args:
        name: one of `template_names()`, a format string (it holds a "{"), or None: text as it is, messages by the
            tokenizer's chat template, pairs query first, prompt and continuation joined.
        tokenizer: for its chat template.

    Raises:
        ValueError: an unknown name or a format string that cannot be filled in.
    """
    if name is None:
        chosen = [_PLAIN, _chat(tokenizer), _QUERY_FIRST, _JOINED]
    elif "{" in name:
        chosen = [_from_format(name)]
    elif name in template_names():
        chosen = [
            {t.name: t for t in (_QUERY_FIRST, _DOCUMENT_FIRST, _QWEN3, _chat(tokenizer), _CHATML)}[name]
        ]
    else:
        raise ValueError(
            f"unknown template {name!r}: known are {', '.join(template_names())}, or a format string such as "
            "'Query: {query}\\nPassage: {passage}'"
        )
    return {template.kind: template for template in chosen}


def template_for(templates: Mapping[Kind, Template], request: Request) -> Template:
    """The template of a request's kind; where the choice has none, one whose `texts` says so."""
    return templates.get(request.kind) or next(iter(templates.values()))


def _engine_form(template: EngineTemplate) -> Render:
    """A template of the engine's, whose parts are tokenized as one text here."""

    def render(fields: Mapping[str, Any]) -> str:
        before, after = template.around(instruction=template.instruction, query=fields["query"])
        return template.prefix + before + fields["passage"] + after + template.suffix

    return render


def _chat(tokenizer: TextTokenizer) -> Template:
    return Template("chat", "messages", lambda fields: tokenizer.chat(fields["messages"]), special=False)


def _chatml(fields: Mapping[str, Any]) -> str:
    turns = "".join(f"<|im_start|>{m['role']}\n{_content(m)}<|im_end|>\n" for m in fields["messages"])
    return f"{turns}<|im_start|>assistant\n"


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _from_format(form: str) -> Template:
    """A format string with plain fields only: no attributes, indices, conversions or format specs."""
    try:
        parts = list(string.Formatter().parse(form.replace("\\n", "\n")))
    except ValueError as error:
        raise ValueError(f"the template {form!r} is no format string: {error}") from None
    names = {name for _, name, _, _ in parts if name is not None}
    for _, name, spec, conversion in parts:
        if name is not None and (name not in _FORMAT_FIELDS or spec or conversion):
            raise ValueError(
                f"the template {form!r} has a field {{{name}}} it cannot fill in: known are "
                + ", ".join(f"{{{known}}}" for known in _FORMAT_FIELDS)
                + " (write {{ and }} for braces)"
            )
    kinds = {_FORMAT_FIELDS[name] for name in names}
    if len(kinds) != 1:
        raise ValueError(
            f"the template {form!r} needs fields of one kind of request: {{text}}, {{query}} and {{passage}}, or "
            "{prompt} and {continuation}"
        )
    (kind,) = kinds
    plain = [(literal, name) for literal, name, _, _ in parts]
    swapped = None
    if "query" in names and len(names) > 1:
        swapped = Template("query and passage swapped", kind, _filled(plain, _SWAPPED))
    return Template(form, kind, _filled(plain, _OWN), swapped=swapped)


def _filled(parts: list[tuple[str, str | None]], own: Mapping[str, str]) -> Render:
    def render(fields: Mapping[str, Any]) -> str:
        return "".join(literal + (fields[own.get(name, name)] if name else "") for literal, name in parts)

    return render


def _pair(form: Callable[[str, str], str]) -> Render:
    return lambda fields: form(fields["query"], fields["passage"])


_PLAIN = Template("text", "text", lambda fields: fields["text"])
_JOINED = Template(
    "prompt + continuation", "continuation", lambda fields: fields["prompt"] + fields["continuation"]
)
_CHATML = Template("chatml", "messages", _chatml, special=False)
_QUERY_FIRST = Template(
    "query-first",
    "pair",
    _pair(prompts.rerank_query_first),
    swapped=Template("document-first", "pair", _pair(prompts.rerank_document_first)),
)
_DOCUMENT_FIRST = Template(
    "document-first", "pair", _pair(prompts.rerank_document_first), swapped=_QUERY_FIRST
)
_DOCUMENT_BEFORE_QUERY = EngineTemplate(
    "<Instruct>: {instruction}\n<Document>: {document}\n<Query>: {query}",
    prefix=QWEN3_RERANKER.prefix,
    suffix=QWEN3_RERANKER.suffix,
    instruction=QWEN3_RERANKER.instruction,
)
_QWEN3 = Template(
    "qwen3-reranker",
    "pair",
    _engine_form(QWEN3_RERANKER),
    swapped=Template("document first", "pair", _engine_form(_DOCUMENT_BEFORE_QUERY)),
)
