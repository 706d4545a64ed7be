"""What the order of query and passage in the template does to sharing: counted, and timed on SmolLM2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import TRIE, wrong_outputs
from radixmlp.verify.models import SMOLLM2, LoadedModel, load_model
from radixmlp.verify.passages import (
    SHIPPED_FILE,
    RankedPassages,
    load_msmarco,
    load_passages,
    msmarco_is_local,
)
from radixmlp.verify.timing import Timings, time_interleaved
from radixmlp.verify.variants import DENSE, DENSE_PADDED, Variant, build_variants

from .templates import TEMPLATES, Pair, Template, batch_of_both, batches_by_passage, batches_by_query

QUESTION = (
    "query first or passage first: what does a template's order do to gamma, and what does reordering buy?"
)
QUERY_FIRST, PASSAGE_FIRST = "query, instruction, passage", "passage, instruction, query"
BY_QUERY, BY_PASSAGE, BOTH = "a batch a query", "a batch a passage", "all pairs in one batch"

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Args:
        queries: how many the counts are made on.
        asked: queries a passage is asked where batches are by passage, and of the table of both.
        timed_pairs: prompts of each timed batch, at most.
        rounds: timed calls of each path, interleaved.
    """

    model: str = SMOLLM2
    dtype: str = "bfloat16"
    queries: int = 30
    asked: int = 10
    timed_pairs: int = 16
    rounds: int = 3


QUICK = Settings("tiny-qwen3", "float32", 3, 2, 4, 1)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Count every template on every way of batching, then time the two orders. Nothing of the texts is kept.

    MS MARCO where its sample lies beside the checkout, else (and in quick runs) the passages we ship.
    """
    settings = QUICK if quick else Settings()
    loaded = load_model(settings.model, settings.dtype)
    entries, source = _texts(settings.queries, shipped=quick)
    tokenizer: Any = loaded.tokenizer
    encode: Encode = _bytes if quick else tokenizer.encode
    counted = {}
    for batching, batches in _batchings(entries, settings).items():
        progress(f"counting: {batching}")
        counted[batching] = {name: count(batches, form, encode) for name, form in TEMPLATES.items()}
    timed = {}
    for batching in (BY_QUERY, BY_PASSAGE):
        pairs = _batchings(entries, settings)[batching][0][: settings.timed_pairs]
        timed[batching] = _time(loaded, pairs, encode, settings.rounds, progress)
    return {
        "settings": asdict(settings),
        "data": source,
        "queries": len(entries),
        "passages": sum(len(entry.passages) for entry in entries),
        "counted": counted,
        "timed": timed,
    }


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def count(batches: Sequence[Sequence[Pair]], form: Template, encode: Encode) -> dict[str, float]:
    """Tokens and trie nodes over all batches, each compacted by itself."""
    tokens = nodes = 0
    for pairs in batches:
        plan = radixmlp.build_plan(_batch(pairs, form, encode))
        tokens, nodes = tokens + plan.num_tokens, nodes + plan.num_nodes
    return {"batches": len(batches), "tokens": tokens, "rows": nodes, "gamma": nodes / tokens}


def _batch(pairs: Sequence[Pair], form: Template, encode: Encode) -> RaggedBatch:
    return RaggedBatch.from_sequences([encode(form(query, passage)) for query, passage in pairs])


def _texts(queries: int, shipped: bool) -> tuple[list[RankedPassages], str]:
    if shipped or not msmarco_is_local():
        return load_passages(SHIPPED_FILE)[:queries], "the passages we ship"
    return load_msmarco(queries), "MS MARCO (TREC DL 2019, BM25)"


def _batchings(entries: Sequence[RankedPassages], settings: Settings) -> dict[str, list[list[Pair]]]:
    return {
        BY_QUERY: batches_by_query(entries),
        BY_PASSAGE: batches_by_passage(entries, settings.asked),
        BOTH: batch_of_both(entries, settings.asked),
    }


def _time(
    loaded: LoadedModel, pairs: Sequence[Pair], encode: Encode, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """The same pairs in both orders, dense and on the trie, all in turn."""
    calls: dict[str, Variant] = {}
    for order in (QUERY_FIRST, PASSAGE_FIRST):
        batch = _batch(pairs, TEMPLATES[order], encode)
        variants = build_variants(loaded.model, batch, [*DENSE, TRIE])
        progress(f"values: {order}")
        first = {name: call() for name, call in variants.items()}
        wrong = wrong_outputs(loaded.model, batch, first, [0, batch.num_sequences - 1])
        if wrong:
            raise ValueError(f"{order}: wrong values, so nothing was timed: {wrong}")
        calls |= {f"{order}: {name}": call for name, call in variants.items()}
    timings = time_interleaved(calls, rounds, warmup=0, progress=progress)
    return {
        "pairs": len(pairs),
        "seconds": {name: timings.median(name) for name in calls},
        "over_dense": {order: _over_dense(timings, order) for order in (QUERY_FIRST, PASSAGE_FIRST)},
        "reordered": {
            path: asdict(timings.ratio(f"{PASSAGE_FIRST}: {path}", f"{QUERY_FIRST}: {path}"))
            for path in (DENSE_PADDED, TRIE)
        },
    }


def _over_dense(timings: Timings, order: str) -> dict[str, float]:
    dense = timings.fastest([f"{order}: {name}" for name in DENSE])
    return asdict(timings.ratio(dense, f"{order}: {TRIE}"))


def report(measured: dict[str, Any]) -> str:
    """Markdown: gamma of each template and batching, then times of both orders."""
    s = measured["settings"]
    lines = [
        f"Counted on {measured['data']}: {measured['queries']} queries ({s['queries']} asked for), "
        f"{measured['passages']} passages; by passage and in one batch, {s['asked']} queries are asked.",
        "",
        "gamma = rows / tokens:",
        "",
        f"| template | {' | '.join(measured['counted'])} |",
        f"|---|{'---|' * len(measured['counted'])}",
    ]
    for template in TEMPLATES:
        cells = [_counts(by_template[template]) for by_template in measured["counted"].values()]
        lines.append(f"| {template} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Timed with {s['model']}, {s['dtype']}: whole call (plan, backbone, last-token logits), {s['rounds']} "
        f"interleaved rounds, one batch of at most {s['timed_pairs']} prompts. Over dense: the trie over the faster "
        "dense of the same order. Reordered: passage first over query first, the same path.",
        "",
        "| batching | prompts | over dense, query first | passage first | reordered, trie | dense | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for batching, found in measured["timed"].items():
        over, moved = found["over_dense"], found["reordered"]
        cells = [
            batching,
            str(found["pairs"]),
            _spread(over[QUERY_FIRST]),
            _spread(over[PASSAGE_FIRST]),
            _spread(moved[TRIE]),
            _spread(moved[DENSE_PADDED]),
            "; ".join(f"{name} {value:.4g}" for name, value in found["seconds"].items()),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _counts(found: Mapping[str, float]) -> str:
    return f"{found['gamma']:.3f} ({found['rows']} of {found['tokens']} in {found['batches']})"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q20']:.2f}–{ratio['q80']:.2f})"
