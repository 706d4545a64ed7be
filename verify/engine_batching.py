"""What prefix-aware batching saves: rows computed over those of one unlimited batch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import radixmlp
from radixmlp.optimized.engine import plan_batches
from radixmlp.optimized.engine.encoders import Encoder, TextEncoder
from radixmlp.optimized.engine.limits import Limit
from radixmlp.optimized.engine.stats import Clock
from radixmlp.optimized.engine.tokens import Tokens
from radixmlp.optimized.engine.windows import lay_out, prepare
from radixmlp.verify.bars import Bar
from radixmlp.verify.models import LoadedModel
from radixmlp.verify.passages import RankedPassages
from radixmlp.verify.prompts import rerank_query_first

ROWS_TWICE = 1.05
BUDGETS = (2048, 8192)


def batching_bars(loaded: LoadedModel, entries: Sequence[RankedPassages], source: str) -> list[Bar]:
    """Rows the engine's batches compute over those of one unlimited batch, the worst of two budgets."""
    ranked = [rerank_query_first(entry.query, text) for entry in entries for text in entry.passages[:20]]
    piles = {
        "real": (f"{source}, {len(entries)} queries x 20 passages", ranked),
        "synthetic": ("43 beginnings x 100 ends", synthetic_texts(43, 100)),
    }
    bars = []
    for name, (shape, texts) in piles.items():
        random.Random(0).shuffle(texts)
        counted = {budget: rows_of(loaded.tokenizer, texts, budget) for budget in BUDGETS}
        fifo = ", ".join(format(found["fifo"], ".3f") for found in counted.values())
        bars.append(
            Bar(
                f"engine: rows over one unlimited batch, {name} requests",
                max(found["prefix"] for found in counted.values()),
                ROWS_TWICE,
                "lower",
                f"{shape}, shuffled; budgets of {' and '.join(map(str, BUDGETS))} rows, root paths of the batches "
                f"included; first in, first out: {fifo}",
                details={f"max_batch_tokens={budget}": found for budget, found in counted.items()},
            )
        )
    return bars


def synthetic_texts(groups: int, members: int, seed: int = 0) -> list[str]:
    """`groups` beginnings with `members` ends each, made of random words."""
    rng = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(f"{rng.randrange(10**6)}" for _ in range(count))

    return [f"{prefix} | {words(3)}" for prefix in [words(8) for _ in range(groups)] for _ in range(members)]


def rows_of(tokenizer: Any, texts: Sequence[str], budget: int) -> dict[str, float]:
    """Rows computed over those of one unlimited batch: by the engine's own windows, and first in, first out."""
    limit = Limit(budget, "max_batch_tokens", "raise max_batch_tokens", truncate=False)
    encoder: Encoder = TextEncoder(Tokens(tokenizer), "", texts, range(len(texts)), limit)
    batch = lay_out(encoder(range(len(texts))))
    unlimited = radixmlp.build_plan(batch).num_nodes
    prefix = [
        one.plan.num_nodes
        for one in prepare(encoder, budget, dense=False, clock=Clock())
        if one.plan is not None
    ]
    fifo = plan_batches(batch, budget, "fifo")
    return {
        "prefix": sum(prefix) / unlimited,
        "fifo": sum(one.rows for one in fifo) / unlimited,
        "prefix_batches": len(prefix),
        "fifo_batches": len(fifo),
        "r": batch.num_tokens / unlimited,
    }
