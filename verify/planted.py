"""Attention that is wrong on purpose: a check that stays green over it checks nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

import radixmlp
from radixmlp.optimized.attention import shares_prefixes
from radixmlp.reference import AttentionSpec, TriePlan

Fault = Literal["none", "future", "branch", "window"]
FAULTS: tuple[Fault, ...] = ("future", "branch", "window")


class WideMask:
    """Attention over an explicit [N', N'] mask, one key too wide where asked.

    Args:
        name: the backend it stands in for.
        fault: "none" is right; "future": a row also sees the next one; "branch": a row also sees keys whose
            subtree ended with the row before; "window": sliding windows are one token longer.
    """

    def __init__(self, name: str, fault: Fault = "none") -> None:
        self.name, self.fault = name, fault
        self.windowed = False  # whether some window was shorter than some path

    def unsupported(self, *_: object) -> str | None:
        """None: it serves everything."""
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * spec.softmax_scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~self._seen(plan, spec.sliding_window), -torch.inf)
        if spec.sinks is not None:
            scores = torch.cat([scores, spec.sinks[:, None, None].expand(-1, len(q), 1).to(scores.dtype)], -1)
        weights = scores.softmax(-1)[..., : len(k)].to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)).contiguous()

    def _seen(self, plan: TriePlan, window: int | None) -> Tensor:
        """[N', N'] bool, queries by keys."""
        rows = torch.arange(plan.num_nodes, device=plan.gather.device)
        seen = (rows <= rows[:, None] + (self.fault == "future")) & (
            rows[:, None] < plan.subtree_end + (self.fault == "branch")
        )
        if window is not None:
            distance = plan.depth[:, None] - plan.depth
            self.windowed |= bool((distance >= window).any())
            seen &= distance < window + (self.fault == "window")
        return seen


@contextmanager
def planted(fault: Fault) -> Iterator[list[WideMask]]:
    """Have every registered backend that runs on the trie replaced by a `WideMask` for the time of the block."""
    before = radixmlp.attention_backends()
    after = {
        name: WideMask(name, fault) if shares_prefixes(backend) else backend
        for name, backend in before.items()
    }
    _register_all(after)
    try:
        yield [backend for backend in after.values() if isinstance(backend, WideMask)]
    finally:
        _register_all(before)


def _register_all(backends: dict[str, radixmlp.AttentionBackend]) -> None:
    for name in radixmlp.attention_backends():
        radixmlp.unregister_attention(name)
    for backend in backends.values():
        radixmlp.register_attention(backend)
