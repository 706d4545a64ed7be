"""K and V read through an index instead of scattered: exact attention without a copy, and what pages add to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import radixmlp
from radixmlp import AttentionBackend, RaggedBatch
from radixmlp.optimized.attention.schedule import build_schedule
from radixmlp.verify import smollm2
from radixmlp.verify.experiments.result import table
from radixmlp.verify.passages import msmarco_is_local
from radixmlp.verify.workloads import make_workload

from .pages import PAGE_SIZES, pages_of
from .walk import KEY_ROWS, KvIndex, blocks_of

QUESTION = "is it enough to read compact K and V through an index, and what do pages of 256 rows cost?"
_VOCABULARY = 49_152
_SHAPES = ("synthetic:512+64x16", "synthetic:300+64x16", "synthetic:2048+256x32", "tree")
_TEXTS = ("rerank-query-first", "rerank-document-first", "embed-system-prompt", "few-shot")
_MSMARCO = ("msmarco-query-first", "msmarco-document-first")


def backends() -> Sequence[AttentionBackend]:
    """The walk with tiles of one-row pages."""
    return [KvIndex()]


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Count, for each batch, the rows that pages of each size hold, and what the walk reads."""
    found = []
    for name, batch in _batches(quick).items():
        progress(name)
        plan = radixmlp.build_plan(batch)
        blocks = blocks_of(plan)
        schedule = build_schedule(plan)
        found.append(
            {
                "batch": name,
                "tokens": plan.num_tokens,
                "rows": plan.num_nodes,
                "sequences": batch.num_sequences,
                "pages": {str(size): asdict(pages_of(plan, size)) for size in PAGE_SIZES},
                "walk": {
                    "blocks": len(blocks),
                    "tiles": sum(-(-block.index.numel() // KEY_ROWS) for block in blocks),
                    "key_rows": sum(block.index.numel() for block in blocks),
                    "trie_sdpa_calls": len(schedule.first) + len(schedule.merged),
                },
            }
        )
    return {"missing": [] if quick or msmarco_is_local() else list(_MSMARCO), "batches": found}


def report(measured: dict[str, Any]) -> str:
    """Tables of pages and of what the walk reads."""
    lines = [
        "## Pages",
        "",
        "Rows of K and V that the pages hold, over N'. One row a page is the compact layout itself; scattering (the "
        "paper's path) holds N rows. Full pages are shared between sequences, the last page of each is not.",
        "",
    ]
    rows = [
        [
            each["batch"],
            each["sequences"],
            each["tokens"],
            each["rows"],
            each["tokens"] / each["rows"],
            *(each["pages"][str(size)]["rows"] / each["rows"] for size in PAGE_SIZES),
            _pages_line(each["pages"]["256"]),
        ]
        for each in measured["batches"]
    ]
    headings = [
        "batch",
        "B",
        "N",
        "N'",
        "scattered",
        *(f"{size} a page" for size in PAGE_SIZES),
        "256: pages",
    ]
    lines += table(headings, rows)
    if measured["missing"]:
        lines += [
            f"Left out, as the MS MARCO sample is not on this machine: {', '.join(measured['missing'])}.",
            "",
        ]
    lines += [
        "## What the walk reads",
        "",
        "Blocks of query rows, tiles of K and V gathered for them, rows of K gathered over N', and the calls of "
        "`trie-sdpa` on the same batch.",
        "",
    ]
    rows = [
        [
            each["batch"],
            each["walk"]["blocks"],
            each["walk"]["tiles"],
            each["walk"]["key_rows"] / each["rows"],
            each["walk"]["trie_sdpa_calls"],
        ]
        for each in measured["batches"]
    ]
    headings = ["batch", "blocks", "tiles", "K rows gathered", "calls of trie-sdpa"]
    return "\n".join(lines + table(headings, rows))


def _pages_line(pages: dict[str, int]) -> str:
    share = pages["filled"] / pages["rows"] if pages["rows"] else 1.0
    return (
        f"{pages['shared']} full and {pages['own']} of one sequence, {share:.0%} filled, "
        f"{pages['entries']} table entries"
    )


def _batches(quick: bool) -> dict[str, RaggedBatch]:
    if quick:
        return {
            name: make_workload(name, None, 512, passages=4, max_length=300).batch
            for name in ("synthetic:24+8x4", "tree", "few-shot")
        }
    tokenizer = smollm2.load_tokenizer()
    made = {name: make_workload(name, None, _VOCABULARY).batch for name in _SHAPES}
    made |= {name: make_workload(name, tokenizer, _VOCABULARY, queries=10).batch for name in _TEXTS}
    if msmarco_is_local():
        made |= {name: make_workload(name, tokenizer, _VOCABULARY, queries=15).batch for name in _MSMARCO}
    return made
