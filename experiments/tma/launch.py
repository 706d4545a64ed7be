"""Launching the descriptor kernel, and what it is compiled as."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from radixmlp import AttentionSpec, TriePlan
from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.trie_launch import (
    DTYPES,
    aligned,
    check_inputs,
    config_name,
    configuration,
    flags,
    query_work,
    shape_constants,
    shared_arguments,
)
from radixmlp.kernels.trie_tiles import Tile, architecture, forward_tile, padded

SPECIALISED_TILE = Tile(
    64, 64, 4, 2
)  # the only kind that the compiler splits into producer and consumer warps


@dataclass(frozen=True)
class Variant:
    """How the descriptor kernel is compiled.

    Args:
        name: for tables.
        tile: None: the shipped kernel's.
        describe_q: load Q through a descriptor too.
        prefetch: read the next visit's block number a visit ahead.
        specialise: ask for producer and consumer warps.
    """

    name: str
    tile: Tile | None = None
    describe_q: bool = True
    prefetch: bool = True
    specialise: bool = False

    @property
    def constants(self) -> dict[str, bool]:
        """The kernel's constexprs for it."""
        return {"DESCRIBE_Q": self.describe_q, "PREFETCH": self.prefetch, "WARP_SPECIALIZE": self.specialise}

    def tile_of(self, head_dim: int, value_dim: int, dtype: torch.dtype, softcap: bool, arch: str) -> Tile:
        """The tile for one shape."""
        return self.tile or forward_tile(head_dim, value_dim, dtype, softcap, arch)


PLAIN = Variant("descriptors")
SPECIALISED = Variant("descriptors, specialised warps", SPECIALISED_TILE, prefetch=False, specialise=True)


def descriptor_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec, variant: Variant = PLAIN
) -> tuple[Tensor, Tensor]:
    """As `kernels.trie_attention.trie_attention`, K and V (and Q) read through descriptors.

    Raises:
        ValueError: what the shipped kernel refuses, and groups of heads that do not pack into a power of two.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    from .kernel import trie_attention_forward_tma

    check_inputs(q, k, v, plan, spec)
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    arguments = shared_arguments(q, k, v, plan, spec)
    for name in ("q", "k", "v", "k_node_stride", "k_head_stride", "v_node_stride", "v_head_stride"):
        del arguments[name]
    pack = arguments["PACK"]
    if pack & (pack - 1):
        raise ValueError(f"{pack} heads of a group share a tile: a descriptor's block needs a power of two")
    tile = variant.tile_of(q.shape[2], v.shape[2], q.dtype, spec.softcap is not None, architecture(q.device))
    work = query_work(plan, tile, pack, spec.sliding_window, q.device)
    blocks = {
        "queries": (q, [tile.block_queries(pack), pack, padded(q.shape[2])]),
        "keys": (k, [tile.keys, 1, padded(k.shape[2])]),
        "values": (v, [tile.keys, 1, padded(v.shape[2])]),
    }
    described: dict[str, Any] = {
        name: TensorDescriptor(x, list(x.shape), _strides(x), block) for name, (x, block) in blocks.items()
    }
    if not variant.describe_q:
        described["queries"] = q
    with torch.cuda.device_of(q):
        trie_attention_forward_tma[(len(work.items), q.shape[1] // pack)](
            **arguments,
            **described,
            **tile.constants,
            **tile.options,
            **variant.constants,
            out=out,
            lse=lse,
            sinks=lse if spec.sinks is None else spec.sinks.to(q.device, torch.float32),
            items=work.items,
            others=work.others,
        )
    return out, lse


def _strides(x: Tensor) -> list[int]:
    """Strides of [N', H, D] that a descriptor takes, also where a dimension has one entry and its stride is free."""
    heads = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return [x.stride(0) if x.shape[0] > 1 else x.shape[1] * heads, heads, 1]


def config_of(
    variant: Variant, shape: tuple[int, int], dtype: torch.dtype, extras: tuple[str, ...] = (), pack: int = 4
) -> KernelConfig:
    """What a launch on sm_90 specialises on, for heads (D, Dv) with `pack` heads to a tile."""

    def kernel() -> Any:
        from .kernel import trie_attention_forward_tma

        return trie_attention_forward_tma

    tile = variant.tile_of(*shape, dtype, "softcap" in extras, "sm_90")
    constants = {**shape_constants(*shape, pack, dtype), **flags(extras), **variant.constants}
    config = configuration(config_name(variant.name, *shape, dtype, extras), kernel, dtype, tile, constants)
    kind = DTYPES[dtype]
    blocks = {"keys": [tile.keys, 1, padded(shape[0])], "values": [tile.keys, 1, padded(shape[1])]}
    sixteenths = config.divisible_by_16
    signature = dict(config.signature)
    if variant.describe_q:
        blocks["queries"] = [tile.block_queries(pack), pack, padded(shape[0])]
    else:
        signature["queries"] = f"*{kind}"
        sixteenths += ("queries",)
    for name, block in blocks.items():
        signature[name] = f"tensordesc<{kind}[{','.join(map(str, block))}]>"
    return replace(config, signature=signature, divisible_by_16=sixteenths)
