"""The kernels of the backward pass, without atomics: every sum has a fixed order. Launched by
`trie_attention_backward.py`.

`trie_attention_dq` owns blocks of queries and goes through the forward's work items; on the way it writes
delta = sum(grad * out). `trie_attention_dkv` owns blocks of keys, goes through the queries that visit them and sums
over the heads of the group. A key block that far more queries visit than others, a shared prefix, is split into
parts, which `add_parts` adds up in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixmlp.kernels.trie_attention import (
    capped,
    is_visible,
    load_block,
    load_packed,
    packed_nodes,
    packed_pointers,
    store_rows,
)


@triton.jit
def _weights(s, top, scale, cap_scale, HAS_SOFTCAP: tl.constexpr):
    """Softmax weights of raw scores, and those times the slope of the cap; `top` is the log-sum-exp to base 2."""
    if HAS_SOFTCAP:
        s = capped(s, cap_scale)
    p = tl.exp2(s * scale - top)
    sloped = p
    if HAS_SOFTCAP:
        sloped = p - p * s * s
    return p, sloped


@triton.jit
def _add_dq(
    dq, q, grad, top, delta, query, query_depth, k, v, block, subtree_end, depth, num_nodes, window, scale, cap_scale,
    k_stride, v_stride, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq [M, D] plus what one key block adds to it, both without the softmax scale."""
    k_tile = load_block(k, block, num_nodes, k_stride, BLOCK_N, D, BLOCK_D, FULL)
    s = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    _, sloped = _weights(s, top[:, None], scale, cap_scale, HAS_SOFTCAP)
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
        sloped = tl.where(visible, sloped, 0.0)
    v_tile = load_block(v, block, num_nodes, v_stride, BLOCK_N, DV, BLOCK_DV, FULL)
    dp = tl.dot(grad, tl.trans(v_tile), input_precision=PRECISION)
    ds = sloped * (dp - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_nodes", "window", "num_heads"])
def trie_attention_dq(
    q, k, v, out, grad, lse, delta, dq, items, others, subtree_end, depth, num_nodes, window, scale, cap_scale,
    softmax_scale, q_node_stride, q_head_stride, k_node_stride, k_head_stride, v_node_stride, v_head_stride,
    num_heads, GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (items, Hq / PACK). dq, out, grad [N', Hq, .] contiguous; lse and delta [N', Hq] fp32."""
    item = items + tl.program_id(0) * 5
    pack = tl.program_id(1)
    block, begin, middle, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    node, real = packed_nodes(block, num_nodes, PACK, BLOCK_M)
    kv_head = (pack // (GROUP // PACK)).to(tl.int64)
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    grad_rows = packed_pointers(grad, block, pack, num_heads * DV, DV, PACK, BLOCK_M)
    out_rows = packed_pointers(out, block, pack, num_heads * DV, DV, PACK, BLOCK_M)
    q_rows = packed_pointers(q, block, pack, q_node_stride, q_head_stride, PACK, BLOCK_M)
    grad_tile = load_packed(grad_rows, real, DV, BLOCK_DV)
    out_tile = load_packed(out_rows, real, DV, BLOCK_DV)
    row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    tl.store(packed_pointers(delta, block, pack, num_heads, 1, PACK, BLOCK_M), row_delta, mask=real)
    q_tile = load_packed(q_rows, real, D, BLOCK_D)
    query_depth = tl.load(depth + node, mask=real, other=0) if HAS_WINDOW else node
    lse_rows = packed_pointers(lse, block, pack, num_heads, 1, PACK, BLOCK_M)
    top = tl.load(lse_rows, mask=real, other=float("inf")) * 1.4426950408889634

    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for masked in tl.static_range(2):
        first, last = (middle, end) if masked else (begin, middle)
        next_block = tl.load(others + first)  # a visit ahead, or the tiles' loads would wait for it
        for i in range(first, last):
            key_block = next_block
            next_block = tl.load(others + i + 1)
            total = _add_dq(
                total, q_tile, grad_tile, top, row_delta, node, query_depth, k, v, key_block, subtree_end,
                depth, num_nodes, window, scale, cap_scale, k_node_stride, v_node_stride, D, DV, BLOCK_D, BLOCK_DV,
                BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, masked == 0, PRECISION,
            )  # fmt: skip
    dq_rows = packed_pointers(dq, block, pack, num_heads * D, D, PACK, BLOCK_M)
    store_rows(dq_rows, (total * softmax_scale).to(dq.dtype.element_ty), real, D, BLOCK_D)


@triton.jit
def _add_dkv(
    dk, dv, k_tile, v_tile, key, key_end, key_depth, q, grad, lse, delta, block, pack, depth, num_nodes, num_heads,
    window, scale, cap_scale, q_node_stride, q_head_stride, PACK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """(dk [N, D], dv [N, Dv]) plus what one block of packed queries adds, dk without the softmax scale."""
    node, real = packed_nodes(block, num_nodes, PACK, BLOCK_M)
    q_rows = packed_pointers(q, block, pack, q_node_stride, q_head_stride, PACK, BLOCK_M)
    q_tile = load_packed(q_rows, real, D, BLOCK_D)
    lse_rows = packed_pointers(lse, block, pack, num_heads, 1, PACK, BLOCK_M)
    top = tl.load(lse_rows, mask=real, other=float("inf")) * 1.4426950408889634  # inf: weights of 0
    s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)  # [N, M]
    p, sloped = _weights(s, top[None, :], scale, cap_scale, HAS_SOFTCAP)
    if not FULL:
        query_depth = tl.load(depth + node, mask=real, other=0) if HAS_WINDOW else node
        visible = is_visible(
            node[None, :],
            query_depth[None, :],
            key[:, None],
            key_end[:, None],
            key_depth[:, None],
            window,
            HAS_WINDOW,
        )
        p = tl.where(visible, p, 0.0)
        sloped = tl.where(visible, sloped, 0.0)
    grad_rows = packed_pointers(grad, block, pack, num_heads * DV, DV, PACK, BLOCK_M)
    grad_tile = load_packed(grad_rows, real, DV, BLOCK_DV)
    if WANT_DV:
        dv = tl.dot(p.to(grad_tile.dtype), grad_tile, dv, input_precision=PRECISION)
    if WANT_DK:
        delta_rows = packed_pointers(delta, block, pack, num_heads, 1, PACK, BLOCK_M)
        row_delta = tl.load(delta_rows, mask=real, other=0.0)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        ds = sloped * (dp - row_delta[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["num_nodes", "window", "num_heads"])
def trie_attention_dkv(
    q, k, v, grad, lse, delta, dk, dv, dk_parts, dv_parts, items, others, subtree_end, depth, num_nodes, window,
    scale, cap_scale, softmax_scale, q_node_stride, q_head_stride, k_node_stride, k_head_stride,
    v_node_stride, v_head_stride, num_heads, GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (items, Hkv). dk [N', Hkv, D], dv [N', Hkv, Dv], grad [N', Hq, Dv] contiguous; parts fp32."""
    item = items + tl.program_id(0) * 5
    kv_head = tl.program_id(1)
    block, begin, middle, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    slot = tl.load(item + 4)
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    key_end = tl.load(subtree_end + key, mask=key < num_nodes, other=0)  # 0: visible to no query
    key_depth = tl.load(depth + key, mask=key < num_nodes, other=0) if HAS_WINDOW else key
    k += kv_head.to(tl.int64) * k_head_stride
    v += kv_head.to(tl.int64) * v_head_stride
    k_tile = load_block(k, block, num_nodes, k_node_stride, BLOCK_N, D, BLOCK_D, False)
    v_tile = load_block(v, block, num_nodes, v_node_stride, BLOCK_N, DV, BLOCK_DV, False)

    dk_tile = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    PACKS: tl.constexpr = GROUP // PACK
    for one in range(PACKS):
        pack = kv_head * PACKS + one
        for masked in tl.static_range(2):
            first, last = (middle, end) if masked else (begin, middle)
            next_block = tl.load(others + first)
            for i in range(first, last):
                query_block = next_block
                next_block = tl.load(others + i + 1)
                dk_tile, dv_tile = _add_dkv(
                    dk_tile, dv_tile, k_tile, v_tile, key, key_end, key_depth, q, grad, lse, delta,
                    query_block, pack, depth, num_nodes, num_heads, window, scale, cap_scale,
                    q_node_stride, q_head_stride, PACK, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, HAS_WINDOW, HAS_SOFTCAP,
                    WANT_DK, WANT_DV, masked == 0, PRECISION,
                )  # fmt: skip

    dk_tile *= softmax_scale
    kv_heads = tl.num_programs(1)
    if slot < 0:
        row = key.to(tl.int64) * kv_heads + kv_head
        if WANT_DK:
            store_rows(dk + row * D, dk_tile.to(dk.dtype.element_ty), key < num_nodes, D, BLOCK_D)
        if WANT_DV:
            store_rows(dv + row * DV, dv_tile.to(dv.dtype.element_ty), key < num_nodes, DV, BLOCK_DV)
    else:
        row = (slot.to(tl.int64) * kv_heads + kv_head) * BLOCK_N + tl.arange(0, BLOCK_N)
        if WANT_DK:
            store_rows(dk_parts + row * D, dk_tile, key < num_nodes, D, BLOCK_D)
        if WANT_DV:
            store_rows(dv_parts + row * DV, dv_tile, key < num_nodes, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["num_nodes"])
def add_parts(
    target,
    parts,
    split,
    num_nodes,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Grid (split blocks, Hkv, BLOCK_N / ROWS). parts [slots, Hkv, BLOCK_N, WIDTH] -> target [N', Hkv, WIDTH]."""
    of = split + tl.program_id(0) * 3
    block, first, last = tl.load(of), tl.load(of + 1), tl.load(of + 2)
    head, heads = tl.program_id(1), tl.num_programs(1)
    inner = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    key = block * BLOCK_N + inner
    column = tl.arange(0, PADDED)
    mask = (key < num_nodes)[:, None] & (column < WIDTH)[None, :]
    total = tl.zeros([ROWS, PADDED], tl.float32)
    row = (first.to(tl.int64) * heads + head) * BLOCK_N + inner
    tile = parts + row[:, None] * WIDTH + column[None, :]
    for _ in range(first, last):
        total += tl.load(tile, mask=mask, other=0.0)
        tile += heads * BLOCK_N * WIDTH
    row = key.to(tl.int64) * heads + head
    store_rows(target + row * WIDTH, total.to(target.dtype.element_ty), key < num_nodes, WIDTH, PADDED)
