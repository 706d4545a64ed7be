"""Few-shot examples shared at several levels: the trie against reuse of one prefix a group, and dense."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import SCATTER, TRIE, wrong_outputs
from radixmlp.verify.ideal import DecoderShape, ideal_speedup
from radixmlp.verify.models import SMOLLM2, LoadedModel, load_model
from radixmlp.verify.timing import time_interleaved
from radixmlp.verify.variants import DENSE, DENSE_PADDED, DENSE_RAGGED, PREFIX_KV, Variant, build_variants

from .tree import LEVELS, Leaf, batch_of, groups, leaves, parts_of, reuse_rows

QUESTION = (
    "few-shot prompts share at several levels: what does the trie gain over sharing one prefix a group?"
)


@dataclass(frozen=True)
class Settings:
    """Sizes: (tasks, subsets of examples, items) of the counted tree and of the timed one; four labels each."""

    model: str = SMOLLM2
    dtype: str = "bfloat16"
    counted: tuple[int, int, int] = (2, 4, 30)
    timed: tuple[int, int, int] = (2, 2, 2)
    rounds: int = 3


QUICK = Settings("tiny-qwen3", "float32", (2, 2, 2), (1, 2, 2), 1)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Count rows for every way of sharing on the large tree, and time them on the small one."""
    settings = QUICK if quick else Settings()
    loaded = load_model(settings.model, settings.dtype)
    tokenizer: Any = loaded.tokenizer
    encode: Callable[[str], Sequence[int]] = _bytes if quick else tokenizer.encode
    progress("counting")
    large = leaves(*settings.counted)
    counted = count(batch_of(large, encode), large, DecoderShape.from_config(loaded.model.config))
    found = leaves(*settings.timed)
    batch = batch_of(found, encode)
    small = count(batch, found, DecoderShape.from_config(loaded.model.config))
    return {
        "settings": asdict(settings),
        "counted": counted,
        "timed": {**small, **_time(loaded, batch, found, settings.rounds, progress)},
    }


def _bytes(text: str) -> list[int]:
    return list(text.encode())


def count(batch: RaggedBatch, found: Sequence[Leaf], shape: DecoderShape) -> dict[str, Any]:
    """Rows each way of sharing computes, and the ideal speed-ups of the two that run on the trie."""
    plan = radixmlp.build_plan(batch)
    flops = ideal_speedup(shape, batch, plan, batch.num_sequences)
    dense = {DENSE_PADDED: int(batch.lengths.max()) * batch.num_sequences, DENSE_RAGGED: batch.num_tokens}
    reuse = {variant_of(level): reuse_rows(batch, groups(found, level)) for level in LEVELS}
    return {
        "sequences": batch.num_sequences,
        "tokens": batch.num_tokens,
        "rows": {**dense, **reuse, SCATTER: plan.num_nodes, TRIE: plan.num_nodes},
        "calls": {variant_of(level): len(groups(found, level)) for level in LEVELS},
        "r": plan.compression_ratio,
        "ideal": {SCATTER: flops.speedup("scatter"), TRIE: flops.speedup("trie")},
    }


def variant_of(level: str) -> str:
    """The name of reusing one prefix for each group of a level."""
    return f"{PREFIX_KV} by {level}"


def grouped_prefix_kv(model: Any, batch: RaggedBatch, parts: Sequence[Sequence[int]]) -> Variant:
    """Hugging Face's reuse of one prefix, a call a group; last-token logits [B, V] in the batch's order.

    A group whose sequences have no token in common to start with runs padded, as it is.
    """
    built = [build_variants(model, part, [PREFIX_KV, DENSE_PADDED]) for part in parts_of(batch, parts)]
    calls = [variants.get(PREFIX_KV, variants[DENSE_PADDED]) for variants in built]
    order = torch.tensor([number for numbers in parts for number in numbers]).argsort()

    def call() -> Tensor:
        return torch.cat([one() for one in calls])[order]

    return call


def _time(
    loaded: LoadedModel,
    batch: RaggedBatch,
    found: Sequence[Leaf],
    rounds: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    model = loaded.model
    calls = build_variants(model, batch, [*DENSE, SCATTER, TRIE])
    calls |= {variant_of(level): grouped_prefix_kv(model, batch, groups(found, level)) for level in LEVELS}
    first = {}
    for name, call in calls.items():
        progress(f"values: {name}")
        first[name] = call()
    wrong = wrong_outputs(model, batch, first, list(range(0, batch.num_sequences, 5)))
    if wrong:
        raise ValueError(f"wrong values, so nothing was timed: {wrong}")
    timings = time_interleaved(calls, rounds, warmup=0, progress=partial(_say, progress))
    dense = timings.fastest([*DENSE])
    others = [name for name in calls if name not in DENSE]
    return {
        "fastest_dense": dense,
        "seconds": {name: timings.median(name) for name in calls},
        "over_dense": {name: asdict(timings.ratio(dense, name)) for name in others},
        "trie_over": {name: asdict(timings.ratio(name, TRIE)) for name in others if name != TRIE},
    }


def _say(progress: Callable[[str], None], what: str) -> None:
    progress(f"timing, {what}")


def report(measured: dict[str, Any]) -> str:
    """Markdown: rows of the large tree, then rows and times of the small one."""
    s = measured["settings"]
    large, small = measured["counted"], measured["timed"]
    lines = [
        f"Counted: {_tree(s['counted'], large)}. Rows include padding.",
        "",
        "| sharing | calls | rows | tokens / rows | ideal |",
        "|---|---|---|---|---|",
        *(_line(_counts(large, name)) for name in large["rows"]),
        "",
        f"Timed: {s['model']}, {s['dtype']}, {_tree(s['timed'], small)}; whole call (plan or cache, backbone, last-"
        f"token logits), {s['rounds']} interleaved rounds, median (20–80%).",
        "",
        "| sharing | calls | rows | tokens / rows | ideal | seconds | over dense | trie over it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, seconds in small["seconds"].items():
        cells = _counts(small, name)
        cells[0] = f"{name} (the faster)" if name == small["fastest_dense"] else name
        ratios = [
            _spread(small[over][name]) if name in small[over] else "" for over in ("over_dense", "trie_over")
        ]
        lines.append(_line([*cells, f"{seconds:.4g}", *ratios]))
    return "\n".join(lines) + "\n"


def _tree(sizes: Sequence[int], found: Mapping[str, Any]) -> str:
    tasks, subsets, items = sizes
    shape = f"{tasks} tasks x {subsets} subsets of examples x {items} items x 4 labels"
    return f"{shape}, {found['sequences']} sequences, {found['tokens']} tokens, r = {found['r']:.3f}"


def _counts(found: Mapping[str, Any], name: str) -> list[str]:
    rows = found["rows"][name]
    ideal = f"{found['ideal'][name]:.3f}" if name in found["ideal"] else ""
    return [name, str(found["calls"].get(name, 1)), str(rows), f"{found['tokens'] / rows:.3f}", ideal]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q20']:.2f}–{ratio['q80']:.2f})"
