"""What the bench's reranking batches ask of a model, in counts: none of their text leaves this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixmlp.reference import RaggedBatch
from radixmlp.verify.passages import load_msmarco, msmarco_is_local
from radixmlp.verify.prompts import rerank_query_first
from radixmlp.verify.smollm2 import load_tokenizer

from .roofline_work import Work

EVERY = {"bfloat16": 2, "float32": 15}  # the queries that the bench reranks in each dtype
PASSAGES = 20


def rerank_batches(progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """The mean batch of the bench's reranking bars by dtype; empty where MS MARCO or its tokenizer is missing."""
    if not msmarco_is_local():
        return {}
    progress("counting the reranking batches")
    tokenizer, entries = load_tokenizer(), load_msmarco()
    if tokenizer is None:
        return {}
    counted = {}
    for dtype, every in EVERY.items():
        works = []
        for entry in entries[::every]:
            texts = [rerank_query_first(entry.query, passage) for passage in entry.passages[:PASSAGES]]
            works.append(Work.of(RaggedBatch.from_sequences([tokenizer.encode(text) for text in texts])))
        counted[dtype] = Work.mean(works).to_dict()
    return counted
