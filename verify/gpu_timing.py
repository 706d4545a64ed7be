"""Timing of single kernels: CUDA events around each call, a cold L2 cache, variants in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

from radixmlp.verify.timing import Call, Timings

# Written before each timed call: far more than any L2 holds, and long enough to hide the launch behind it.
FLUSH_BYTES = 1 << 30


def time_kernels(calls: Mapping[str, Call], rounds: int, device: torch.device, warmup: int = 2) -> Timings:
    """Seconds on the device of each call, one of each a round, in rotating order.

    On a CPU (a dry run) it is the wall clock, and no cache is flushed.

    Args:
        calls: name -> callable; its result is dropped.
        rounds: timed rounds, at least 1.
        warmup: untimed rounds before them.
    """
    names = list(calls)
    for _ in range(warmup):
        for name in names:
            calls[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    time_once = _events(device) if device.type == "cuda" else _wall_clock
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(time_once(calls[name]))
    return Timings(seconds)


def gemm_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a `size` x `size` x `size` matrix product, the median of 20: what the device reaches at best."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    timings = time_kernels({"gemm": lambda: torch.mm(a, b, out=out)}, 20, device, warmup=5)
    return 2.0 * size**3 / timings.median("gemm")


def _events(device: torch.device) -> Callable[[Call], float]:
    flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def time_once(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        flushed.zero_()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(end) / 1e3

    return time_once


def _wall_clock(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
