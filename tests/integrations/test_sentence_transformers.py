"""sentence-transformers: embeddings and scores of an enabled model are the dense ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModel, AutoModelForSequenceClassification

import radixmlp
from radixmlp.verify import smollm2

INSTRUCTION = "word1 word2 word3 word4 word5 word6 word7 word8"
TEXTS = [
    f"{INSTRUCTION} word{20 + i % 5} " + " ".join(f"word{30 + i + j}" for j in range(i % 4))
    for i in range(12)
]
PAIRS = [(INSTRUCTION, " ".join(f"word{20 + i + j}" for j in range(2 + i % 4))) for i in range(12)]


def embedder(folder: str, pooling: str, side: str) -> Any:
    transformer = Transformer(folder)
    transformer.tokenizer.padding_side = side
    width = transformer.get_embedding_dimension()
    return SentenceTransformer(
        modules=[transformer, Pooling(width, pooling_mode=pooling), Normalize()], device="cpu"
    )


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_embeddings(
    build: Callable[..., Any], saved: Callable[..., str], close: Any, family: str, side: str, pooling: str
) -> None:
    model = embedder(saved(build(AutoModel, family)), pooling, side)
    own = model.encode(TEXTS, convert_to_tensor=True)
    assert (own @ own.T).min() < 0.99  # not all alike
    inner = model[0].model
    for enabled in (model, inner):
        radixmlp.enable(enabled)
        close(model.encode(TEXTS, convert_to_tensor=True), own)
        stats = enabled.radixmlp_stats
        assert stats.compacted == 1
        assert not stats.dense
        assert stats.rows < 0.5 * stats.tokens
        radixmlp.disable(enabled)
        assert not hasattr(inner, "radixmlp_stats")
        assert torch.equal(model.encode(TEXTS, convert_to_tensor=True), own)


def test_prompts_and_batches(build: Callable[..., Any], saved: Callable[..., str], close: Any) -> None:
    """A prompt that pooling leaves out, more texts than a batch, sorted by length inside `encode`."""
    model = embedder(saved(build(AutoModel)), "mean", "right")
    model.set_pooling_include_prompt(False)
    texts = [" ".join(f"word{40 + i + j}" for j in range(1 + i % 3)) for i in range(20)]
    own = model.encode(texts, prompt=f"{INSTRUCTION} ", batch_size=8, convert_to_tensor=True)
    radixmlp.enable(model)
    close(model.encode(texts, prompt=f"{INSTRUCTION} ", batch_size=8, convert_to_tensor=True), own)
    assert model.radixmlp_stats.compacted == 3
    assert model.radixmlp_stats.rows < 0.5 * model.radixmlp_stats.tokens


def test_cross_encoder(build: Callable[..., Any], saved: Callable[..., str], close: Any) -> None:
    ranker = CrossEncoder(saved(build(AutoModelForSequenceClassification, num_labels=1)), device="cpu")
    own = ranker.predict(PAIRS, convert_to_tensor=True)
    assert own.std() > 1e-2
    ranking = ranker.rank(INSTRUCTION, [passage for _, passage in PAIRS])
    for enabled in (ranker, ranker.model):
        radixmlp.enable(enabled)
        close(ranker.predict(PAIRS, convert_to_tensor=True), own)
        assert enabled.radixmlp_stats.compacted == 1
        assert not enabled.radixmlp_stats.dense
        assert enabled.radixmlp_stats.rows < 0.5 * enabled.radixmlp_stats.tokens
        again = ranker.rank(INSTRUCTION, [passage for _, passage in PAIRS])
        assert [entry["corpus_id"] for entry in again] == [entry["corpus_id"] for entry in ranking]
        radixmlp.disable(enabled)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["lasttoken", "mean"])
def test_embeddings_of_smollm2(close: Any, pooling: str) -> None:
    model = embedder(str(smollm2.model_folder()), pooling, "right")
    passages = ["the tide rises twice a day.", "bread is baked from flour.", "a prime has two divisors."] * 2
    texts = [
        f"Represent this passage for retrieval by topic, not by style: {passage}" for passage in passages
    ]
    own = model.encode(texts, convert_to_tensor=True)
    radixmlp.enable(model)
    close(model.encode(texts, convert_to_tensor=True), own)
    assert model.radixmlp_stats.compacted == 1
    assert model.radixmlp_stats.rows < 0.5 * model.radixmlp_stats.tokens
