"""Series over texts: the compression of each workload, and the latency of reranking one query's passages."""

from __future__ import annotations

import statistics
from typing import Any

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import SCATTER, TRIE
from radixmlp.verify.models import load_model
from radixmlp.verify.passages import MSMARCO_FILE, SHIPPED_FILE, load_passages, msmarco_is_local
from radixmlp.verify.prompts import rerank_document_first, rerank_query_first
from radixmlp.verify.smollm2 import load_tokenizer
from radixmlp.verify.timing import quantile
from radixmlp.verify.workloads import make_workload

from .data import Point
from .measure_points import Progress, time_batch

ORDERS = {"query first": rerank_query_first, "document first": rerank_document_first}
TEXTS = (
    "embed-system-prompt",
    "few-shot",
    "tree",
    "synthetic:512+64x16",
    "synthetic:2048+256x32",
    "nothing-shared",
)
PASSAGES = 20


def gamma(quick: bool, progress: Progress) -> dict[str, Any]:
    """N'/N by workload. Reranking batches are one query each: the median over queries and its quantiles."""
    tokenizer: Any = load_tokenizer()
    entries, source = passages()
    points: list[Point] = []
    for name, form in ORDERS.items():
        progress(f"gamma of {source}, {name}")
        shares = []
        for entry in entries[: 2 if quick else None]:
            texts = [form(entry.query, passage) for passage in entry.passages[:PASSAGES]]
            batch = RaggedBatch.from_sequences([tokenizer.encode(text) for text in texts])
            shares.append(radixmlp.build_plan(batch).gamma)
        middle, low, high = statistics.median(shares), quantile(shares, 0.2), quantile(shares, 0.8)
        words = f"{source}, {name}, {len(shares)} queries x up to {PASSAGES} passages, a batch a query"
        points.append(Point("gamma", f"rerank, {name}", len(points), middle, "share", words, low, high))
    for name in TEXTS:
        progress(f"gamma of {name}")
        workload = make_workload(name, tokenizer, 49_152)
        share = radixmlp.build_plan(workload.batch).gamma
        points.append(Point("gamma", name, len(points), share, "share", workload.description))
    return {"series": [vars(point) for point in points]}


def rerank_latency(model: str, queries: int, progress: Progress) -> dict[str, Any]:
    """Seconds a query, and the speed-up over the faster dense: one batch a query, query first.

    The outputs for the first query are held against the truth.
    """
    loaded = load_model(model, "bfloat16", "cpu")
    assert loaded.tokenizer is not None
    entries, source = passages()
    picked = entries[:: max(1, len(entries) // queries)][:queries]
    seconds: dict[str, list[float]] = {"dense": [], "scatter": [], "trie": []}
    speedups: dict[str, list[float]] = {"scatter": [], "trie": []}
    tokens = nodes = 0
    for place, entry in enumerate(picked):
        texts = [rerank_query_first(entry.query, passage) for passage in entry.passages[:PASSAGES]]
        ids = [[i % loaded.vocab_size for i in loaded.tokenizer.encode(text)] for text in texts]
        batch = RaggedBatch.from_sequences(ids)

        def say(what: str, place: int = place) -> None:
            progress(f"query {place + 1}/{len(picked)}, {what}")

        timed = time_batch(loaded.model, batch, [SCATTER, TRIE], 2, say, check=place == 0)
        tokens, nodes = tokens + timed.plan.num_tokens, nodes + timed.plan.num_nodes
        for name, variant in (("dense", timed.dense), ("scatter", SCATTER), ("trie", TRIE)):
            seconds[name].append(timed.timings.median(variant))
        for name, variant in (("scatter", SCATTER), ("trie", TRIE)):
            speedups[name].append(timed.timings.ratio(timed.dense, variant).median)
    shape = f"{model}, bf16, {source}, query first, {len(picked)} queries x up to {PASSAGES} passages"
    points = []
    for name, found in seconds.items():
        details: dict[str, Any] = {"p90": quantile(found, 0.9), "queries": len(found), "r": tokens / nodes}
        if name in speedups:
            details["speedup"] = statistics.median(speedups[name])
            details["speedup_q20_q80"] = [quantile(speedups[name], share) for share in (0.2, 0.8)]
        middle, low, high = statistics.median(found), quantile(found, 0.2), quantile(found, 0.8)
        points.append(Point("rerank", name, 0, middle, "s", shape, low, high, details=details))
    return {"series": [vars(point) for point in points]}


def passages() -> tuple[list[Any], str]:
    """MS MARCO from beside the checkout, or the shipped passages; and which of the two it was."""
    if msmarco_is_local():
        return load_passages(MSMARCO_FILE), "MS MARCO (TREC DL 2019, BM25)"
    return load_passages(SHIPPED_FILE), "shipped passages, NOT MS MARCO"
