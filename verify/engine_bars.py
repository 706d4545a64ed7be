"""The engine's figures: what it gains over itself run densely, what its index costs, what its batching saves."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from radixmlp.optimized.engine import QWEN3_RERANKER, Engine, EngineConfig
from radixmlp.optimized.engine.stats import EngineStats
from radixmlp.reference import RaggedBatch
from radixmlp.verify import rules
from radixmlp.verify.bars import Bar, Progress
from radixmlp.verify.engine_batching import batching_bars
from radixmlp.verify.models import LoadedModel, cast_parameters, load_model
from radixmlp.verify.oracle import each_alone
from radixmlp.verify.passages import (
    MSMARCO_FILE,
    SHIPPED_FILE,
    RankedPassages,
    load_passages,
    msmarco_is_local,
)
from radixmlp.verify.prompts import EMBED_SYSTEM_MESSAGE
from radixmlp.verify.timing import Timings, quantile, time_interleaved

SHARE_OF_R = 0.9
UNHIDDEN_INDEX = 0.01
_ROUNDS = 5
_BUDGET = 8192  # of the timed calls: several batches, so that there is something to do ahead
_QUERIES, _PASSAGES = 5, 20
_CHECKED = 64  # requests held against the truth
_PROMPT = EMBED_SYSTEM_MESSAGE + "\n\n"


@dataclass(frozen=True)
class Task:
    """Something both engines do.

    Args:
        name: for the bars.
        call: runs it all.
        sequences: the token ids of the requests to check, made without the engine.
        truth: what the model's outputs of those, each alone, come to: (hidden, logits) of last tokens -> [n, width].
        groups: requests that are ranked against each other; empty where nothing is ranked.
    """

    name: str
    call: Callable[[Engine], Tensor]
    sequences: list[list[int]]
    truth: Callable[[Tensor, Tensor], Tensor]
    groups: list[list[int]]


def engine_bars(progress: Progress) -> list[Bar]:
    """SmolLM2-135M, bf16, reranks and embeds MS MARCO through the engine; against the same engine run densely."""
    entries, source = _entries()
    loaded = load_model("smollm2-135m", "bfloat16", "cpu")
    engines = {
        impl: Engine(loaded.model, loaded.tokenizer, EngineConfig(model_impl=impl, max_batch_tokens=_BUDGET))
        for impl in ("radix", "dense")
    }
    bars = []
    for task in tasks(loaded, entries[:: max(1, len(entries) // _QUERIES)][:_QUERIES]):
        for engine in engines.values():
            engine.stats.reset()
        timings, results = measure(task, engines, _ROUNDS, progress)
        progress(f"{task.name}: truth in fp32")
        wrong, errors = wrong_results(task, loaded.model, results)
        stats = engines["radix"].stats
        bars.append(speed_bar(task, timings, stats, source, wrong, errors))
        if task.groups:
            bars.append(order_bar(task, results))
        bars.append(index_bar(task, stats))
    return bars + batching_bars(loaded, entries, source)


def tasks(loaded: LoadedModel, entries: Sequence[RankedPassages]) -> list[Task]:
    """Reranking with Qwen3-Reranker's template, and embedding behind a long prompt."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    pairs = [(entry.query, passage) for entry in entries for passage in entry.passages[:_PASSAGES]]
    queries, documents = map(list, zip(*pairs, strict=True))
    form = QWEN3_RERANKER
    around = [tokenizer.encode(part, add_special_tokens=False) for part in (form.prefix, form.suffix)]
    bodies = [
        form.body.format(instruction=form.instruction, query=query, document=document)
        for query, document in pairs[:_CHECKED]
    ]
    yes_no = [tokenizer.encode(label, add_special_tokens=False)[0] for label in ("yes", "no")]
    groups: dict[str, list[int]] = {}
    for index, (query, _) in enumerate(pairs):
        groups.setdefault(query, []).append(index)
    return [
        Task(
            "rerank",
            lambda engine: engine.rerank_pairs(queries, documents),
            [around[0] + tokenizer.encode(body, add_special_tokens=False) + around[1] for body in bodies],
            lambda _, logits: logits[:, yes_no].float().softmax(-1)[:, :1],
            list(groups.values()),
        ),
        Task(
            "embed",
            lambda engine: engine.embed(documents, _PROMPT),
            [tokenizer.encode(_PROMPT + document) for document in documents[:_CHECKED]],
            lambda hidden, _: normalize(hidden.float(), dim=-1),
            [],
        ),
    ]


def measure(
    task: Task, engines: dict[str, Engine], rounds: int, progress: Progress
) -> tuple[Timings, dict[str, Tensor]]:
    """The engines' calls interleaved, and what the last ones returned."""
    results: dict[str, Tensor] = {}

    def calling(impl: str) -> Callable[[], object]:
        def call() -> None:
            results[impl] = task.call(engines[impl])

        return call

    timings = time_interleaved({impl: calling(impl) for impl in engines}, rounds, progress=progress)
    return timings, results


def speed_bar(
    task: Task, timings: Timings, stats: EngineStats, source: str, wrong: str | None, errors: dict[str, Any]
) -> Bar:
    """The radix engine over the dense one, as a share of r."""
    r = 1 / stats.gamma
    pairs = zip(timings.seconds["dense"], timings.seconds["radix"], strict=True)
    shares = [dense / radix / r for dense, radix in pairs]
    requests = stats.requests // (timings.rounds + 1)  # a round of warming up
    return Bar(
        f"engine: {task.name}, radix over dense, as a share of r",
        statistics.median(shares),
        SHARE_OF_R,
        "higher",
        f"SmolLM2-135M, bf16, {source}, {requests} requests, max_batch_tokens={_BUDGET}, r = {r:.2f}; text in, "
        "results out",
        (quantile(shares, 0.2), quantile(shares, 0.8)),
        wrong=wrong,
        details={
            "median_speedup": statistics.median(shares) * r,
            "r": r,
            "seconds": timings.median("radix"),
            "dense_seconds": timings.median("dense"),
            "choices": dict(stats.choices),
            "errors": errors,
        },
    )


@torch.no_grad()
def wrong_results(task: Task, model: Any, results: dict[str, Tensor]) -> tuple[str | None, dict[str, Any]]:
    """Why the radix engine's results are wrong by the factors of `rules.py` (None: they are not), and the errors.

    Truth is the model in fp32, each request alone, tokenised here. The legitimate error is the larger one of the
    dense engine and the model itself in its dtype, each request alone. The RMS of single scores is not judged.
    """
    batch = RaggedBatch.from_sequences(task.sequences)
    count = batch.num_sequences
    truth = _alone(task, cast_parameters(copy.deepcopy(model), torch.float32), batch)
    got = {impl: values[:count].reshape(count, -1) for impl, values in results.items()}
    got["alone"] = _alone(task, model, batch)
    errors = {name: rules.errors_against(values, truth) for name, values in got.items()}
    scale = errors["radix"].scale
    dtype = next(model.parameters()).dtype
    largest = allowed_difference(max(errors[name].largest for name in ("dense", "alone")), dtype, scale)
    rms = rules.RMS_FACTOR * max(errors[name].rms for name in ("dense", "alone"))
    ours = errors["radix"]
    judged = truth.shape[1] > 1 and count >= rules.MIN_RMS_ROWS
    wrong = None
    if not ours.largest <= largest or (judged and not ours.rms <= rms):
        wrong = (
            f"largest error {ours.largest:.2e} (allowed {largest:.2e}), RMS {ours.rms:.2e} "
            f"(allowed {rms:.2e}{'' if judged else ', not judged'})"
        )
    return wrong, {name: {"largest": e.largest, "rms": e.rms} for name, e in errors.items()}


def allowed_difference(legitimate: float, dtype: torch.dtype, scale: float) -> float:
    """The largest error allowed, as a share of `scale`, where dense's own is `legitimate`."""
    if dtype not in rules.HALF_DTYPES:
        return rules.FLOAT32
    return rules.LARGEST_FACTOR * legitimate + rules.floor_of(dtype, scale)


def _alone(task: Task, model: Any, batch: RaggedBatch) -> Tensor:
    out = each_alone(model, batch, keep=1)
    assert out.logits is not None
    last = batch.cu_seqlens[1:].long() - 1
    return task.truth(out.last_hidden_state[last], out.logits)


def order_bar(task: Task, results: dict[str, Tensor]) -> Bar:
    """Pairs of documents of one query that the two engines rank otherwise, though their scores lie apart."""
    dense, radix = results["dense"], results["radix"]
    scale = float(dense.abs().max())
    floor = rules.floor_of(torch.bfloat16, scale) * scale
    swapped = beyond = compared = 0
    for group in task.groups:
        for i, j in combinations(group, 2):
            apart = float(dense[i] - dense[j]), float(radix[i] - radix[j])
            compared += 1
            if apart[0] * apart[1] < 0:
                swapped += 1
                beyond += min(map(abs, apart)) > floor
    return Bar(
        f"engine: {task.name}, pairs of documents in another order",
        float(beyond),
        0.0,
        "lower",
        f"{compared} pairs of documents of one query; such as lie further apart than {floor:.2g} in both engines",
        details={"swapped": swapped, "floor": floor, "pairs": compared},
    )


def index_bar(task: Task, stats: EngineStats) -> Bar:
    """Time for ordering, packing and plans that no batch hid, first batches included, as a share of the calls."""
    return Bar(
        f"engine: {task.name}, index time not hidden, share of the run",
        stats.unhidden_index_share,
        UNHIDDEN_INDEX,
        "lower",
        f"{stats.batches} batches of max_batch_tokens={_BUDGET}, text in, results out",
        details={
            "index_share": stats.index_seconds / stats.seconds,
            "tokenize_share": stats.tokenize_seconds / stats.seconds,
            "unhidden_tokenize_share": stats.unhidden_tokenize_seconds / stats.seconds,
            "first_wait_share": stats.first_wait_seconds / stats.seconds,
            "waited_share": stats.waited_seconds / stats.seconds,
        },
    )


def _entries() -> tuple[list[RankedPassages], str]:
    """MS MARCO from beside the checkout, or the shipped passages; and which of the two it was."""
    if msmarco_is_local():
        return load_passages(MSMARCO_FILE), "MS MARCO (TREC DL 2019, BM25)"
    return load_passages(SHIPPED_FILE), "shipped passages, NOT MS MARCO (its file is not beside the checkout)"
