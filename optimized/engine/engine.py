"""`Engine`: texts in, embeddings, scores and labels out, every shared prefix of the pile computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from radixmlp.optimized.engine.answers import (
    Pooling,
    Reader,
    read_answers,
    read_classifier,
    read_columns,
    read_embeddings,
    read_scores,
)
from radixmlp.optimized.engine.calls import OnBatch, answer
from radixmlp.optimized.engine.config import EngineConfig
from radixmlp.optimized.engine.continuations import ContinuationEncoder, LabelEncoder
from radixmlp.optimized.engine.encoders import (
    Encoder,
    PairEncoder,
    TemplateEncoder,
    TextEncoder,
)
from radixmlp.optimized.engine.labels import (
    answer_token,
    check_borders,
    check_examples,
    check_labels,
    label_tokens,
)
from radixmlp.optimized.engine.limits import Limit
from radixmlp.optimized.engine.loading import Kind, load
from radixmlp.optimized.engine.piles import Pile, check_text, check_texts
from radixmlp.optimized.engine.results import Classification, Scores
from radixmlp.optimized.engine.stats import EngineStats
from radixmlp.optimized.engine.templates import QWEN3_RERANKER, Template, rerank_template
from radixmlp.optimized.engine.tokens import Tokens
from radixmlp.optimized.errors import UnsupportedModelError
from radixmlp.optimized.integration.models import (
    Head,
    embedding_of,
    head_of,
    refuse_virtual_tokens,
    unwrapped,
)
from radixmlp.optimized.integration.probe import ensure_verified

_BORDER = 200  # characters before a label that are tokenised to see whether it stays apart


class Engine:
    """Answers piles of requests with a Hugging Face causal model, computing every shared prefix of a batch once.

    Requests are ordered along their common prefixes, packed so that a batch's computed rows fit
    `config.max_batch_tokens`, and tokenised and indexed by a thread while the batches before them run (arXiv
    2601.15013, section 4). Results come in the order of the requests; a request given twice is computed once. The
    last token is found from lengths: no pad token is needed, none is read. `engine.stats` counts what was done.
    Calls from several threads take turns on a model.

    All calls raise `RequestError`, a ValueError that names the request's index, the value and the remedy: for a
    request that has no tokens or is too long for the model, the budget or `max_length` (one that can be by its bytes
    is tokenised before anything runs), and for a result that is not finite. They raise TypeError for what is no
    string.

    Args:
        model: a causal LM, base decoder or sequence classifier, plain, enabled or wrapped; run in eval mode.
        tokenizer: its tokenizer.
        config: how to batch and run.

    Raises:
        UnsupportedModelError: rows of this model cannot be shared, and why.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig | None = None) -> None:
        refuse_virtual_tokens(model)
        self.model = unwrapped(model)
        self.tokenizer = tokenizer
        self.config = EngineConfig() if config is None else config
        self.stats = EngineStats()
        self._tokens = Tokens(tokenizer)
        max_rows = ensure_verified(self.model).max_rows
        self._limit = Limit.of(self.model, self.config, max_rows)
        budget = self.config.max_batch_tokens
        self._running = replace(self.config, max_batch_tokens=min(budget, max_rows or budget))

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        gguf_file: str | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        config: EngineConfig | None = None,
        kind: Kind = "auto",
    ) -> Engine:
        """An engine for a model on the hub, in a folder, or in a GGUF file of such.

        Args:
            name_or_path: as transformers takes it.
            gguf_file: the name of a GGUF file there.
            dtype: of the weights; None: as they were saved (fp32 from a GGUF file).
            device: None: "cuda" where there is one, else "cpu".
            config: of the engine.
            kind: the class to load: "causal-lm", "sequence-classification", "base"; "auto": what the model's config
                names.

        Raises:
            ValueError: it cannot be loaded, and why.
        """
        model, tokenizer = load(name_or_path, gguf_file, dtype, device, kind)
        return cls(model, tokenizer, config)

    def embed(
        self,
        texts: Sequence[str],
        prompt: str | None = None,
        pooling: Pooling = "last",
        normalize: bool = True,
        *,
        on_batch: OnBatch | None = None,
    ) -> Tensor:
        """[n, hidden] fp32 on the CPU: an embedding of each text.

        Args:
            prompt: put before each text, and tokenised with it.
            pooling: "last": the last token's final state; "mean": the mean over all tokens, prompt and special tokens
                included.
            normalize: to length 1, in fp32.
            on_batch: called after each batch with the indices of the texts it answered (all of them where one is
                given twice) and their embeddings [k, hidden]. What it raises ends the call.

        Special tokens are those the tokenizer adds by itself (an EOS, where it is set up so). Truncation keeps them.
        """
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling is {pooling!r}: expected 'last' or 'mean'")
        texts = check_texts("texts", texts)
        prompt = "" if prompt is None else check_text("prompt", prompt)
        pile = Pile.of(texts)
        encoder = TextEncoder(
            self._tokens, prompt, [texts[index] for index in pile.first], pile.first, self._limit
        )
        width = self.model.config.get_text_config().hidden_size
        return self._answer(pile, encoder, read_embeddings(pooling, normalize, width), on_batch)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None = None,
        *,
        template: Template | str | None = None,
        labels: tuple[str | int, str | int] = ("yes", "no"),
    ) -> Tensor:
        """[n] fp32 on the CPU: how well each document answers the query; see `rerank_pairs`."""
        check_text("query", query)
        documents = check_texts("documents", documents)
        return self.rerank_pairs(
            [query] * len(documents), documents, instruction, template=template, labels=labels
        )

    def rerank_pairs(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        instruction: str | None = None,
        *,
        template: Template | str | None = None,
        labels: tuple[str | int, str | int] = ("yes", "no"),
        on_batch: OnBatch | None = None,
    ) -> Tensor:
        """[n] fp32 on the CPU: how well document i answers query i; many queries share batches.

        A causal LM gives the probability of the first label against the second as its next token, of their two logits
        alone. A sequence classifier with one label gives its score as it is (no sigmoid).

        Args:
            queries, documents: of one length.
            instruction: what the template has a place for; None: its own default.
            template: a `Template`, the name of one, or a format string with {query} and {document}. None:
                Qwen3-Reranker's for a causal LM, the tokenizer's own joining of pairs for a classifier.
            labels: tokens (of one token each) or token ids.
            on_batch: as of `embed`, with scores [k].

        Raises:
            UnsupportedModelError: the model has neither a language-model head nor a score of one label.
            ValueError: lists of different lengths, a bad template, labels of several tokens.

        Text that spells a special token (an `<|im_end|>` in a document) is read as that token, as transformers reads
        it: where documents are not trusted, load the tokenizer with `split_special_tokens=True`.

        Truncation cuts the document's end and never the query or the template. Where a template's body goes on behind
        the document, the document's text is cut and the whole tokenised anew.
        """
        queries, documents = check_texts("queries", queries), check_texts("documents", documents)
        _check_lengths("queries", queries, "documents", documents)
        kind = head_of(self.model)
        classifier = kind is Head.SEQUENCE and self.model.config.num_labels == 1
        if not classifier and kind is not Head.LANGUAGE:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has neither a language-model head nor a score of one label: nothing to "
                "rank by"
            )
        pairs = list(zip(queries, documents, strict=True))
        pile = Pile.of(pairs)
        distinct = [pairs[index] for index in pile.first]
        encoder: Encoder
        if classifier and template is None:
            if instruction is not None:
                raise ValueError("instruction has no place: name a template that has one")
            encoder = PairEncoder(self._tokens, distinct, pile.first, self._limit)
        else:
            form = rerank_template(QWEN3_RERANKER if template is None else template)
            encoder = self._rendered(form, distinct, pile, instruction)
        reader = read_classifier() if classifier else self._read_pair(labels)
        told = None if on_batch is None else lambda indices, values: on_batch(indices, values[:, 0])
        return self._answer(pile, encoder, reader, told)[:, 0]

    def classify(
        self,
        texts: Sequence[str],
        labels: Sequence[str],
        examples: Sequence[tuple[str, str]] = (),
        *,
        instruction: str | None = None,
        template: str = "Text: {text}\nLabel:",
        separator: str = " ",
    ) -> Classification:
        """Few-shot classification: the label whose tokens are likeliest after the examples and the text.

        The prompt is the instruction, then each example in the template with its label, then the text in the
        template, with an empty line between them. All texts share what stands before theirs, and a text's labels
        share the whole.

        Args:
            labels: what to choose from, of one or several tokens each; the longer have no handicap but their own.
            examples: (text, label) each.
            instruction: the first lines of the prompt.
            template: a format string with {text}.
            separator: between the filled-in template and a label.

        Raises:
            UnsupportedModelError: the model has no language-model head.
            ValueError: a label that is joined to the prompt's last token, or whose tokens begin another's; an example
                with an unknown label; a bad template.
        """
        self._require_language_model("classify")
        texts, labels = check_texts("texts", texts), check_labels(labels)
        form = Template(template, ("text",), "text")
        shots = "" if instruction is None else check_text("instruction", instruction) + "\n\n"
        for text, label in check_examples(examples, labels):
            head, tail = form.around()
            shots += f"{head}{text}{tail}{separator}{label}\n\n"
        pile = Pile.of(texts)
        if not texts:
            return Classification([], torch.empty(0, len(labels)))
        head, tail = form.around()
        head = shots + head
        parts = [(head, texts[index], tail) for index in pile.first]
        behind = label_tokens(self._tokens, labels, "".join(parts[0]), separator)
        if not any(map(str.isspace, tail)):  # nothing keeps a label apart from the text's own end
            ends = [(head[-_BORDER:] + texts[index])[-_BORDER:] + tail for index in pile.first]
            check_borders(self._tokens, labels, behind, ends, separator)
        reserve = max(len(ids) for ids in behind) - 1
        prompts = TemplateEncoder(self._tokens, form, parts, pile.first, self._limit, reserve)
        encoder = LabelEncoder(prompts, behind)
        logprobs = self._answer(pile, encoder, read_columns(len(labels)))
        return Classification([labels[column] for column in logprobs.argmax(1).tolist()], logprobs)

    def score(
        self, prompts: Sequence[str], continuations: Sequence[str], *, on_batch: OnBatch | None = None
    ) -> Scores:
        """log p of each continuation after its prompt.

        Prompt and continuation are tokenised as one text. Whitespace at the prompt's end counts to the continuation,
        which most tokenizers join it to. Truncation cuts the prompt's beginning, never the continuation.

        Args:
            prompts, continuations: of one length.
            on_batch: as of `embed`, with rows [k, 2]: log-probability, number of tokens.

        Raises:
            UnsupportedModelError: the model has no language-model head.
            RequestError: also for an empty prompt or continuation, and where a token spans the border between them.
        """
        self._require_language_model("score")
        prompts, continuations = check_texts("prompts", prompts), check_texts("continuations", continuations)
        _check_lengths("prompts", prompts, "continuations", continuations)
        pairs = list(zip(prompts, continuations, strict=True))
        pile = Pile.of(pairs)
        encoder = ContinuationEncoder(
            self._tokens, [pairs[index] for index in pile.first], pile.first, self._limit
        )
        found = self._answer(pile, encoder, read_scores(), on_batch)
        return Scores(found[:, 0], found[:, 1].long())

    def _answer(
        self, pile: Pile, encoder: Encoder, reader: Reader, on_batch: OnBatch | None = None
    ) -> Tensor:
        return answer(self.model, self._running, self.stats, pile, encoder, reader, on_batch)

    def _rendered(
        self, form: Template, pairs: list[tuple[str, str]], pile: Pile, instruction: str | None
    ) -> TemplateEncoder:
        if instruction is not None and not form.takes_instruction:
            raise ValueError("instruction has no place: the template has no field {instruction}")
        wanted = form.instruction if instruction is None else check_text("instruction", instruction)
        around = {query: form.around(instruction=wanted, query=query) for query, _ in pairs}
        parts = [(around[query][0], document, around[query][1]) for query, document in pairs]
        return TemplateEncoder(self._tokens, form, parts, pile.first, self._limit)

    def _read_pair(self, labels: tuple[str | int, str | int]) -> Reader:
        if isinstance(labels, str) or len(labels) != 2:
            raise ValueError(f"labels is {labels!r}: expected two, such as ('yes', 'no')")
        vocabulary = embedding_of(self.model).shape[0]
        yes, no = (answer_token(self._tokens, label, vocabulary) for label in labels)
        if yes == no:
            raise ValueError(f"labels is {labels!r}: both are token {yes}")
        return read_answers(yes, no)

    def _require_language_model(self, what: str) -> None:
        if head_of(self.model) is not Head.LANGUAGE:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no language-model head to {what} with"
            )


def _check_lengths(name: str, some: Sequence[str], other: str, others: Sequence[str]) -> None:
    if len(some) != len(others):
        raise ValueError(f"{len(some)} {name} for {len(others)} {other}: give one for each")
