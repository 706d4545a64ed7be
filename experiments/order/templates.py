"""Ways to write one query and one passage as a prompt, and ways to put such pairs into batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radixmlp.verify.passages import RankedPassages
from radixmlp.verify.prompts import (
    RERANK_INSTRUCTION,
    SYSTEM_MESSAGE,
    chatml,
    rerank_document_first,
    rerank_query_first,
)

Template = Callable[[str, str], str]
Pair = tuple[str, str]  # query, passage


def _chat(user: str) -> str:
    return chatml(SYSTEM_MESSAGE, user)


TEMPLATES: dict[str, Template] = {
    "query, instruction, passage": rerank_query_first,
    "instruction, query, passage": lambda q, p: _chat(f"{RERANK_INSTRUCTION}\nQuery: {q}\nPassage: {p}"),
    "passage, instruction, query": rerank_document_first,
    "instruction, passage, query": lambda q, p: _chat(f"{RERANK_INSTRUCTION}\nPassage: {p}\nQuery: {q}"),
    "query, passage, query again": lambda q, p: _chat(
        f"Query: {q}\nPassage: {p}\n{RERANK_INSTRUCTION}\nQuery: {q}"
    ),
    "bare query, passage": lambda q, p: f"{q}\n{p}",
    "bare passage, query": lambda q, p: f"{p}\n{q}",
}


def batches_by_query(entries: Sequence[RankedPassages]) -> list[list[Pair]]:
    """Reranking: one batch a query, all its passages."""
    return [[(entry.query, passage) for passage in entry.passages] for entry in entries]


def batches_by_passage(entries: Sequence[RankedPassages], queries: int) -> list[list[Pair]]:
    """Labelling: one batch a passage (each query's first), asked the first `queries` queries."""
    asked = [entry.query for entry in entries[:queries]]
    return [[(query, entry.passages[0]) for query in asked] for entry in entries]


def batch_of_both(entries: Sequence[RankedPassages], queries: int) -> list[list[Pair]]:
    """A table: one batch, the first `queries` queries against the first query's passages."""
    return [[(entry.query, passage) for entry in entries[:queries] for passage in entries[0].passages]]
