"""The drop-in's figures: what an ordinary call of an enabled model costs, and what it gains."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import Bar, Progress, wrong_outputs
from radixmlp.verify.models import LoadedModel
from radixmlp.verify.passages import RankedPassages
from radixmlp.verify.prompts import rerank_query_first
from radixmlp.verify.timing import quantile, time_interleaved
from radixmlp.verify.variants import DENSE, build_variants

OVERHEAD = 0.02
_PAIRS = 30
_BATCH, _LENGTH = 16, 256


def overhead_bar(loaded: LoadedModel, progress: Progress) -> Bar:
    """A batch with nothing to share: the enabled model's call against the same model untouched."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.vocab_size, (_BATCH, _LENGTH), generator=generator)
    ids[:, 0] = torch.arange(_BATCH)
    mask = torch.ones_like(ids)
    enabled = radixmlp.enable(copy.deepcopy(loaded.model))
    with torch.no_grad():
        timings = time_interleaved(
            {"untouched": _call(loaded.model, ids, mask), "enabled": _call(enabled, ids, mask)},
            _PAIRS,
            progress=progress,
        )
        equal = torch.equal(_call(loaded.model, ids, mask)(), _call(enabled, ids, mask)())
    ratio = timings.ratio("enabled", "untouched")
    stats = enabled.radixmlp_stats
    ran_densely = stats.dense["little to share"] == stats.batches
    wrong = None if equal and ran_densely else "it did not run the model's own forward, bit by bit"
    shape = f"SmolLM2-135M, bf16, {_BATCH} x {_LENGTH} random tokens, logits_to_keep=1, {_PAIRS} pairs"
    return Bar(
        "drop-in: overhead where nothing is shared",
        ratio.median - 1,
        OVERHEAD,
        "lower",
        shape,
        (ratio.q20 - 1, ratio.q80 - 1),
        wrong=wrong,
        details={"index_seconds_per_batch": stats.index_seconds / stats.batches},
    )


def dropin_rerank_bar(
    loaded: LoadedModel, entries: list[RankedPassages], source: str, rounds: int, progress: Progress
) -> Bar:
    """`model(input_ids, attention_mask, logits_to_keep=1)` on left-padded prompts, enabled against untouched."""
    assert loaded.tokenizer is not None
    enabled = radixmlp.enable(copy.deepcopy(loaded.model))
    ratios, wrong, slots, rows = [], None, 0, 0
    for index, entry in enumerate(entries):
        texts = [rerank_query_first(entry.query, passage) for passage in entry.passages[:20]]
        batch = RaggedBatch.from_sequences([loaded.tokenizer.encode(text) for text in texts])
        ids, mask = _left_padded(batch)
        progress(f"query {index + 1}/{len(entries)}")
        calls = {"untouched": _call(loaded.model, ids, mask), "enabled": _call(enabled, ids, mask)}
        with torch.no_grad():
            ratios += _paired(calls, rounds)
            if index == 0:
                sample = list(range(batch.num_sequences))
                outputs = {name: call()[:, -1] for name, call in calls.items()}
                outputs |= {name: call() for name, call in build_variants(loaded.model, batch, DENSE).items()}
                wrong = wrong_outputs(loaded.model, batch, outputs, sample).get("enabled")
        slots, rows = slots + ids.numel(), rows + radixmlp.build_plan(batch).num_nodes
    r = slots / rows
    shape = (
        f"SmolLM2-135M, bf16, {source}, query first, {len(entries)} queries x 20 passages, padded left, "
        f"B x L / N' = {r:.2f}; model(input_ids, attention_mask, logits_to_keep=1)"
    )
    return Bar(
        "drop-in: rerank, enabled over untouched",
        statistics.median(ratios),
        None,
        "higher",
        shape,
        (quantile(ratios, 0.2), quantile(ratios, 0.8)),
        wrong=wrong,
        details={"slots_per_row": r, "compacted": enabled.radixmlp_stats.compacted},
    )


def _paired(calls: Mapping[str, Callable[[], object]], rounds: int) -> list[float]:
    seconds = time_interleaved(calls, rounds).seconds
    return [slow / fast for slow, fast in zip(seconds["untouched"], seconds["enabled"], strict=True)]


def _call(model: Any, ids: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    def call() -> Tensor:
        logits: Tensor = model(input_ids=ids, attention_mask=mask, logits_to_keep=1).logits
        return logits

    return call


def _left_padded(batch: RaggedBatch) -> tuple[Tensor, Tensor]:
    """[B, L] ids and mask, as a tokenizer with `padding_side="left"` gives them."""
    rows = batch.sequences()
    length = max(map(len, rows))
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(rows):
        ids[row, length - len(sequence) :] = torch.tensor(sequence)
        mask[row, length - len(sequence) :] = 1
    return ids, mask
