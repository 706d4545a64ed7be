"""A clock inside the layer: a registered backend that runs another one and adds up what it took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import radixmlp
from radixmlp.optimized.attention import get_attention, shares_prefixes
from radixmlp.reference import AttentionSpec, TriePlan

SUFFIX = ", clocked"


class Clocked:
    """The backend called `inner`, under another name, and the seconds its calls took.

    Its calls end when the work is done only where work is not queued: on a CPU.
    """

    def __init__(self, inner: str) -> None:
        self.inner = get_attention(inner)
        self.name = inner + SUFFIX
        self.shares_prefixes = shares_prefixes(self.inner)
        self.seconds = 0.0

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """What `inner` says; a reason of our own on a device that queues its work."""
        if device.type != "cpu":
            return f"the clock does not wait for {device}: it measures on a CPU"
        return self.inner.unsupported(spec, device, dtype, training)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        start = time.perf_counter()
        out = self.inner(q, k, v, plan, spec)
        self.seconds += time.perf_counter() - start
        return out


@contextmanager
def clocked(*names: str) -> Iterator[dict[str, Clocked]]:
    """Within the block each backend is registered a second time, with a clock; {its own name: the clock}."""
    clocks = {name: Clocked(name) for name in names}
    registered = []
    try:
        for clock in clocks.values():
            radixmlp.register_attention(clock)
            registered.append(clock.name)
        yield clocks
    finally:
        for name in registered:
            radixmlp.unregister_attention(name)
