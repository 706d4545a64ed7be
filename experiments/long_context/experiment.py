"""Where attention takes over: dense, the paper's path and the trie from 4K tokens on, measured, then predicted."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor

import radixmlp
from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify.bars import wrong_outputs
from radixmlp.verify.ideal import DecoderShape, visible_pairs
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.timing import time_interleaved
from radixmlp.verify.variants import DENSE_PADDED, Variant, build_variants
from radixmlp.verify.workloads import make_workload

from .clock import SUFFIX, Clocked, clocked

QUESTION = "from which length on does attention take over, and what is then left of the paper's path and of the trie?"
PATHS = {"dense": "dense-sdpa", "scatter": "scatter-sdpa", "trie": "trie-sdpa"}


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Args:
        own: tokens of each sequence after the prefix; a length is prefix + own.
        measured, rounds: lengths that are timed, and how often.
        predicted: lengths beyond, by FLOPs.
        checked: length whose outputs are held against the truth, every path, before anything is timed.
    """

    model: str = "qwen3-0.6b-width:1"
    dtype: str = "bfloat16"
    sequences: int = 2
    own: int = 256
    measured: tuple[int, ...] = (4096, 8192, 16384)
    rounds: tuple[int, ...] = (3, 2, 1)
    predicted: tuple[int, ...] = (32768, 65536, 131072)
    checked: int = 1024


QUICK = Settings("tiny-qwen3", "float32", 3, 8, (40, 80), (1, 1), (160,), 24)


@dataclass(frozen=True)
class Work:
    """FLOPs of all layers on one path; the embedding and the head are left out."""

    position_wise: int
    attention: int

    @property
    def share(self) -> float:
        """Attention's part of the FLOPs."""
        return self.attention / (self.position_wise + self.attention)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Check values, time every path and the attention inside it, and predict what was too long to run."""
    settings = QUICK if quick else Settings()
    loaded = load_model(settings.model, settings.dtype)
    shape = DecoderShape.from_config(loaded.model.config)
    progress(f"values at {settings.checked} tokens")
    _check(loaded, _batch(settings, loaded, settings.checked))
    lengths = []
    with clocked(*PATHS.values()) as clocks:
        for length, rounds in zip(settings.measured, settings.rounds, strict=True):
            batch = _batch(settings, loaded, length)
            works = work_of(shape, batch)
            found = _time(loaded, batch, rounds, clocks, partial(progress_of, progress, length))
            lengths.append({"length": length, "tokens": batch.num_tokens, **_counted(works), **found})
    rates = rates_of(lengths[-1]["seconds"], lengths[-1]["attention_seconds"], works)
    predicted = []
    for length in settings.predicted:
        batch = _batch(settings, loaded, length)
        works = work_of(shape, batch)
        predicted.append(
            {"length": length, "tokens": batch.num_tokens, **_counted(works), **predict(works, rates)}
        )
    return {
        "settings": asdict(settings),
        "measured": lengths,
        "predicted": predicted,
        "half_by_flops": {path: half_length(shape, settings.own, settings.sequences, path) for path in PATHS},
    }


def progress_of(progress: Callable[[str], None], length: int, what: str) -> None:
    """Say which length is running."""
    progress(f"{length} tokens, {what}")


def work_of(shape: DecoderShape, batch: RaggedBatch) -> dict[str, Work]:
    """FLOPs per path, counted on the batch itself."""
    plan = radixmlp.build_plan(batch)
    full, own = TriePlan.identity(batch), plan
    pairs = {"dense": full.depth, "scatter": full.depth, "trie": own.depth}
    rows = {"dense": plan.num_tokens, "scatter": plan.num_nodes, "trie": plan.num_nodes}
    layers = len(shape.layer_windows)
    return {
        path: Work(
            layers * rows[path] * shape.flops_per_row,
            shape.flops_per_pair * sum(visible_pairs(pairs[path], window) for window in shape.layer_windows),
        )
        for path in PATHS
    }


def rates_of(
    seconds: Mapping[str, float], attention: Mapping[str, float], works: Mapping[str, Work]
) -> dict[str, tuple[float, float]]:
    """Per path: seconds a FLOP outside attention, and inside it."""
    return {
        path: ((seconds[path] - attention[path]) / work.position_wise, attention[path] / work.attention)
        for path, work in works.items()
    }


def predict(works: Mapping[str, Work], rates: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Seconds, attention's share and speed-ups if every FLOP took what it took at the longest measured length."""
    inside = {path: work.attention * rates[path][1] for path, work in works.items()}
    total = {path: work.position_wise * rates[path][0] + inside[path] for path, work in works.items()}
    return {
        "seconds": total,
        "attention_share": {path: inside[path] / total[path] for path in PATHS},
        "over_dense": {path: total["dense"] / total[path] for path in ("scatter", "trie")},
    }


def half_length(shape: DecoderShape, own: int, sequences: int, path: str) -> int:
    """The shortest length at which attention is half of a path's FLOPs or more (layers without windows).

    A prefix of P tokens and B own parts of S: P + S are the length L; dense has B L rows and B L (L + 1) / 2
    pairs, the paper's path P + B S rows and the same pairs, the trie P (P + 1) / 2 pairs less B - 1 times.
    """

    def attention_leads(length: int) -> bool:
        prefix, each = length - own, length * (length + 1) // 2
        rows = sequences * length if path == "dense" else prefix + sequences * own
        again = (sequences - 1) * prefix * (prefix + 1) // 2 if path == "trie" else 0
        return (sequences * each - again) * shape.flops_per_pair >= rows * shape.flops_per_row

    low, high = own, 2 * own
    while not attention_leads(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if attention_leads(middle) else (middle, high)
    return high


def _batch(settings: Settings, loaded: LoadedModel, length: int) -> RaggedBatch:
    name = f"synthetic:{length - settings.own}+{settings.own}x{settings.sequences}"
    return make_workload(name, None, loaded.vocab_size).batch


def _check(loaded: LoadedModel, batch: RaggedBatch) -> None:
    calls = build_variants(loaded.model, batch, [DENSE_PADDED, *PATHS.values()])
    outputs = {name: call() for name, call in calls.items()}
    wrong = wrong_outputs(loaded.model, batch, outputs, list(range(batch.num_sequences)))
    if wrong:
        raise ValueError(f"wrong values, so nothing was timed: {wrong}")


def _time(
    loaded: LoadedModel,
    batch: RaggedBatch,
    rounds: int,
    clocks: Mapping[str, Clocked],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds of each path, and of the attention calls within."""
    inside: dict[str, list[float]] = {path: [] for path in PATHS}
    variants = build_variants(loaded.model, batch, [name + SUFFIX for name in PATHS.values()])
    calls = {
        path: partial(_clocked_call, variants[name + SUFFIX], clocks[name], inside[path])
        for path, name in PATHS.items()
    }
    timings = time_interleaved(calls, rounds, warmup=0, progress=progress)
    seconds = {path: timings.median(path) for path in PATHS}
    attention = {path: statistics.median(inside[path]) for path in PATHS}
    return {
        "rounds": rounds,
        "seconds": seconds,
        "attention_seconds": attention,
        "attention_share": {path: attention[path] / seconds[path] for path in PATHS},
        "over_dense": {path: asdict(timings.ratio("dense", path)) for path in ("scatter", "trie")},
    }


def _clocked_call(variant: Variant, clock: Clocked, inside: list[float]) -> Tensor:
    clock.seconds = 0.0
    out = variant()
    inside.append(clock.seconds)
    return out


def _counted(works: Mapping[str, Work]) -> dict[str, Any]:
    """FLOP shares and ratios, layers only."""
    total = {path: work.position_wise + work.attention for path, work in works.items()}
    return {
        "flop_share": {path: work.share for path, work in works.items()},
        "ideal": {path: total["dense"] / total[path] for path in ("scatter", "trie")},
    }


def report(measured: dict[str, Any]) -> str:
    """Markdown: measured lengths, predicted ones, and where attention is half of the FLOPs."""
    s = measured["settings"]
    rounds = [found["rounds"] for found in measured["measured"]]
    lines = [
        f"{s['model']}, {s['dtype']}, {s['sequences']} sequences, all but their last {s['own']} tokens shared; "
        f"whole call: plan, backbone, last-token logits. {', '.join(map(str, rounds))} interleaved rounds (of "
        f"{', '.join(map(str, s['rounds']))} asked for); values checked at {s['checked']} tokens.",
        "",
        f"Measured at {', '.join(map(str, s['measured']))} tokens a sequence. Attention is timed inside the layer; "
        "the paper's path counts its scatter and gather as attention.",
        "",
        *_table(measured["measured"], exact=True),
        "",
        f"**Predicted** at {', '.join(map(str, s['predicted']))}, not run: FLOPs times the seconds a FLOP took "
        "inside and outside attention at the longest measured length.",
        "",
        *_table(measured["predicted"], exact=False),
        "",
        "| path | attention is half of the FLOPs from this length on |",
        "|---|---|",
    ]
    lines += [f"| {path} | {length} |" for path, length in measured["half_by_flops"].items()]
    return "\n".join(lines) + "\n"


def _table(found: list[dict[str, Any]], exact: bool) -> list[str]:
    lines = [
        "| length | tokens | path | seconds | of it attention | share of FLOPs | over dense | ideal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in found:
        for path in PATHS:
            seconds = f"{entry['seconds'][path]:.4g}"
            share = f"{100 * entry['attention_share'][path]:.1f}%"
            if exact:
                share += f" ({entry['attention_seconds'][path]:.4g} s)"
            over = ideal = ""
            if path != "dense":
                ratio = entry["over_dense"][path]
                over = (
                    f"{ratio['median']:.2f} ({ratio['q20']:.2f}–{ratio['q80']:.2f})"
                    if exact
                    else f"{ratio:.2f}"
                )
                ideal = f"{entry['ideal'][path]:.2f}"
            counted = f"{100 * entry['flop_share'][path]:.1f}%"
            cells = [entry["length"], entry["tokens"], path, seconds, share, counted, over, ideal]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
