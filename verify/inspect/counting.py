"""One pass over a file of requests: sums over batches, the tree of its head, and what keeps sequences apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from radixmlp.optimized.jobs.requests import BadLine, Kind, Request
from radixmlp.verify.inspect.causes import find_causes
from radixmlp.verify.inspect.inspection import Inspection, Line, Options
from radixmlp.verify.inspect.ragged import Tokens
from radixmlp.verify.inspect.survey import count_batch
from radixmlp.verify.inspect.templates import Template, Text, template_for
from radixmlp.verify.inspect.tokenizing import TextTokenizer
from radixmlp.verify.inspect.tree import Tree

KEPT_BAD_LINES = 20
_CHUNK_TEXTS, _CHUNK_CHARACTERS = 1_024, 1 << 20

Progress = Callable[[int, int], None]


def inspect_requests(
    lines: Iterable[Request | BadLine],
    tokenizer: TextTokenizer,
    templates: Mapping[Kind, Template],
    options: Options | None = None,
    progress: Progress = lambda requests, tokens: None,
) -> Inspection:
    """Read, render, tokenize and count; memory does not grow with the file.

    Args:
        lines: as `read_requests` yields them.
        templates: as `find_templates` returns them.
        progress: called with (requests, tokens) now and then.

    Raises:
        ValueError: a request that the chosen template cannot write; the message names its line.
    """
    options = options or Options()
    found = Inspection(options, tokenizer.name, Line.empty("", options))
    counter = _Counter(found, tokenizer, templates, options)
    for chunk in _chunks(_requests(lines, found)):
        counter.count(chunk)
        progress(found.requests, counter.tokens)
    counter.finish()
    return found


def _requests(lines: Iterable[Request | BadLine], found: Inspection) -> Iterator[Request]:
    for line in lines:
        if isinstance(line, Request):
            yield line
            continue
        found.bad_lines += 1
        if len(found.bad) < KEPT_BAD_LINES:
            found.bad.append(line)


def _chunks(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Requests a few at a time: enough for the tokenizer to use its threads, bounded in text."""
    chunk: list[Request] = []
    texts = characters = 0
    for request in requests:
        chunk.append(request)
        texts += len(request.fields.get("passages", [""]))
        characters += sum(map(_characters, request.fields.values()))
        if texts >= _CHUNK_TEXTS or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, texts, characters = [], 0, 0
    if chunk:
        yield chunk


def _characters(value: Any) -> int:
    """Of all text inside a field."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


class _Counter:
    """What one pass keeps between chunks."""

    def __init__(
        self,
        found: Inspection,
        tokenizer: TextTokenizer,
        templates: Mapping[Kind, Template],
        options: Options,
    ) -> None:
        self.found = found
        self.tokenizer = tokenizer
        self.templates = templates
        self.options = options
        self.tokens = 0
        self._names: dict[str, None] = {}
        self._swapped_requests = 0
        self._whole: dict[str, list[Tokens] | None] = {"main": [], "swapped": []}

    def count(self, requests: Sequence[Request]) -> None:
        """One chunk of requests."""
        found = self.found
        pairs = [(template_for(self.templates, request), request) for request in requests]
        self._names.update(dict.fromkeys(template.name for template, _ in pairs))
        rendered = [(request.line, text) for template, request in pairs for text in template.texts(request)]
        texts = [text for _, text in rendered]
        tokens = self._encode(texts)
        found.requests += len(requests)
        found.sequences += tokens.num_sequences
        found.empty += int((tokens.lengths == 0).sum())
        found.doubled_bos += self._doubled(tokens)
        self.tokens += tokens.num_tokens
        fits = tokens.lengths <= self.options.max_batch_tokens
        if not fits.all():
            found.too_long += int((~fits).sum())
            if found.first_too_long is None:
                found.first_too_long = rendered[int((~fits).nonzero()[0][0])][0]
            tokens = tokens.pick(fits.nonzero()[0])
            texts = [text for text, fit in zip(texts, fits, strict=True) if fit]
        self._keep_head(texts, tokens)
        self._add("main", found.main, tokens)
        self._count_swapped(pairs)

    def finish(self) -> None:
        """The last pools, the tree and the causes."""
        found = self.found
        found.main.template = ", ".join(self._names) or "none"
        if self._swapped_requests < found.requests:
            found.swapped = None  # not of the same requests, and so nothing to compare with
        for name, line in (("main", found.main), ("swapped", found.swapped)):
            if line is None:
                continue
            for survey in line.surveys.values():
                survey.finish()
            parts = self._whole[name]
            if parts is not None:
                line.whole = count_batch(Tokens.join(parts), self.options.windows)
        head = found.head
        head.tree = Tree.of(head.tokens)
        # Special tokens stand before the text, so that a text is looked at as the tokenizer sees it.
        special = [text.special for text in head.texts]
        head.causes = find_causes(
            [text.text for text in head.texts],
            head.tree,
            lambda texts: self._encode([Text(t, s) for t, s in zip(texts, special, strict=True)]),
        )

    def _count_swapped(self, pairs: Sequence[tuple[Template, Request]]) -> None:
        both = [(template.swapped, request) for template, request in pairs if template.swapped is not None]
        self._swapped_requests += len(both)
        if self._swapped_requests < self.found.requests:
            return
        texts = [text for swapped, request in both if swapped is not None for text in swapped.texts(request)]
        if self.found.swapped is None:
            name = next(swapped.name for swapped, _ in both if swapped is not None)
            self.found.swapped = Line.empty(name, self.options)
        tokens = self._encode(texts)
        self._add(
            "swapped",
            self.found.swapped,
            tokens.pick((tokens.lengths <= self.options.max_batch_tokens).nonzero()[0]),
        )

    def _add(self, name: str, line: Line, tokens: Tokens) -> None:
        for survey in line.surveys.values():
            survey.add(tokens)
        parts = self._whole[name]
        if parts is not None:
            parts.append(tokens)
            if any(survey.pools for survey in line.surveys.values()):
                self._whole[name] = None  # more than one pool: not held together

    def _encode(self, texts: Sequence[Text]) -> Tokens:
        ids: list[list[int]] = [[] for _ in texts]
        for special in (True, False):
            which = [i for i, text in enumerate(texts) if text.special is special]
            if which:
                encoded = self.tokenizer.encode([texts[i].text for i in which], special)
                for i, sequence in zip(which, encoded, strict=True):
                    ids[i] = sequence
        return Tokens.of(ids)

    def _doubled(self, tokens: Tokens) -> int:
        if self.tokenizer.bos_id is None:
            return 0
        starts = tokens.starts[tokens.lengths > 1]
        ids, bos = tokens.ids, self.tokenizer.bos_id
        return int(((ids[starts] == bos) & (ids[starts + 1] == bos)).sum())

    def _keep_head(self, texts: Sequence[Text], tokens: Tokens) -> None:
        head = self.found.head
        if not head.complete:
            return
        room = self.options.head_tokens - head.tokens.num_tokens
        fitting = int((tokens.lengths.cumsum() <= room).sum())
        if texts and not head.texts:
            fitting = max(1, fitting)  # whatever its length, there is a first one
        count = min(fitting, self.options.head_sequences - len(head.texts))
        head.complete = count == len(texts)
        head.texts += texts[:count]
        head.tokens = Tokens.join([head.tokens, tokens.pick(range(count))])
