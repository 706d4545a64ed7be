"""Attention inside the compact layout, forward: each node attends to its ancestors and itself.

A program takes a block of nodes with `PACK` heads of one group as the rows of its tile, row m being node m // PACK
and head m % PACK, so that those heads share every K/V tile. It goes through the key blocks listed in its work item
(`visits.py`), first the fully visible ones without a mask. Scores, softmax and sums are fp32; exponentials are of
base 2. Products of float32 inputs are not rounded to TF32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.trie_launch import (
    aligned,
    check_inputs,
    config_name,
    configuration,
    flags,
    packed_heads,
    query_work,
    shape_constants,
    shared_arguments,
    shipped_kinds,
)
from radixmlp.kernels.trie_tiles import architecture, forward_tile, padded
from radixmlp.kernels.visits import visits_of
from radixmlp.reference import AttentionSpec, TriePlan

# What hidden scores become. Finite, so that a row that has seen no key yet keeps finite differences: what it
# gathers until its first visible key is then scaled by exp2(HIDDEN - score) = 0. Every row sees itself.
HIDDEN = tl.constexpr(-1e30)


@triton.jit
def packed_nodes(block, num_nodes, PACK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(node, whether there is such a row), each [BLOCK_M], of a tile of packed query rows."""
    BLOCK_QUERIES: tl.constexpr = BLOCK_M // PACK
    m = tl.arange(0, BLOCK_M)
    node = block * BLOCK_QUERIES + m // PACK
    return node, (m < BLOCK_QUERIES * PACK) & (node < num_nodes)


@triton.jit
def packed_pointers(x, block, pack, node_stride, head_stride, PACK: tl.constexpr, BLOCK_M: tl.constexpr):
    """[BLOCK_M] pointers to x[node, head] of a tile's rows; within a tile, offsets fit 32 bits (`aligned`)."""
    first_node = (block * (BLOCK_M // PACK)).to(tl.int64)
    first_head = (pack * PACK).to(tl.int64)
    m = tl.arange(0, BLOCK_M)
    return (
        x
        + (first_node * node_stride + first_head * head_stride)
        + (m // PACK * node_stride + m % PACK * head_stride)
    )


@triton.jit
def load_packed(pointers, real, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The rows at `pointers` as a tile [BLOCK_M, PADDED], zeros where there is no such row or column."""
    column = tl.arange(0, PADDED)
    mask = real[:, None]
    if WIDTH != PADDED:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(pointers[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def load_block(
    x,
    block,
    num_nodes,
    node_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    FULL: tl.constexpr,
):
    """Rows of key block `block` of one head as a tile [BLOCK, PADDED]; a `FULL` block ends before num_nodes."""
    first = block * BLOCK
    row = tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    tile = x + first.to(tl.int64) * node_stride + (row[:, None] * node_stride + column[None, :])
    if FULL and WIDTH == PADDED:
        return tl.load(tile)
    mask = (column < WIDTH)[None, :]
    if not FULL:
        mask = mask & (first + row < num_nodes)[:, None]
    return tl.load(tile, mask=mask, other=0.0)


@triton.jit
def store_rows(pointers, tile, real, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write the rows of a tile [., PADDED] to `pointers`, WIDTH columns each."""
    column = tl.arange(0, PADDED)
    mask = real[:, None]
    if WIDTH != PADDED:
        mask = mask & (column < WIDTH)[None, :]
    tl.store(pointers[:, None] + column[None, :], tile, mask=mask)


@triton.jit
def capped(x, inner_scale):
    """tanh(x * inner_scale)."""
    t = tl.exp2(tl.abs(x) * (inner_scale * -2.8853900817779268))
    return tl.where(x < 0, t - 1.0, 1.0 - t) / (1.0 + t)


@triton.jit
def is_visible(query, query_depth, key, key_end, key_depth, window, HAS_WINDOW: tl.constexpr):
    """Query q sees key k iff k <= q < subtree_end[k] and the window reaches; shapes broadcast."""
    visible = (key <= query) & (query < key_end)
    if HAS_WINDOW:
        visible = visible & (query_depth - key_depth < window)
    return visible


@triton.jit
def _attend(
    total, weight, top, q, query, query_depth, k, v, block, subtree_end, depth, num_nodes, window, scale, cap_scale,
    k_stride, v_stride, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block into the running (sum of values [M, Dv], sum of weights [M], largest score [M])."""
    k_tile = load_block(k, block, num_nodes, k_stride, BLOCK_N, D, BLOCK_D, FULL)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    if HAS_SOFTCAP:
        s = capped(s, cap_scale) * scale
    if FULL and not HAS_SOFTCAP:
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
    else:
        if not HAS_SOFTCAP:
            s = s * scale
        if not FULL:
            key = block * BLOCK_N + tl.arange(0, BLOCK_N)
            key_end = tl.load(subtree_end + key, mask=key < num_nodes, other=0)  # 0: visible to no query
            key_depth = tl.load(depth + key, mask=key < num_nodes, other=0) if HAS_WINDOW else key
            visible = is_visible(
                query[:, None],
                query_depth[:, None],
                key[None, :],
                key_end[None, :],
                key_depth[None, :],
                window,
                HAS_WINDOW,
            )
            s = tl.where(visible, s, HIDDEN)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    weight = weight * shrink + tl.sum(p, 1)
    v_tile = load_block(v, block, num_nodes, v_stride, BLOCK_N, DV, BLOCK_DV, FULL)
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision=PRECISION)
    return total, weight, new_top


@triton.jit(do_not_specialize=["num_nodes", "window", "num_heads"])
def trie_attention_forward(
    q, k, v, out, lse, sinks, items, others, subtree_end, depth, num_nodes, window, scale, cap_scale,
    q_node_stride, q_head_stride, k_node_stride, k_head_stride, v_node_stride, v_head_stride,
    num_heads, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (items, Hq / PACK). out [N', Hq, Dv] contiguous, lse [N', Hq] fp32 natural logarithm, with the sinks."""
    item = items + tl.program_id(0) * 5
    pack = tl.program_id(1)
    block, begin, middle, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    node, real = packed_nodes(block, num_nodes, PACK, BLOCK_M)
    kv_head = (pack // (GROUP // PACK)).to(tl.int64)
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    q_tile = load_packed(
        packed_pointers(q, block, pack, q_node_stride, q_head_stride, PACK, BLOCK_M), real, D, BLOCK_D
    )
    query_depth = tl.load(depth + node, mask=real, other=0) if HAS_WINDOW else node

    total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if HAS_SINKS:  # one more key, whose value is zero
        sink = packed_pointers(sinks, block, pack, 0, 1, PACK, BLOCK_M)
        top = tl.load(sink, mask=real, other=0.0) * 1.4426950408889634
        weight = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
    for masked in tl.static_range(2):
        first, last = (middle, end) if masked else (begin, middle)
        next_block = tl.load(others + first)  # a visit ahead, or the tiles' loads would wait for it
        for i in range(first, last):
            key_block = next_block
            next_block = tl.load(others + i + 1)
            total, weight, top = _attend(
                total, weight, top, q_tile, node, query_depth, k, v, key_block, subtree_end, depth,
                num_nodes, window, scale, cap_scale, k_node_stride, v_node_stride, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
                HAS_WINDOW, HAS_SOFTCAP, masked == 0, PRECISION,
            )  # fmt: skip

    result = (total / weight[:, None]).to(out.dtype.element_ty)
    rows = packed_pointers(out, block, pack, num_heads * DV, DV, PACK, BLOCK_M)
    store_rows(rows, result, real, DV, BLOCK_DV)
    tl.store(
        packed_pointers(lse, block, pack, num_heads, 1, PACK, BLOCK_M),
        (top + tl.log2(weight)) * 0.6931471805599453,
        mask=real,
    )


def trie_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Attention of every node to its ancestors and itself.

    Args:
        q: [N', Hq, D] float32, float16 or bfloat16.
        k: [N', Hkv, D].
        v: [N', Hkv, Dv].
        plan: N' nodes in depth-first order.
        spec: dropout is not applied.

    Returns:
        out [N', Hq, Dv] in the dtype of q, and the natural log-sum-exp of each row [N', Hq] float32, sinks included.

    Raises:
        ValueError: inputs that do not fit together or that the kernels do not serve.
    """
    check_inputs(q, k, v, plan, spec)
    q, k, v = aligned(q), aligned(k), aligned(v)
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if q.shape[0] == 0:
        return out, lse
    arguments = shared_arguments(q, k, v, plan, spec)
    tile = forward_tile(q.shape[2], v.shape[2], q.dtype, spec.softcap is not None, architecture(q.device))
    work = query_work(plan, tile, arguments["PACK"], spec.sliding_window, q.device)
    with torch.cuda.device_of(q):
        trie_attention_forward[(len(work.items), q.shape[1] // arguments["PACK"])](
            **arguments,
            **tile.constants,
            **tile.options,
            out=out,
            lse=lse,
            sinks=lse if spec.sinks is None else spec.sinks.to(q.device, torch.float32),
            items=work.items,
            others=work.others,
        )
    return out, lse


def forward_flops(
    plan: TriePlan,
    spec: AttentionSpec,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
) -> tuple[int, int]:
    """FLOPs of QK^T and PV: (of the visible pairs, of the tiles the forward kernel multiplies on sm_90).

    Args:
        heads: (Hq, Hkv).
        widths: (D, Dv).
    """
    pack = packed_heads(heads[0] // heads[1])
    tile = forward_tile(*widths, dtype, spec.softcap is not None, "sm_90")
    visits = visits_of(plan, tile.block_queries(pack), tile.keys, spec.sliding_window)
    useful = 2 * visits.useful_pairs * heads[0] * sum(widths)
    tiles = len(visits.by_query.others) * (heads[0] // pack)
    return useful, 2 * tiles * tile.rows * tile.keys * sum(padded(width) for width in widths)


def configurations(arch: str) -> list[KernelConfig]:
    """The forward kernel of `shipped_kinds`, with four heads to a tile."""
    return [
        configuration(
            config_name("trie_attention_forward", *shape, dtype, extras),
            lambda: trie_attention_forward,
            dtype,
            forward_tile(*shape, dtype, "softcap" in extras, arch),
            {**shape_constants(*shape, 4, dtype), **flags(extras)},
        )
        for dtype, shape, extras in shipped_kinds()
    ]
