"""Cascade attention (Hydragen, arXiv 2402.05099; FlashInfer's cascade), one level a depth, against the trie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp import AttentionBackend, AttentionSpec, RaggedBatch, TriePlan
from radixmlp.optimized.attention import get_attention
from radixmlp.optimized.attention.schedule import build_schedule
from radixmlp.verify.experiments.result import table
from radixmlp.verify.ideal import visible_pairs
from radixmlp.verify.timing import time_interleaved

from .batches import batches
from .levels import Cascade, cascade_schedule, counts

QUESTION = "does splitting the softmax level by level, merged by log-sum-exp, beat the trie's own schedule?"
RIVALS = ("trie-sdpa", "scatter-sdpa")
SPREAD = ("median", "q20", "q80")


def backends() -> Sequence[AttentionBackend]:
    """Every level a part of its own, and Hydragen's single split."""
    return [Cascade("cascade"), Cascade("cascade-1", levels=1)]


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Count every schedule, and time one layer's attention alone, forward and with backward."""
    heads, width, dtype = ((4, 2), 16, torch.float32) if quick else ((16, 8), 128, torch.bfloat16)
    found = []
    for name, batch in batches(quick).items():
        progress(name)
        plan = radixmlp.build_plan(batch)
        found.append(
            {
                "batch": name,
                "tokens": plan.num_tokens,
                "rows": plan.num_nodes,
                "visible_pairs": visible_pairs(plan.depth),
                "counts": {
                    "cascade": counts(cascade_schedule(plan)),
                    "cascade-1": counts(cascade_schedule(plan, 1)),
                    "trie-sdpa": counts(build_schedule(plan)),
                },
                "times": _times(batch, heads, width, dtype, 2 if quick else 7, progress),
            }
        )
    shape = {"heads": list(heads), "head_dim": width, "dtype": str(dtype).removeprefix("torch.")}
    return {"shape": shape, "batches": found}


def report(measured: dict[str, Any]) -> str:
    """Tables of counts and of times."""
    shape = measured["shape"]
    q_heads, kv_heads = shape["heads"]
    lines = [
        "## Counted",
        "",
        "Pairs are what is multiplied over what is visible (1: nothing wasted); K rows are what is read over N'; "
        "merged rows are partial results weighted again, over N'.",
        "",
    ]
    rows = [
        [
            each["batch"],
            each["tokens"],
            each["rows"],
            f"`{name}`",
            count["calls"],
            count["pairs"] / each["visible_pairs"],
            count["key_rows"] / each["rows"],
            count["merged_rows"] / each["rows"],
            count["most_merges_of_a_row"],
        ]
        for each in measured["batches"]
        for name, count in each["counts"].items()
    ]
    headings = ["batch", "N", "N'", "schedule", "calls", "pairs", "K rows", "merged rows", "most merges"]
    lines += table(headings, rows)
    lines += [
        "## One layer's attention alone",
        "",
        f"{q_heads} query and {kv_heads} KV heads of {shape['head_dim']}, {shape['dtype']}; the schedule is built "
        "before. How many times faster the named one is than the rival, median of paired rounds (20–80%).",
        "",
    ]
    rows = [
        [
            each["batch"],
            what,
            f"`{name}`",
            row["seconds"] * 1e3,
            row["rounds"],
            *("{median:.3g} ({q20:.3g}–{q80:.3g})".format(**row[f"over {rival}"]) for rival in RIVALS),
        ]
        for each in measured["batches"]
        for what, group in each["times"].items()
        for name, row in group.items()
    ]
    headings = ["batch", "pass", "backend", "ms", "rounds", *(f"over {rival}" for rival in RIVALS)]
    return "\n".join(lines + table(headings, rows))


def _times(
    batch: RaggedBatch,
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    rounds: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    plan = radixmlp.build_plan(batch)
    random = torch.Generator().manual_seed(0)
    shapes = [(plan.num_nodes, n, width) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (torch.randn(shape, generator=random).to(dtype).requires_grad_() for shape in shapes)
    spec = AttentionSpec(width**-0.5)
    contenders = [*backends(), *(get_attention(name) for name in RIVALS)]
    found = {}
    for what, run in (("forward", _forward), ("forward and backward", _both)):
        calls = {each.name: partial(run, each, (q, k, v), plan, spec) for each in contenders}
        timings = time_interleaved(calls, rounds, progress=progress)
        found[what] = {
            name: {
                "seconds": timings.median(name),
                "rounds": timings.rounds,
                **{
                    f"over {rival}": {key: getattr(timings.ratio(rival, name), key) for key in SPREAD}
                    for rival in RIVALS
                },
            }
            for name in calls
        }
    return found


def _forward(
    backend: AttentionBackend, qkv: tuple[Tensor, Tensor, Tensor], plan: TriePlan, spec: AttentionSpec
) -> Tensor:
    with torch.no_grad():
        return backend(*qkv, plan, spec)


def _both(
    backend: AttentionBackend, qkv: tuple[Tensor, Tensor, Tensor], plan: TriePlan, spec: AttentionSpec
) -> tuple[Tensor, ...]:
    out = backend(*qkv, plan, spec)
    return torch.autograd.grad(out, qkv, torch.ones_like(out))
