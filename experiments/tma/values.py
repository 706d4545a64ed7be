"""Values of the descriptor kernel in Triton's interpreter, against the reference in fp64."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from radixmlp import AttentionSpec, TriePlan
from radixmlp.verify.experiments.checks import attention_errors

from .launch import PLAIN, SPECIALISED, Variant, descriptor_attention

# Relative to max|truth|; float16: weights and result are rounded once each. As in the shipped kernel's tests.
LIMITS = {torch.float32: 1e-5, torch.float16: 2.0**-10}
TRIES = {
    "prefix and branches": [[*range(70), *range(1000 * b, 1000 * b + 20 + b)] for b in range(1, 4)],
    "comb": [[*range(n), 10_000 + n] for n in range(1, 30)],
    "chain of 129": [list(range(129))],
    "empty": [[]],
}
SPECS = {
    "plain": AttentionSpec(0.1),
    "window, softcap, sinks": AttentionSpec(0.1, 33, 3.0, torch.tensor([-2.0, 0.0, 1.0, 3.0])),
}
CASES = [("comb", 64, torch.float32), ("prefix and branches", 64, torch.float16)]
MORE_CASES = [
    ("chain of 129", 96, torch.float16),
    ("comb", 128, torch.float16),
    ("empty", 64, torch.float16),
]


class OnDescriptors:
    """The descriptor kernel as an attention backend, forward only."""

    def __init__(self, variant: Variant) -> None:
        self.name, self.variant = f"trie-{variant.name}", variant

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        return "the kernel has no backward here" if training else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        return descriptor_attention(q.detach(), k.detach(), v.detach(), plan, spec, self.variant)[0]


def checked(quick: bool) -> list[dict[str, Any]]:
    """The largest error of each case, and what it may be."""
    found = []
    for variant in (PLAIN, SPECIALISED):
        for trie, width, dtype in CASES if quick else CASES + MORE_CASES:
            for name, spec in SPECS.items():
                errors = attention_errors(
                    OnDescriptors(variant),
                    TRIES[trie],
                    spec,
                    heads=(4, 1),
                    widths=(width, width),
                    dtype=dtype,
                    gradients=False,
                )
                kind = str(dtype).removeprefix("torch.")
                labels = {"kernel": variant.name, "trie": trie, "spec": name, "heads": width, "dtype": kind}
                found.append({**labels, "error": errors["out"], "limit": LIMITS[dtype]})
    return found


def main() -> int:
    """For a process with the interpreter: print `checked` as JSON; `quick` is the last argument."""
    print(json.dumps(checked(sys.argv[-1] == "quick")))
    return 0
