"""What the launches of the trie's attention kernels share. Importing this imports no Triton.

Nothing here depends on a batch but N' and the work items, so that no batch is compiled for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.trie_tiles import HEAD_DIMS, Tile, padded, unsupported_heads
from radixmlp.kernels.visits import NO_WINDOW, Work, visits_of, work_of
from radixmlp.reference import AttentionSpec, TriePlan

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# What layers ask for besides plain attention; the last kind needs the most registers.
EXTRAS = ((), ("window", "sinks"), ("window", "softcap", "sinks"))
MOST_PACKED = 16
# Key blocks are split into about this many programs, twice what a large GPU runs at a time, but into parts of no
# fewer visits than make up for a part's sum being written and read once more.
PROGRAMS = 256
SHORTEST_PART = 16
LOG2E = 1.4426950408889634

_POINTERS = {
    **dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv", "target"), "model"),
    **dict.fromkeys(("lse", "delta", "sinks", "dk_parts", "dv_parts", "parts"), "*fp32"),
    **dict.fromkeys(("items", "others", "split", "subtree_end", "depth"), "*i32"),
}
_FLOATS = ("scale", "cap_scale", "softmax_scale")


def packed_heads(group: int) -> int:
    """Heads of a group in one tile: all of them up to `MOST_PACKED`, else its largest divisor up to that."""
    return max(n for n in range(1, MOST_PACKED + 1) if group % n == 0)


def unsupported_spec(spec: AttentionSpec) -> str | None:
    """Why the kernels do not compute such an attention, or None."""
    if not 0 < spec.softmax_scale < float("inf"):
        return f"softmax_scale is {spec.softmax_scale}: the kernels need a positive number"
    if spec.softcap is not None and not 0 < spec.softcap < float("inf"):
        return f"softcap is {spec.softcap}: expected a positive number (or None)"
    if spec.sliding_window is not None and spec.sliding_window < 1:
        return f"sliding_window is {spec.sliding_window}: a query sees itself, so at least 1 (or None)"
    return None


def check_inputs(q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> None:
    """Raise ValueError for what the kernels would compute wrongly or do not serve."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.shape[0] != plan.num_nodes:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}: expected [{plan.num_nodes}, heads, head_dim]"
            )
        if x.dtype not in DTYPES or x.dtype is not q.dtype or x.device != q.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}, q {q.dtype} on {q.device}: q, k and v need one device and one "
                f"of {', '.join(map(str, DTYPES))}"
            )
    heads, kv_heads = q.shape[1], k.shape[1]
    if v.shape[1] != kv_heads or kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q, k, v have {heads}, {kv_heads}, {v.shape[1]} heads: k and v need equally many, q a multiple of that"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has head_dim {q.shape[2]}, but k has {k.shape[2]}")
    reason = unsupported_heads(q.shape[2], v.shape[2], q.dtype) or unsupported_spec(spec)
    if reason is not None:
        raise ValueError(reason)
    if spec.sinks is not None and spec.sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {tuple(spec.sinks.shape)}: expected one per query head, {heads}")


def aligned(x: Tensor) -> Tensor:
    """x [N', H, D], copied unless its rows can be read in pieces of 16 bytes and 32 bits span all its heads."""
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    sixteenths = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in strides[:-1])
    if x.stride(-1) == 1 and sixteenths and x.shape[1] * x.stride(1) < 2**30 and x.stride(0) < 2**23:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def shared_arguments(q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> dict[str, Any]:
    """What every kernel over the trie takes, by argument name."""
    cap = spec.softcap
    asked = {"window": spec.sliding_window, "softcap": cap, "sinks": spec.sinks}
    extras = [extra for extra, value in asked.items() if value is not None]
    return {
        "q": q,
        "k": k,
        "v": v,
        "subtree_end": _column(plan, "subtree_end", q.device),
        "depth": _column(plan, "depth", q.device),
        "num_nodes": plan.num_nodes,
        "num_heads": q.shape[1],
        "window": NO_WINDOW if spec.sliding_window is None else min(spec.sliding_window, NO_WINDOW),
        "scale": (spec.softmax_scale if cap is None else cap) * LOG2E,
        "cap_scale": 0.0 if cap is None else spec.softmax_scale / cap,
        **_strides(q=q, k=k, v=v),
        **flags(extras),
        **shape_constants(q.shape[2], v.shape[2], q.shape[1] // k.shape[1], q.dtype),
    }


def flags(extras: Collection[str]) -> dict[str, bool]:
    """The constexprs of what a layer asks for: some of window, softcap, sinks."""
    return {f"HAS_{extra.upper()}": extra in extras for extra in ("window", "softcap", "sinks")}


def shape_constants(head_dim: int, value_dim: int, group: int, dtype: torch.dtype) -> dict[str, Any]:
    """The constexprs that follow from the model's shape."""
    return {
        "GROUP": group,
        "PACK": packed_heads(group),
        "D": head_dim,
        "DV": value_dim,
        "BLOCK_D": padded(head_dim),
        "BLOCK_DV": padded(value_dim),
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
    }


def _strides(**tensors: Tensor) -> dict[str, int]:
    strides = {}
    for name, x in tensors.items():
        # The stride of a dimension of size 1 may be anything; a fixed value keeps it from being compiled for.
        strides[f"{name}_node_stride"] = x.stride(0) if x.shape[0] > 1 else 16
        strides[f"{name}_head_stride"] = x.stride(1) if x.shape[1] > 1 else 16
    return strides


def _column(plan: TriePlan, name: str, device: torch.device) -> Tensor:
    """A [N'] int32 tensor of the plan on `device`."""
    return once_a_plan(plan, ("column", name, device), lambda: getattr(plan, name).to(device))


def once_a_plan(plan: TriePlan, key: tuple[Any, ...], build: Callable[[], Any]) -> Any:
    """plan.memo[key], built on first use."""
    if key not in plan.memo:
        plan.memo[key] = build()
    return plan.memo[key]


def query_work(plan: TriePlan, tile: Tile, pack: int, window: int | None, device: torch.device) -> Work:
    """The items of a kernel whose programs own blocks of queries, on `device`, built once a plan."""
    sizes = (tile.block_queries(pack), tile.keys, window)
    return once_a_plan(
        plan, ("query work", *sizes, device), lambda: work_of(visits_of(plan, *sizes).by_query, device)
    )


def key_work(
    plan: TriePlan, tile: Tile, pack: int, kv_heads: int, window: int | None, device: torch.device
) -> Work:
    """The items of a kernel whose programs own blocks of keys of one KV head, on `device`, built once a plan.

    A block with more than its share of the visits is split, so that a prefix that all queries visit keeps more
    than a few multiprocessors busy.
    """
    sizes = (tile.block_queries(pack), tile.keys, window)

    def build() -> Work:
        lists = visits_of(plan, *sizes).by_key
        share = len(lists.others) * kv_heads // PROGRAMS
        return work_of(lists, device, longest=max(share, SHORTEST_PART))

    return once_a_plan(plan, ("key work", *sizes, kv_heads, device), build)


def shipped_kinds() -> list[tuple[torch.dtype, tuple[int, int], tuple[str, ...]]]:
    """(dtype, (D, Dv), extras) of the configurations to judge: all of bfloat16, the heaviest of the others."""
    return [
        (dtype, shape, extras)
        for dtype in DTYPES
        for shape in HEAD_DIMS
        if unsupported_heads(*shape, dtype) is None
        for extras in (EXTRAS if dtype is torch.bfloat16 else EXTRAS[-1:])
    ]


def config_name(
    kernel: str, head_dim: int, value_dim: int, dtype: torch.dtype, extras: Collection[str]
) -> str:
    """What a configuration is called."""
    width = f"d{head_dim}" if head_dim == value_dim else f"d{head_dim}v{value_dim}"
    return " ".join([kernel, width, DTYPES[dtype], *extras])


def configuration(
    name: str, kernel: Callable[[], Any], dtype: torch.dtype, tile: Tile, constants: dict[str, Any]
) -> KernelConfig:
    """A kernel as its launches specialise it: every pointer and stride is a multiple of 16."""
    constants = {**tile.constants, **constants}
    signature, sixteenths = {}, []
    for argument in kernel().arg_names:
        if argument in _POINTERS:
            kept = _POINTERS[argument]
            signature[argument] = f"*{DTYPES[dtype]}" if kept == "model" else kept
            sixteenths.append(argument)
        elif argument.isupper():
            signature[argument] = "constexpr"
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
            sixteenths += [argument] if argument.endswith("_stride") else []
    used = {argument: constants[argument] for argument, kept in signature.items() if kept == "constexpr"}
    kind = "scalar" if dtype is torch.float32 else "matrix"  # full fp32 products have no tensor cores
    return KernelConfig(
        name, kind, kernel, signature, used, **tile.options, divisible_by_16=tuple(sixteenths)
    )
