"""The figures to reach: each bar is one measured number, its limit, and what was measured to get it.

What a speed bar times is a whole call: the plan is built, the backbone runs, and the head makes the last
token's logits. A speed counts only if what that variant returned agrees with the model in fp32, each sequence
alone.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify import rules
from radixmlp.verify.memory import peak_megabytes
from radixmlp.verify.models import LoadedModel, cast_parameters
from radixmlp.verify.oracle import each_alone
from radixmlp.verify.passages import RankedPassages
from radixmlp.verify.prompts import rerank_query_first
from radixmlp.verify.records import Record
from radixmlp.verify.speed import SpeedComparison, compare
from radixmlp.verify.timing import Ratio, quantile
from radixmlp.verify.variants import DENSE, PREFIX_KV, build_variants

Progress = Callable[[str], None]
TRIE, SCATTER = "trie-sdpa", "scatter-sdpa"
TIMED = "plan + backbone + last-token logits"


@dataclass(frozen=True)
class Bar:
    """One row of the table.

    Args:
        name: "group: what over what".
        value, limit: the number and what it must reach; a limit of None is reported, not judged.
        better: "higher": value >= limit passes; "lower": value <= limit.
        quantiles: 20% and 80% of the paired ratios, where the value is their median.
        shape: what was run, in words.
        ideal, share_of_ideal: the FLOP ratio and how much of it was reached.
        wrong: why there is no valid number (wrong outputs, an error); such a bar never passes.
        broken: whether the group raised before it could measure anything.
    """

    name: str
    value: float
    limit: float | None
    better: str
    shape: str
    quantiles: tuple[float, float] | None = None
    ideal: float | None = None
    wrong: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    broken: bool = False

    @property
    def passed(self) -> bool:
        if self.wrong is not None:
            return False
        if self.limit is None:
            return True
        return self.value >= self.limit if self.better == "higher" else self.value <= self.limit

    def row(self) -> dict[str, Any]:
        """As it stands in the JSON file."""
        share = None if self.ideal is None else self.value / self.ideal
        return {
            "name": self.name,
            "value": self.value,
            "limit": self.limit,
            "better": self.better,
            "passed": self.passed,
            "quantiles": None if self.quantiles is None else list(self.quantiles),
            "shape": self.shape,
            "ideal": self.ideal,
            "share_of_ideal": share,
            "wrong": self.wrong,
            "details": self.details,
        }


def bar_of_record(record: Record) -> Bar:
    """A record of the index builder's own benchmark as a bar; its details say which way is better."""
    details = dict(record.details)
    low, high = details.pop("q20", None), details.pop("q80", None)
    quantiles = None if low is None or high is None else (low, high)
    name = f"index: {record.workload}, {record.metric}"
    better, wrong = details.pop("better", "higher"), details.pop("wrong", None)
    return Bar(name, record.value, record.limit, better, record.workload, quantiles, None, wrong, details)


@torch.no_grad()
def wrong_outputs(
    model: Any, batch: RaggedBatch, outputs: dict[str, Tensor], sample: list[int]
) -> dict[str, str]:
    """Why outputs are wrong, for the variants whose outputs are: by the factors of `rules.py`.

    Truth is the model in fp32, each sequence alone; below fp32 the legitimate error is the larger one of dense
    padded and dense ragged.

    Args:
        outputs: variant -> [B, vocab] last-token logits.
        sample: the sequences to check.
    """
    lengths = batch.lengths.tolist()
    rows = [part.tolist() for part in batch.input_ids.split(lengths)]
    picked = RaggedBatch.from_sequences([rows[b] for b in sample])
    truth = each_alone(cast_parameters(copy.deepcopy(model), torch.float32), picked, keep=1).logits
    assert truth is not None
    errors = {name: rules.errors_against(output[sample].float(), truth) for name, output in outputs.items()}
    dtype = next(iter(outputs.values())).dtype
    rms, largest = math.inf, rules.FLOAT32
    if dtype in rules.HALF_DTYPES:
        rms = rules.RMS_FACTOR * max(errors[dense].rms for dense in DENSE)
        largest = rules.LARGEST_FACTOR * max(errors[dense].largest for dense in DENSE)
        largest += rules.floor_of(dtype, float(truth.abs().max()))
    return {
        name: f"RMS error {e.rms:.2e} (allowed {rms:.2e}), largest {e.largest:.2e} (allowed {largest:.2e})"
        for name, e in errors.items()
        if not (e.rms <= rms and e.largest <= largest)
    }


def over_dense(
    name: str, comparison: SpeedComparison, variant: str, limit: float, shape: str, wrong: dict[str, str]
) -> Bar:
    """A variant against the faster of dense padded and dense ragged."""
    dense = comparison.fastest_dense
    ratio = comparison.speedup(variant)
    return _speed_bar(
        name, comparison, variant, dense, ratio, limit, shape, wrong, comparison.ideal_of(variant)
    )


def over_prefix_kv(
    name: str, comparison: SpeedComparison, limit: float, shape: str, wrong: dict[str, str]
) -> Bar:
    """The trie against Hugging Face's own reuse of one prefix's KV cache."""
    ratio = comparison.timings.ratio(PREFIX_KV, TRIE)
    return _speed_bar(name, comparison, TRIE, PREFIX_KV, ratio, limit, shape, wrong, None)


def _speed_bar(
    name: str,
    comparison: SpeedComparison,
    variant: str,
    against: str,
    ratio: Ratio,
    limit: float,
    shape: str,
    wrong: dict[str, str],
    ideal: float | None,
) -> Bar:
    details = {
        "seconds": comparison.timings.median(variant),
        "against": against,
        "against_seconds": comparison.timings.median(against),
        "rounds": comparison.timings.rounds,
        "plan_seconds": comparison.plan_seconds,
    }
    reasons = [f"{which}: {wrong[which]}" for which in (variant, against) if which in wrong]
    quantiles = (ratio.q20, ratio.q80)
    reason = "; ".join(reasons) or None
    return Bar(name, ratio.median, limit, "higher", shape, quantiles, ideal, reason, details)


def memory_bar(
    name: str,
    model_name: str,
    batch: RaggedBatch,
    shape: str,
    comparison: SpeedComparison,
    progress: Progress,
) -> Bar:
    """The trie's peak above the weights over the leaner dense's: at most a quarter."""
    peaks = peak_megabytes(model_name, batch, [*DENSE, TRIE], "bfloat16", progress=progress)
    ratio = peaks[TRIE] / min(peaks[dense] for dense in DENSE)
    details = {"peak_mb": peaks, "one_over_r": comparison.plan.gamma}
    return Bar(name, ratio, 0.25, "lower", f"{shape}; peak above the weights, fresh process", details=details)


def embedding_bar(name: str, backbone: Any, batch: RaggedBatch) -> Bar:
    """The largest difference of L2-normalised last-token embeddings from dense, each sequence alone."""
    ends = batch.cu_seqlens[1:].to(torch.int64) - 1
    alone = normalize(each_alone(backbone, batch).last_hidden_state[ends].float(), dim=-1)
    calls = build_variants(backbone, batch, [*DENSE, TRIE])
    moved = {which: _largest(normalize(call().float(), dim=-1) - alone) for which, call in calls.items()}
    own = max(moved[dense] for dense in DENSE)
    limit = rules.FP16_EMBEDDING if own < rules.FP16_EMBEDDING else None
    r = radixmlp.build_plan(batch).compression_ratio
    shape = (
        f"fp16, {batch.num_sequences} passages under one system prompt, r = {r:.2f}; dense itself: {own:.1e}"
    )
    details = {f"{which}_against_alone": difference for which, difference in moved.items()}
    return Bar(f"embeddings: {name}", moved[TRIE], limit, "lower", shape, details=details)


def rerank_bar(
    loaded: LoadedModel,
    entries: list[RankedPassages],
    source: str,
    dtype: str,
    rounds: int,
    limit: float | None,
    progress: Progress,
) -> Bar:
    """One batch per query; the median over queries of (speed-up over the faster dense) / r.

    The outputs for the first query are held against the truth.
    """
    assert loaded.tokenizer is not None
    shares, ratios, ideals, wrong = [], [], [], {}
    tokens = nodes = 0
    for index, entry in enumerate(entries):
        texts = [rerank_query_first(entry.query, passage) for passage in entry.passages[:20]]
        batch = RaggedBatch.from_sequences([loaded.tokenizer.encode(text) for text in texts])
        progress(f"{dtype}, query {index + 1}/{len(entries)}")
        comparison = compare(loaded.model, batch, [TRIE], rounds, screen_dense=True)
        if index == 0:
            wrong = wrong_outputs(loaded.model, batch, comparison.outputs, list(range(batch.num_sequences)))
        speedup, r = comparison.speedup(TRIE).median, comparison.plan.compression_ratio
        shares.append(speedup / r)
        ratios.append(speedup)
        ideals.append(comparison.ideal_of(TRIE) or r)
        tokens, nodes = tokens + comparison.plan.num_tokens, nodes + comparison.plan.num_nodes
    shape = f"SmolLM2-135M, {dtype}, {source}, query first, {len(entries)} queries x 20 passages"
    shape = f"{shape}, r = {tokens / nodes:.2f}; {TIMED}"
    return Bar(
        f"rerank: trie over dense, as a share of r ({dtype})",
        statistics.median(shares),
        limit,
        "higher",
        shape,
        (quantile(shares, 0.2), quantile(shares, 0.8)),
        wrong=wrong.get(TRIE),
        details={
            "median_speedup": statistics.median(ratios),
            "r": tokens / nodes,
            "ideal_speedup": statistics.median(ideals),
            "queries": len(entries),
        },
    )


def _largest(difference: Tensor) -> float:
    """max|difference|, infinite where anything is not a number."""
    largest = float(difference.abs().max())
    return largest if math.isfinite(largest) else math.inf
