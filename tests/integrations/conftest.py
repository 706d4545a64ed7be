"""Everything here runs offline: tiny models made from their configs, a tokenizer of made-up words."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from radixmlp.verify.families import small_config, strengthen

SPECIAL = (
    "<pad>",
    "<eos>",
    "<unk>",
    "Question",
    "Answer",
    ":",
    "?",
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "8",
)
WORDS = tuple(f"word{number}" for number in range(400))


@pytest.fixture
def tokenizer() -> Any:
    """One token a word; `word0` .. `word399` and a few others are known."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_max_length=512,
    )


@pytest.fixture
def build() -> Callable[..., Any]:
    """`build(auto class, family="qwen3", **config)`: a small model in eval mode that attends strongly."""

    def make(auto: Any, family: str = "qwen3", **changes: Any) -> Any:
        torch.manual_seed(0)
        config = small_config(family)
        for name, value in {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, **changes}.items():
            setattr(config, name, value)
        model = auto.from_config(config).eval()
        strengthen(model)
        return model

    return make


@pytest.fixture
def saved(tmp_path: Path, tokenizer: Any) -> Callable[[Any], str]:
    """`saved(model)`: the folder of a checkpoint with the tokenizer beside it."""

    def save(model: Any) -> str:
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        return str(tmp_path)

    return save


@pytest.fixture
def close() -> Callable[..., None]:
    """`close(got, expected)`: equal in shape and dtype, and in value to `tolerance` of the largest one."""

    def check(got: Any, expected: Any, tolerance: float = 1e-5) -> None:
        got, expected = torch.as_tensor(got).detach(), torch.as_tensor(expected).detach()
        assert got.shape == expected.shape
        assert got.dtype == expected.dtype
        assert expected.abs().max() > 0
        assert (got - expected).abs().max() <= tolerance * expected.abs().max()

    return check
