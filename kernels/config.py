"""Every kernel configuration this package ships, as it is compiled ahead of time and judged.

A configuration is what a launch would specialise on: argument types, constexprs, warps and stages. Each module
that launches kernels lists its own in `configurations()`; `shipped()` is all of them. Attention takes other tiles
on other architectures.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_SAME_EVERYWHERE = ("row_copy", "segments", "rope_kernel")
_BY_ARCHITECTURE = ("trie_attention", "trie_attention_backward")


@dataclass(frozen=True)
class KernelConfig:
    """One kernel in one configuration.

    Args:
        name: unique, for people: "trie_attention_forward d128 bf16".
        kind: "copy" (must move 16 bytes an access), "matrix" (must use the tensor cores' warp-group
            instructions where the architecture has them), "reduce" (must move 16 bytes an access),
            "unaligned" (of tensors that 16-byte accesses cannot serve) or "scalar" (products that tensor cores
            cannot compute exactly): of the last two only spills and shared memory are judged.
        kernel: returns the `triton.JITFunction`.
        signature: argument name -> type, in the kernel's order: {"q_ptr": "*bf16", "BLOCK": "constexpr"}.
        constexprs: value of each constexpr argument.
        num_warps, num_stages: as the launch passes them.
        divisible_by_16: arguments that are multiples of 16 (pointers: of 16 bytes) in every launch of this
            configuration.
    """

    name: str
    kind: str
    kernel: Callable[[], Any]
    signature: dict[str, str]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] = ()


def shipped(arch: str) -> list[KernelConfig]:
    """All configurations as they are launched on `arch`, such as "sm_90", in the order of the modules.

    Raises:
        ModuleNotFoundError: Triton is not installed.
        ValueError: two configurations have one name.
    """
    configs: list[KernelConfig] = []
    for name in _SAME_EVERYWHERE:
        configs += importlib.import_module(f"radixmlp.kernels.{name}").configurations()
    for name in _BY_ARCHITECTURE:
        configs += importlib.import_module(f"radixmlp.kernels.{name}").configurations(arch)
    names = [config.name for config in configs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"two kernel configurations are called {twice[0]!r}: a name must tell them apart")
    return configs
