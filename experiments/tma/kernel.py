"""The forward kernel of `kernels/trie_attention.py` with Q, K and V loaded through tensor descriptors.

Everything but these loads, and how the loop over key blocks is compiled, is the shipped kernel's. A descriptor's
loads are bulk copies by the tensor memory accelerator on sm_90; rows and columns past the end come as zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from radixmlp.kernels.trie_attention import (
    HIDDEN,
    capped,
    is_visible,
    load_packed,
    packed_nodes,
    packed_pointers,
    store_rows,
)


@triton.jit
def _attend(
    total, weight, top, q, query, query_depth, k_tile, v_tile, block, subtree_end, depth, num_nodes, window, scale,
    cap_scale, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FULL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Take one key block's tiles into the running (sum of values [M, Dv], sum of weights [M], largest score [M])."""
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
            key_end = tl.load(subtree_end + key, mask=key < num_nodes, other=0)
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
    total = tl.dot(p.to(v_tile.dtype), v_tile, total * shrink[:, None], input_precision=PRECISION)
    return total, weight, new_top


@triton.jit(do_not_specialize=["num_nodes", "window", "num_heads"])
def trie_attention_forward_tma(
    queries, keys, values, out, lse, sinks, items, others, subtree_end, depth, num_nodes, window, scale, cap_scale,
    q_node_stride, q_head_stride, num_heads,
    GROUP: tl.constexpr, PACK: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PRECISION: tl.constexpr,
    DESCRIBE_Q: tl.constexpr, PREFETCH: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Grid (items, Hq / PACK). The result is that of `trie_attention_forward`.

    `keys`, `values`: descriptors of [N', Hkv, D] in blocks [BLOCK_N, 1, BLOCK_D]. `queries`: with DESCRIBE_Q one of
    [N', Hq, D] in blocks [BLOCK_M / PACK, PACK, BLOCK_D], else a pointer. PREFETCH reads the next visit's block
    number a visit ahead, as the shipped kernel does.
    """
    item = items + tl.program_id(0) * 5
    pack = tl.program_id(1)
    block, begin, middle, end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    node, real = packed_nodes(block, num_nodes, PACK, BLOCK_M)
    kv_head = pack // (GROUP // PACK)
    if DESCRIBE_Q:
        q_tile = queries.load([block * (BLOCK_M // PACK), pack * PACK, 0]).reshape(BLOCK_M, BLOCK_D)
    else:
        rows = packed_pointers(queries, block, pack, q_node_stride, q_head_stride, PACK, BLOCK_M)
        q_tile = load_packed(rows, real, D, BLOCK_D)
    query_depth = tl.load(depth + node, mask=real, other=0) if HAS_WINDOW else node

    total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if HAS_SINKS:
        sink = packed_pointers(sinks, block, pack, 0, 1, PACK, BLOCK_M)
        top = tl.load(sink, mask=real, other=0.0) * 1.4426950408889634
        weight = tl.full([BLOCK_M], 1.0, tl.float32)
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        weight = tl.zeros([BLOCK_M], tl.float32)
    for masked in tl.static_range(2):
        first, last = (middle, end) if masked else (begin, middle)
        next_block = tl.load(others + first)
        for i in tl.range(first, last, warp_specialize=WARP_SPECIALIZE):
            if PREFETCH:
                key_block = next_block
                next_block = tl.load(others + i + 1)
            else:
                key_block = tl.load(others + i)
            k_tile = keys.load([key_block * BLOCK_N, kv_head, 0]).reshape(BLOCK_N, BLOCK_D)
            v_tile = values.load([key_block * BLOCK_N, kv_head, 0]).reshape(BLOCK_N, BLOCK_DV)
            total, weight, top = _attend(
                total, weight, top, q_tile, node, query_depth, k_tile, v_tile, key_block, subtree_end, depth,
                num_nodes, window, scale, cap_scale, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, masked == 0, PRECISION,
            )  # fmt: skip

    result = (total / weight[:, None]).to(out.dtype.element_ty)
    rows = packed_pointers(out, block, pack, num_heads * DV, DV, PACK, BLOCK_M)
    store_rows(rows, result, real, DV, BLOCK_DV)
    tl.store(
        packed_pointers(lse, block, pack, num_heads, 1, PACK, BLOCK_M),
        (top + tl.log2(weight)) * 0.6931471805599453,
        mask=real,
    )
