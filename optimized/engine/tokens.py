"""A tokenizer as the engine uses it: lists of texts in, lists of ids out, special tokens known and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from radixmlp.optimized.engine.errors import RequestError

_SAMPLES = ("a", "0", ".")
_MOST_SAMPLES = 500  # of a vocabulary's tokens from either end, where none of these is in it


class Tokens:
    """Calls of a Hugging Face tokenizer. Nothing is padded: no pad token is needed.

    Args:
        tokenizer: slow or fast.

    Raises:
        TypeError: it is not callable.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not callable(tokenizer):
            raise TypeError(f"tokenizer is a {type(tokenizer).__name__}: expected a transformers tokenizer")
        self.tokenizer = tokenizer

    def encode(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """The ids of each text, with the tokens the tokenizer adds by itself where `special`."""
        return self._call(list(texts), add_special_tokens=special)["input_ids"] if texts else []

    def encode_pairs(self, firsts: Sequence[str], seconds: Sequence[str]) -> list[list[int]]:
        """The ids of each pair, as the tokenizer joins pairs."""
        if not firsts:
            return []
        return self._call(list(firsts), list(seconds), add_special_tokens=True)["input_ids"]

    def encode_each(
        self, texts: Sequence[str], indices: Sequence[int], *, special: bool = False
    ) -> list[list[int]]:
        """`encode`, where a text that cannot be tokenised is named by its request's index.

        Raises:
            RequestError: with the tokenizer's reason.
        """
        return self.naming(lambda: self.encode(texts, special=special), texts, indices)

    def naming(
        self, call: Callable[[], list[list[int]]], texts: Sequence[str], indices: Sequence[int]
    ) -> list[list[int]]:
        """The result of `call`, which tokenises `texts`; its failure is blamed on the first text that fails alone."""
        try:
            return call()
        except Exception:
            for index, text in zip(indices, texts, strict=True):
                try:
                    self.encode([text])
                except Exception as error:
                    raise RequestError(
                        index,
                        f"cannot be tokenised ({type(error).__name__}: {error}): is it valid Unicode "
                        "(no lone surrogates)?",
                    ) from error
            raise

    @cached_property
    def added(self) -> tuple[list[int], list[int]]:
        """The ids the tokenizer puts before and after a single text by itself."""
        sample = self._sample()
        bare, whole = self.encode([sample])[0], self.encode([sample], special=True)[0]
        for start in range(len(whole) - len(bare) + 1):
            if whole[start : start + len(bare)] == bare:
                return whole[:start], whole[start + len(bare) :]
        raise ValueError(
            f"{type(self.tokenizer).__name__} encodes {sample!r} as {whole} with and {bare} without special tokens: "
            "it does not add them around the text"
        )

    def _sample(self) -> str:
        """A text whose tokens are none of the special ones: what is added can be told from it."""
        special = set(getattr(self.tokenizer, "all_special_ids", ()))
        known = list(self.tokenizer.get_vocab()) if hasattr(self.tokenizer, "get_vocab") else []
        for sample in (*_SAMPLES, *known[:_MOST_SAMPLES], *known[-_MOST_SAMPLES:]):
            ids = self.encode([sample])[0]
            if ids and not special.intersection(ids):
                return sample
        raise ValueError(
            f"{type(self.tokenizer).__name__} makes special tokens of everything that was tried: what it adds to a "
            "text cannot be told"
        )

    @property
    def lead(self) -> list[int]:
        """What the tokenizer puts before a text (a BOS), which a prompt keeps; what it appends, a prompt drops."""
        return self.added[0]

    def cut_text(self, text: str, count: int) -> str:
        """The beginning of `text` that its first `count` tokens cover."""
        if count <= 0:
            return ""
        if getattr(self.tokenizer, "is_fast", False):
            spans = self._call([text], add_special_tokens=False, return_offsets_mapping=True)[
                "offset_mapping"
            ][0]
            return text if count >= len(spans) else text[: spans[count][0]]
        low, high = 0, len(text)
        while low < high:  # the longest beginning of at most `count` tokens
            middle = (low + high + 1) // 2
            if len(self.encode([text[:middle]])[0]) <= count:
                low = middle
            else:
                high = middle - 1
        return text[:low]

    def _call(self, *texts: list[str], **options: Any) -> dict[str, Any]:
        encoding: dict[str, Any] = self.tokenizer(
            *texts,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
            **{"truncation": False, **options},
        )
        return encoding
