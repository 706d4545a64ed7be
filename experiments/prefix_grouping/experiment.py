"""Prefix grouping (one shared prompt a group) against dense and the trie, on one level of sharing and on three."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.verify.ideal import DecoderShape
from radixmlp.verify.rules import PLAIN_FLOAT64
from radixmlp.verify.timing import Timings, time_interleaved
from radixmlp.verify.training_ideal import step_flops
from radixmlp.verify.training_variants import (
    DENSE_PADDED_ROWS,
    DENSE_RAGGED,
    Loss,
    build_losses,
    load_trainee,
    mask_prompts,
    step,
)

from .batches import measured_batches, prompt_keys, tree_batch
from .grouping import NAME, PrefixGrouping, group_plan, grouped_loss, registered

QUESTION = "grouping by one common prefix against the trie, in training: one level of sharing, and three"
TRIE = "trie-sdpa"
BY_PROMPT = f"{NAME}, a group a prompt"
DENSE = (DENSE_PADDED_ROWS, DENSE_RAGGED)


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Args:
        shrink: the batches' lengths are divided by it.
        rounds: timed steps of each path, interleaved.
    """

    model: str = "qwen3-0.6b-width:2"
    vocabulary: int = 32_000
    dtype: str = "bfloat16"
    shrink: int = 1
    rounds: int = 3


QUICK = Settings("tiny-qwen3", 512, "float32", 8, 1)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Loss and gradients against transformers' own; only if they agree, rows, FLOPs and times.

    Raises:
        ValueError: loss or gradients are wrong.
    """
    settings = QUICK if quick else Settings()
    with registered():
        errors = parity()
        if not all(error <= PLAIN_FLOAT64 for error in errors.values()):
            raise ValueError(f"wrong values (allowed {PLAIN_FLOAT64}), so nothing was timed: {errors}")
        result: dict[str, Any] = {"settings": asdict(settings), "parity": errors}
        model = load_trainee(settings.model, settings.vocabulary, settings.dtype)
        for level, (batch, prompt) in measured_batches(settings.vocabulary, settings.shrink).items():
            progress(f"{level}: {batch.num_tokens} tokens")
            result[level] = _level(model, batch, prompt, settings.rounds, progress)
    return result


def parity() -> dict[str, float]:
    """The loss and the worst weight's gradient against transformers' own in fp64: largest error, relative."""
    model = load_trainee("tiny-qwen3", 512, "float64")
    batch, labels = tree_batch([9], [5, 7, 1, 5], vocabulary=512), None
    losses: dict[str, Loss] = {NAME: partial(grouped_loss, model, batch, labels)}
    losses |= build_losses(model, batch, labels, ["dense-padded"])
    values, gradients = {}, {}
    for which, loss in losses.items():
        values[which] = step(model, loss)
        gradients[which] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    truth, ours = gradients["dense-padded"], gradients[NAME]
    worst = max(float((ours[n] - g).abs().max() / g.abs().max()) for n, g in truth.items())
    return {"loss": abs(values[NAME] / values["dense-padded"] - 1), "gradient": worst}


def _level(
    model: Any, batch: RaggedBatch, prompt: int, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Rows, FLOPs and time of one step (loss of the tokens after the first `prompt`), paths interleaved."""
    labels = mask_prompts(batch, prompt)
    shape = DecoderShape.from_config(model.config)
    groups, keys = {NAME: batch}, prompt_keys(batch, prompt)
    if keys.max() > 0:
        groups[BY_PROMPT] = replace(batch, sharing_keys=keys)
    plans = {which: group_plan(grouped) for which, grouped in groups.items()} | {
        TRIE: radixmlp.build_plan(batch)
    }
    flops = {which: step_flops(shape, batch, plan, labels) for which, plan in plans.items()}
    losses = build_losses(model, batch, labels, [*DENSE, TRIE])
    losses |= {which: partial(grouped_loss, model, grouped, labels) for which, grouped in groups.items()}
    calls = {which: partial(step, model, loss) for which, loss in losses.items()}
    timings = time_interleaved(calls, rounds, progress=progress)
    attention = _time_attention(model, plans, rounds)
    dense = timings.fastest([*DENSE])
    return {
        "tokens": batch.num_tokens,
        "rows": {which: count.trie_rows for which, count in flops.items()},
        "ideal_speedup": {which: count.speedup for which, count in flops.items()},
        "fastest_dense": dense,
        "seconds": {which: timings.median(which) for which in calls},
        "speedup_over_dense": {which: asdict(timings.ratio(dense, which)) for which in plans},
        "trie_over": {which: asdict(timings.ratio(which, TRIE)) for which in groups},
        "attention_seconds": {which: attention.median(which) for which in plans},
        "trie_over_in_attention": {which: asdict(attention.ratio(which, TRIE)) for which in groups},
    }


def _time_attention(model: Any, plans: dict[str, TriePlan], rounds: int) -> Timings:
    """One layer's attention, forward and backward, on the rows of each path."""
    config = model.config
    spec = AttentionSpec(config.head_dim**-0.5)
    grouping, trie = PrefixGrouping(), radixmlp.attention_backends()[TRIE]
    dtype = next(model.parameters()).dtype

    def call(which: str, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v = inputs
        out = (trie if which == TRIE else grouping)(q, k, v, plans[which], spec)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    def random(rows: int, heads: int) -> Tensor:
        return torch.randn(rows, heads, config.head_dim, dtype=dtype).requires_grad_()

    calls = {}
    for which, plan in plans.items():
        queries = random(plan.num_nodes, config.num_attention_heads)
        keys, values = (random(plan.num_nodes, config.num_key_value_heads) for _ in range(2))
        calls[which] = partial(call, which, (queries, keys, values))
    return time_interleaved(calls, 3 * rounds)


def report(measured: dict[str, Any]) -> str:
    """Markdown: one table a batch."""
    s, errors = measured["settings"], measured["parity"]
    lines = [
        f"{s['model']}, vocabulary {s['vocabulary']}, {s['dtype']}; one step is forward and backward of the "
        f"completions' loss, the dense head on the wanted rows only; {s['rounds']} interleaved rounds (attention "
        f"alone: three times as many), median (20–80%). Lengths are the README's divided by {s['shrink']}.",
        "",
        f"Against transformers' own in fp64: loss off by {errors['loss']:.1e}, the worst weight's gradient by "
        f"{errors['gradient']:.1e}.",
    ]
    for level in ("one_level", "three_levels"):
        found = measured[level]
        lines += [
            "",
            f"### {level.replace('_', ' ')}, {found['tokens']} tokens",
            "",
            "| path | rows | ideal | seconds | over dense | trie over it | attention, seconds | trie over it |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += [_row(found, which) for which in found["seconds"]]
    return "\n".join(lines) + "\n"


def _row(found: Mapping[str, Any], which: str) -> str:
    name = f"{which} (the faster)" if which == found["fastest_dense"] else which
    cells = [name, "", "", f"{found['seconds'][which]:.4g}", "", "", "", ""]
    if which in found["rows"]:
        cells[1:3] = str(found["rows"][which]), f"{found['ideal_speedup'][which]:.3f}"
        cells[4] = _spread(found["speedup_over_dense"][which])
        cells[6] = f"{found['attention_seconds'][which]:.4g}"
    if which in found["trie_over"]:
        cells[5] = _spread(found["trie_over"][which])
        cells[7] = _spread(found["trie_over_in_attention"][which])
    return f"| {' | '.join(cells)} |"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q20']:.2f}–{ratio['q80']:.2f})"
