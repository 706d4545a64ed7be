"""A tokenizer trained on our own passages and small random models: everything here runs offline."""

from __future__ import annotations

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from radixmlp.verify.families import strengthen
from radixmlp.verify.passages import load_passages

VOCABULARY = 480
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [passage for entry in load_passages() for passage in entry.passages]
    tokenizer.train_from_iterator([*texts, *["yes", "no", "Text: Label: river bread"] * 200], trainer)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """A byte-level tokenizer without a pad token, which puts a BOS before or an EOS behind texts where asked."""
    trained = train_tokenizer()

    def make(bos: bool = False, eos: bool = False) -> Any:
        tokenizer = Tokenizer.from_str(trained.to_str())
        if bos or eos:
            form = " ".join(["<s>"] * bos + ["$A"] + ["</s>"] * eos)
            pair = " ".join(["<s>"] * bos + ["$A", "</s>", "$B"] + ["</s>"] * eos)
            ids = [(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=form, pair=pair, special_tokens=ids
            )
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    """Without special tokens."""
    return make_tokenizer()


def config(**changes: Any) -> Qwen3Config:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 400,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return Qwen3Config(**{**sizes, **changes})


@pytest.fixture(scope="session")
def make_model() -> Callable[..., Any]:
    """A small random Qwen3: "lm", "classifier" or "token classifier" (with `num_labels`), or "base"."""
    kinds = {
        "lm": AutoModelForCausalLM,
        "classifier": AutoModelForSequenceClassification,
        "token classifier": AutoModelForTokenClassification,
        "base": AutoModel,
    }

    def make(kind: str = "lm", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        torch.manual_seed(0)
        model = kinds[kind].from_config(config(**changes))
        with torch.no_grad():
            strengthen(model)
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def model(make_model: Callable[..., Any]) -> Any:
    """The causal LM, fp32."""
    return make_model()


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Beginnings of our passages, none too long for the model."""
    return [passage[:250] for entry in load_passages() for passage in entry.passages[:4]]
