"""Attention inside the compact layout, backward: what launches `trie_attention_gradients.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.trie_attention_gradients import add_parts, trie_attention_dkv, trie_attention_dq
from radixmlp.kernels.trie_launch import (
    aligned,
    check_inputs,
    config_name,
    configuration,
    flags,
    key_work,
    query_work,
    shape_constants,
    shared_arguments,
    shipped_kinds,
)
from radixmlp.kernels.trie_tiles import HEAD_DIMS, Tile, architecture, dkv_tile, dq_tile, padded
from radixmlp.reference import AttentionSpec, TriePlan

_ADDED_ROWS = 16  # of one program of `add_parts`


def trie_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    plan: TriePlan,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of `trie_attention`; the same bits at every call.

    Args:
        grad: [N', Hq, Dv], of out.
        q, k, v, plan, spec: as they were given to `trie_attention`.
        out, lse: what it returned.

    Returns:
        dq [N', Hq, D], dk [N', Hkv, D] and dv [N', Hkv, Dv] in the dtype of q, and dsinks [Hq] in that of the
        sinks (None without them).

    Raises:
        ValueError: as `trie_attention`.
    """
    check_inputs(q, k, v, plan, spec)
    q, k, v = aligned(q), aligned(k), aligned(v)
    grad, out = grad.to(q.dtype).contiguous(), out.contiguous()
    delta = torch.empty_like(lse)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if q.shape[0]:
        arguments = shared_arguments(q, k, v, plan, spec)
        arguments |= {"grad": grad, "lse": lse, "delta": delta, "softmax_scale": spec.softmax_scale}
        with torch.cuda.device_of(q):
            _launch_dq(arguments, out, dq, plan, spec.sliding_window)
            _launch_dkv(arguments, dk, dv, plan, spec.sliding_window)
    if spec.sinks is None:
        return dq, dk, dv, None
    dsinks = -(torch.exp(spec.sinks.to(lse) - lse) * delta).sum(0)
    return dq, dk, dv, dsinks.to(spec.sinks)


def _launch_dq(
    arguments: dict[str, Any], out: Tensor, dq: Tensor, plan: TriePlan, window: int | None
) -> None:
    """Writes dq and delta."""
    tile = dq_tile(arguments["D"], arguments["DV"], dq.dtype, architecture(dq.device))
    work = query_work(plan, tile, arguments["PACK"], window, dq.device)
    trie_attention_dq[(len(work.items), dq.shape[1] // arguments["PACK"])](
        **arguments,
        **tile.constants,
        **tile.options,
        out=out,
        dq=dq,
        items=work.items,
        others=work.others,
    )


def _launch_dkv(
    arguments: dict[str, Any], dk: Tensor, dv: Tensor, plan: TriePlan, window: int | None
) -> None:
    """Reads delta, writes dk and dv."""
    tile = dkv_tile(
        arguments["D"], arguments["DV"], dk.dtype, arguments["HAS_SOFTCAP"], architecture(dk.device)
    )
    kv_heads = dk.shape[1]
    work = key_work(plan, tile, arguments["PACK"], kv_heads, window, dk.device)
    parts = [
        torch.empty(work.num_slots, kv_heads, tile.keys, x.shape[2], dtype=torch.float32, device=x.device)
        for x in (dk, dv)
    ]
    for wanted in _dkv_passes(arguments["D"]):
        trie_attention_dkv[(len(work.items), kv_heads)](
            **arguments,
            **wanted,
            **tile.constants,
            **tile.options,
            dk=dk,
            dv=dv,
            dk_parts=parts[0],
            dv_parts=parts[1],
            items=work.items,
            others=work.others,
        )
    if work.num_slots == 0:
        return
    for target, part in zip((dk, dv), parts, strict=True):
        add_parts[(len(work.split), kv_heads, tile.keys // _ADDED_ROWS)](
            target,
            part,
            work.split,
            dk.shape[0],
            WIDTH=target.shape[2],
            PADDED=padded(target.shape[2]),
            BLOCK_N=tile.keys,
            ROWS=_ADDED_ROWS,
            num_warps=4,
            num_stages=3,
        )


def _dkv_passes(head_dim: int) -> tuple[dict[str, bool], ...]:
    """What the launches of `trie_attention_dkv` compute: wide heads have no registers for both sums at once."""
    if padded(head_dim) <= 128:
        return ({"WANT_DK": True, "WANT_DV": True},)
    return {"WANT_DK": True, "WANT_DV": False}, {"WANT_DK": False, "WANT_DV": True}


def configurations(arch: str) -> list[KernelConfig]:
    """The backward kernels of `shipped_kinds`, with four heads to a tile."""
    configs = []
    for dtype, shape, extras in shipped_kinds():
        constants = {**shape_constants(*shape, 4, dtype), **flags(extras)}
        name = config_name("trie_attention_dq", *shape, dtype, extras)
        tile = dq_tile(*shape, dtype, arch)
        configs.append(configuration(name, lambda: trie_attention_dq, dtype, tile, constants))
        for wanted in _dkv_passes(shape[0]):
            kernel = "trie_attention_" + "".join(x[-2:].lower() for x, want in wanted.items() if want)
            name = config_name(kernel, *shape, dtype, extras)
            tile = dkv_tile(*shape, dtype, "softcap" in extras, arch)
            configs.append(configuration(name, lambda: trie_attention_dkv, dtype, tile, constants | wanted))
    for width in sorted({width for shape in HEAD_DIMS for width in shape}):
        constants = {"WIDTH": width, "PADDED": padded(width), "ROWS": _ADDED_ROWS}
        config = configuration(
            f"add_parts d{width} bf16", lambda: add_parts, torch.bfloat16, Tile(16, 64, 4, 3), constants
        )
        configs.append(replace(config, kind="reduce"))
    return configs
