"""Interleaved paired timing: one call of each variant per round, so that drift hits all of them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Call = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """How often `fast` fits into `slow`: the median of the per-round ratios and its 20/80 quantiles."""

    median: float
    q20: float
    q80: float


@dataclass(frozen=True)
class Timings:
    """Seconds per call, one list per variant; entry i of every list belongs to round i."""

    seconds: dict[str, list[float]]

    @property
    def rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def median(self, name: str) -> float:
        """Median seconds of one variant."""
        return statistics.median(self.seconds[name])

    def fastest(self, names: list[str]) -> str:
        """The variant with the smallest median."""
        return min(names, key=self.median)

    def ratio(self, slow: str, fast: str) -> Ratio:
        """Paired ratios seconds[slow] / seconds[fast]: above 1 where `fast` is the faster of the two."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        ratios = [a / b for a, b in pairs]
        return Ratio(statistics.median(ratios), quantile(ratios, 0.2), quantile(ratios, 0.8))

    def extended(self, more: Timings) -> Timings:
        """These rounds followed by those of a second run of the same variants."""
        if self.seconds.keys() != more.seconds.keys():
            raise ValueError(f"cannot pool timings of {sorted(self.seconds)} and {sorted(more.seconds)}")
        return Timings({name: [*rounds, *more.seconds[name]] for name, rounds in self.seconds.items()})


def time_interleaved(
    calls: Mapping[str, Call],
    rounds: int,
    warmup: int = 1,
    synchronize: Callable[[], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Timings:
    """Time named callables against each other in one process.

    Every round calls each variant once; round i starts with variant i mod n, so that no variant always runs
    in the cache and clock state another one left behind. Garbage is collected between rounds, not in a call.

    Args:
        calls: name -> callable without arguments; its result is dropped after the clock has stopped.
        rounds: timed rounds, at least 1.
        warmup: untimed rounds before them.
        synchronize: waits until the device is idle (`torch.cuda.synchronize`); called around each timed call.
        progress: told what is about to run.

    Raises:
        ValueError: there is nothing to time.
    """
    if not calls:
        raise ValueError("no variants to time: give at least one callable")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: time at least one round")
    names = list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.freeze()  # what exists by now is not searched again each round
    try:
        for index in range(-warmup, rounds):
            gc.collect()
            first = index % len(names)
            for name in names[first:] + names[:first]:
                if progress is not None:
                    stage = "warm-up" if index < 0 else f"round {index + 1}/{rounds}"
                    progress(f"{stage}: {name}")
                elapsed = _time_once(calls[name], synchronize)
                if index >= 0:
                    seconds[name].append(elapsed)
    finally:
        gc.unfreeze()
    return Timings(seconds)


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` (0..1) of the sorted values lie, with linear interpolation."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _time_once(call: Call, synchronize: Callable[[], None] | None) -> float:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if synchronize is not None:
            synchronize()
        start = time.perf_counter()
        result = call()
        if synchronize is not None:
            synchronize()
        elapsed = time.perf_counter() - start
        del result
        return elapsed
    finally:
        if was_enabled:
            gc.enable()
