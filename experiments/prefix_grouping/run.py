"""Measure prefix grouping against dense and the trie, on one level of sharing and on three; write result.json."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.verify.environment import environment
from radixmlp.verify.ideal import DecoderShape
from radixmlp.verify.rules import PLAIN_FLOAT64
from radixmlp.verify.timing import Ratio, Timings, time_interleaved
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

from .grouping import NAME, PrefixGrouping, group_plan, grouped_loss, registered

TRIE = "trie-sdpa"
BY_PROMPT = f"{NAME}, a group a prompt"
DENSE = (DENSE_PADDED_ROWS, DENSE_RAGGED)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result.

    Returns:
        0; 1 if values or gradients are wrong: then nothing is timed.
    """
    arguments = _parse(argv)
    quick = arguments.quick
    with registered():
        result: dict[str, Any] = {"environment": environment("cpu"), "parity": parity()}
        right = all(error <= PLAIN_FLOAT64 for error in result["parity"].values())
        if right:
            name = "tiny-qwen3" if quick else f"qwen3-0.6b-width:{arguments.layers}"
            vocabulary, dtype = (512, "float32") if quick else (32_000, "bfloat16")
            model = load_trainee(name, vocabulary, dtype)
            result |= {"model": name, "vocabulary": vocabulary, "dtype": dtype}
            for level, (batch, prompt) in _batches(vocabulary, quick).items():
                print(f"{level}: {batch.num_tokens} tokens", flush=True)
                result[level] = measure(model, batch, prompt, arguments.rounds)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 0 if right else 1


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


def measure(model: Any, batch: RaggedBatch, prompt: int, rounds: int) -> dict[str, Any]:
    """Rows, FLOPs and time of one step (loss of the tokens after the first `prompt`), each path beside the others."""
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
    timings = time_interleaved(calls, rounds, progress=partial(print, " ", flush=True))
    attention = _time_attention(model, plans, rounds)
    dense = timings.fastest([*DENSE])
    return {
        "tokens": batch.num_tokens,
        "rows": {which: count.trie_rows for which, count in flops.items()},
        "ideal_speedup": {which: count.speedup for which, count in flops.items()},
        "fastest_dense": dense,
        "seconds": {which: timings.median(which) for which in calls},
        "speedup_over_dense": {which: _spread(timings.ratio(dense, which)) for which in plans},
        "trie_over": {which: _spread(timings.ratio(which, TRIE)) for which in groups},
        "attention_seconds": {which: attention.median(which) for which in plans},
        "trie_over_in_attention": {which: _spread(attention.ratio(which, TRIE)) for which in groups},
    }


def tree_batch(widths: Sequence[int], leaves: Sequence[int], vocabulary: int, fan: int = 4) -> RaggedBatch:
    """A prompt tree: a trunk of `widths[0]` tokens, `fan` branches into each further level, then completions.

    Args:
        widths: tokens of each shared level.
        leaves: tokens of each completion below one branch.
    """
    rng = random.Random(0)
    paths = [_ids(rng, widths[0], vocabulary)]
    for width in widths[1:]:
        paths = [path + own for path in paths for own in _siblings(rng, [width] * fan, vocabulary)]
    return RaggedBatch.from_sequences(
        [path + own for path in paths for own in _siblings(rng, leaves, vocabulary)]
    )


def prompt_keys(batch: RaggedBatch, prompt: int) -> Tensor:
    """[B] int64, equal for sequences whose first `prompt` tokens are equal."""
    rows = batch.input_ids.split(batch.lengths.tolist())
    prompts = [tuple(row[:prompt].tolist()) for row in rows]
    number = {tokens: index for index, tokens in enumerate(dict.fromkeys(prompts))}
    return torch.tensor([number[tokens] for tokens in prompts])


def _batches(vocabulary: int, quick: bool) -> dict[str, tuple[RaggedBatch, int]]:
    """{level: (batch, prompt tokens)}, of equal size.

    Three levels: a system prompt, four questions, four answers to each.
    """
    shrink = 8 if quick else 1
    one = tree_batch([512 // shrink], [64 // shrink] * 16, vocabulary)
    three = tree_batch([256 // shrink, 256 // shrink], [64 // shrink] * 4, vocabulary)
    return {"one_level": (one, 512 // shrink), "three_levels": (three, 512 // shrink)}


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


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def _siblings(rng: random.Random, lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Token lists of the given lengths with different first tokens."""
    firsts = rng.sample(range(vocabulary), len(lengths))
    return [
        [first, *_ids(rng, length - 1, vocabulary)] for first, length in zip(firsts, lengths, strict=True)
    ]


def _spread(ratio: Ratio) -> dict[str, float]:
    return {"median": ratio.median, "q20": ratio.q20, "q80": ratio.q80}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prefix_grouping.run", description=__doc__)
    parser.add_argument("--layers", type=int, default=4, choices=range(1, 5), help="of Qwen3-0.6B's width")
    parser.add_argument("--rounds", type=int, default=3, help="timed steps of each path")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
