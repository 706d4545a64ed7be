"""The calibration of "this CPU": primitives are timed, never a pass that is to be predicted; nothing is fitted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .roofline_attention import Heads, chain_curve, merged_curve
from .roofline_batches import rerank_batches
from .roofline_cpu import ADD, COPY, GATE, NORM, ROPE
from .roofline_primitives import (
    Clock,
    elementwise_seconds,
    head_costs,
    layer_seconds,
    page_fault_seconds,
    product_costs,
)

FRESH_BYTES = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX on 64-bit machines

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """What is timed; the defaults are those of a real calibration.

    Args:
        product_rows: few rows and many.
        product_widths: (inputs, outputs) of weights.
        elements: of element-wise operations, from within the cache to beyond it; every tensor below `FRESH_BYTES`.
        heads: (query heads, KV heads, head size), two head sizes.
        chains: (tokens, sequences) of batches that share nothing.
        prefixes: (prefix, suffix, sequences) of batches that share one prefix.
        head: (vocabulary, hidden size) of the loss.
        repeats: timed calls of each.
    """

    product_rows: tuple[int, int] = (64, 1536)
    product_widths: tuple[tuple[int, int], ...] = ((1024, 3072), (3072, 1024), (1024, 1024), (4096, 3072))
    elements: tuple[int, ...] = (1 << 17, 1 << 20, 1 << 21, 1 << 22, 7 << 20)
    heads: tuple[Heads, ...] = ((9, 3, 64), (16, 8, 128))
    chains: tuple[tuple[int, int], ...] = ((32, 64), (64, 32), (128, 16), (576, 8), (2304, 2))
    prefixes: tuple[tuple[int, int, int], ...] = ((256, 64, 16), (512, 64, 16), (2048, 64, 8))
    head: tuple[int, int] = (32_000, 1024)
    repeats: int = 4


def calibrate(
    progress: Progress, sizes: Sizes | None = None, now: Callable[[], float] = time.perf_counter
) -> dict[str, Any]:
    """Measure this machine for `cpu_device`; belongs under "roofline" in a measurement's document.

    Args:
        progress: told what is about to be timed.
        sizes: smaller ones for a test.
        now: the clock.

    Returns:
        {"threads", "touch", "fresh_bytes", "dtypes": {"bfloat16": {"forward", "training"}, "float32": {"forward"}},
        "batches"}: the costs of `Pass` by dtype, and the counts of the bench's reranking batches.
    """
    sizes = sizes or Sizes()
    clock = Clock(sizes.repeats, now)
    progress("page faults")
    touch = page_fault_seconds(clock, 2 * FRESH_BYTES)
    dtypes: dict[str, dict[str, Any]] = {"bfloat16": {}, "float32": {}}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dtypes["bfloat16"]["forward"] = _pass("bfloat16", sizes, clock, False, progress)
        dtypes["bfloat16"]["training"] = _pass("bfloat16", sizes, clock, True, progress)
        dtypes["float32"]["forward"] = _pass("float32", sizes, clock, False, progress)
    return {
        "threads": torch.get_num_threads(),
        "touch": touch,
        "fresh_bytes": FRESH_BYTES,
        "dtypes": dtypes,
        "batches": rerank_batches(progress),
    }


def _pass(name: str, sizes: Sizes, clock: Clock, training: bool, progress: Progress) -> dict[str, Any]:
    dtype = getattr(torch, name)
    what = f"{name}, {'forward and backward' if training else 'forward'}"
    with torch.set_grad_enabled(training):
        progress(f"{what}: matrix products")
        products = product_costs(dtype, sizes.product_widths, *sizes.product_rows, clock, training)
        progress(f"{what}: element-wise operations")
        elementwise = {
            kind: [[n, elementwise_seconds(kind, n, dtype, clock, training)] for n in sizes.elements]
            for kind in (NORM, ROPE, GATE, ADD, COPY)
        }
        chain, merged = {}, {}
        for heads in sizes.heads:
            progress(f"{what}: attention, head size {heads[2]}")
            curve = chain_curve(heads, sizes.chains, dtype, clock, training)
            chain[str(heads[2])] = curve
            merged[str(heads[2])] = merged_curve(heads, sizes.prefixes, curve, dtype, clock, training)
        progress(f"{what}: calls and the head")
        costs: dict[str, Any] = {
            "products": products,
            "elementwise": elementwise,
            "chain": chain,
            "merged": merged,
        }
        costs["layer"] = layer_seconds(dtype, clock, training)
        if training:
            costs |= head_costs(dtype, *sizes.head, clock, products)
    return costs
