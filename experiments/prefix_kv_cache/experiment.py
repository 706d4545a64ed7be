"""Hugging Face's reuse of one prefix's KV cache, cold and kept from an earlier call, against the trie."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import TRIE, wrong_outputs
from radixmlp.verify.memory import peak_megabytes
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.timing import Ratio, time_interleaved
from radixmlp.verify.variants import (
    DENSE,
    PREFIX_KV,
    Variant,
    build_variants,
    cache_argument,
    common_prefix_length,
    only_last_token,
    pad_rows,
)

from .shapes import QUICK_SHAPES, SHAPES, Shape

QUESTION = (
    "is the trie faster and leaner than reusing one prefix's KV cache, and where is reuse as good or better?"
)
WARM = "prefix-kv, kept"
RIVALS = (PREFIX_KV, WARM)


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Args:
        rounds: timed calls of each path, interleaved.
        memory: names of the shapes whose peak memory is measured.
    """

    model: str = "qwen3-0.6b-width:2"
    dtype: str = "bfloat16"
    rounds: int = 4
    memory: tuple[str, ...] = ("1024 + 64 x 16", "two levels: 128, 4 x 256, 4 x 64 each")


QUICK = Settings("tiny-qwen3", "float32", 1, ())


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Count, time, and measure the memory of each path on every shape."""
    settings, shapes = (QUICK, QUICK_SHAPES) if quick else (Settings(), SHAPES)
    loaded = load_model(settings.model, settings.dtype)
    found = []
    for shape in shapes:
        progress(shape.name)
        found.append(_on(shape, loaded, settings.rounds))
    memory = {}
    for shape in shapes:
        if shape.name in settings.memory:
            batch = shape.batch(loaded.vocab_size)
            names = [*DENSE, PREFIX_KV, TRIE]
            memory[shape.name] = peak_megabytes(
                settings.model, batch, names, settings.dtype, progress=progress
            )
    return {"settings": asdict(settings), "shapes": found, "peak_mb": memory}


def kept_prefix_kv(model: Any, batch: RaggedBatch) -> Variant:
    """Reuse of a cache that an earlier call filled: only the own parts run, as one padded batch.

    The prefix is run here, outside the timed call, which begins by copying its cache: `batch_repeat_interleave`
    and the forward change it.

    Args:
        model: a causal LM.
        batch: sequences with a common prefix; positions count from 0.
    """
    prefix = common_prefix_length(batch)
    suffixes = pad_rows(batch, start=prefix)
    kept = DynamicCache(config=model.config)
    shared = batch.input_ids[None, :prefix].long()
    with torch.no_grad():
        model.base_model(input_ids=shared, use_cache=True, **{cache_argument(model.base_model): kept})

    def call() -> Tensor:
        cache = copy.deepcopy(kept)
        cache.batch_repeat_interleave(batch.num_sequences)
        inputs = {cache_argument(model): cache, "attention_mask": suffixes.attention_mask, "use_cache": True}
        with torch.no_grad(), only_last_token(model, suffixes.last):
            logits: Tensor = model(input_ids=suffixes.input_ids, **inputs).logits
        return logits[:, 0]

    return call


def rows_of(batch: RaggedBatch) -> dict[str, int]:
    """Rows that each path computes, padding included."""
    prefix, own = common_prefix_length(batch), batch.lengths - common_prefix_length(batch)
    padded = int(own.max()) * batch.num_sequences
    return {
        "dense": batch.num_tokens,
        PREFIX_KV: prefix + padded,
        WARM: padded,
        TRIE: radixmlp.build_plan(batch).num_nodes,
    }


def better(ratio: Ratio) -> str:
    """Who wins, from the ratio rival / trie: named only where the 20% and 80% quantiles agree."""
    if ratio.q20 > 1:
        return "trie"
    return "reuse" if ratio.q80 < 1 else "neither"


def _on(shape: Shape, loaded: LoadedModel, rounds: int) -> dict[str, Any]:
    model, batch = loaded.model, shape.batch(loaded.vocab_size)
    calls = build_variants(model, batch, [*DENSE, PREFIX_KV, TRIE])
    calls[WARM] = kept_prefix_kv(model, batch)
    screen = time_interleaved(calls, 1, warmup=0)  # the first calls: only to drop the slower dense
    outputs = {name: call() for name, call in calls.items()}
    wrong = wrong_outputs(model, batch, outputs, [0, batch.num_sequences - 1])
    if wrong:
        raise ValueError(f"{shape.name}: wrong values, so nothing was timed: {wrong}")
    dense = screen.fastest([*DENSE])
    timed = {name: call for name, call in calls.items() if name not in DENSE or name == dense}
    timings = time_interleaved(timed, rounds, warmup=0)
    ratios = {rival: timings.ratio(rival, TRIE) for rival in RIVALS}
    return {
        "name": shape.name,
        "sequences": batch.num_sequences,
        "rows": rows_of(batch),
        "dense": dense,
        "ms": {name: 1e3 * timings.median(name) for name in timed},
        "trie_over": {name: asdict(ratio) for name, ratio in ratios.items()},
        "better": {name: better(ratio) for name, ratio in ratios.items()},
    }


def report(measured: dict[str, Any]) -> str:
    """Markdown: rows, times and peak memory."""
    s = measured["settings"]
    lines = [
        f"{s['model']}, {s['dtype']}; whole call: plan or cache, backbone, last-token logits; {s['rounds']} "
        "interleaved rounds, medians (20–80%). `prefix-kv` runs the prefix in every call; `prefix-kv, kept` has its "
        'cache from an earlier call and only copies it. "Better" is named where both quantiles agree.',
        "",
        "| shape | sequences | rows: dense | prefix-kv | kept | trie |",
        "|---|---|---|---|---|---|",
    ]
    for shape in measured["shapes"]:
        rows = " | ".join(str(shape["rows"][path]) for path in ("dense", *RIVALS, TRIE))
        lines.append(f"| {shape['name']} | {shape['sequences']} | {rows} |")
    lines += [
        "",
        "| shape | dense, ms | prefix-kv | kept | trie | trie over prefix-kv | better | trie over kept | better |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_times(shape) for shape in measured["shapes"]]
    if measured["peak_mb"]:
        lines += ["", "Peak memory above the weights, MB, a fresh process each:", ""]
        names = list(next(iter(measured["peak_mb"].values())))
        lines += [f"| shape | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
        for shape, peaks in measured["peak_mb"].items():
            lines.append(f"| {shape} | {' | '.join(f'{peaks[name]:.1f}' for name in names)} |")
        lines.append(f"\nMeasured on: {', '.join(s['memory'])}.")
    return "\n".join(lines) + "\n"


def _times(shape: dict[str, Any]) -> str:
    ms = " | ".join(f"{shape['ms'][path]:.4g}" for path in (shape["dense"], *RIVALS, TRIE))
    against = " | ".join(f"{_spread(shape['trie_over'][r])} | {shape['better'][r]}" for r in RIVALS)
    return f"| {shape['name']} | {ms} | {against} |"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q20']:.2f}–{ratio['q80']:.2f})"
