"""Second half of the index builder: number the nodes and write the plan.

Each sequence is a matched prefix, whose nodes earlier sequences brought, and a tail of new nodes. The nodes
of a tail are consecutive in both orders: in order of first occurrence by definition, and depth-first because
a tail's next node is always older than whatever else hangs beside it. So a trie of N tokens is written as at
most B runs, and only the first node of a run has a parent other than the row before it.
"""

from __future__ import annotations

import numpy as np

from radixmlp.optimized._jit import Int, Int32Array, compiled


@compiled
def _fill(out: Int32Array, at: Int, count: Int, value: Int) -> None:
    for i in range(np.uint64(at), np.uint64(at + count)):
        out[i] = np.int32(value)


@compiled
def _fill_range(out: Int32Array, at: Int, count: Int, first: Int) -> None:
    offset = np.int32(first - at)
    for i in range(np.uint64(at), np.uint64(at + count)):
        out[i] = np.int32(i) + offset


@compiled
def _copy(out: Int32Array, at: Int, values: Int32Array, first: Int, count: Int) -> None:
    offset = np.uint64(first - at)
    for i in range(np.uint64(at), np.uint64(at + count)):
        out[i] = values[i + offset]


@compiled
def _deepest_first(matched: Int32Array, source: Int32Array, length: Int32Array) -> Int32Array:
    """The non-empty tails, such that those that hang from one tail come deepest first, then oldest first."""
    num_sequences = length.size - 1
    by_age = np.empty(num_sequences, np.int32)
    previous_depth = np.full(num_sequences + 1, np.iinfo(np.int32).max, np.int32)
    count = deepest = 0
    is_sorted = True
    for s in range(num_sequences):
        if length[s] > 0:
            by_age[count] = s
            count += 1
            depth = matched[s]
            is_sorted &= depth <= previous_depth[source[s]]
            previous_depth[source[s]] = depth
            deepest = max(deepest, depth)
    if is_sorted:
        return by_age[:count]
    # A counting sort: no depth exceeds half of the tokens, so that it is linear in them.
    ends = np.zeros(deepest + 2, np.int32)
    for i in range(count):
        ends[matched[by_age[i]]] += 1
    for depth in range(deepest, -1, -1):
        ends[depth] += ends[depth + 1]
    by_depth = np.empty(count, np.int32)
    for i in range(count - 1, -1, -1):
        depth = matched[by_age[i]]
        ends[depth] -= 1
        by_depth[ends[depth]] = by_age[i]
    return by_depth


@compiled
def _number_by_age(source: Int32Array, length: Int32Array, base: Int32Array, last: Int32Array) -> None:
    """Order of first occurrence: the tails one after the other."""
    num_sequences = length.size - 1
    total = 0
    for s in range(num_sequences):
        base[s] = total
        total += length[s]
        last[s] = total
    for s in range(num_sequences - 1, -1, -1):
        if length[s] > 0:
            last[source[s]] = max(last[source[s]], last[s])


@compiled
def _number_depth_first(
    source: Int32Array, length: Int32Array, by_depth: Int32Array, base: Int32Array, last: Int32Array
) -> None:
    """Depth-first: a tail, then the subtrees that hang from it, from its end back to its beginning."""
    num_sequences = length.size - 1
    size = length.copy()
    for s in range(num_sequences - 1, -1, -1):
        if length[s] > 0:
            size[source[s]] += size[s]
    taken = length.copy()  # rows below each tail's first row that already have a number
    for s in by_depth:
        base[s] = taken[source[s]]
        taken[source[s]] += size[s]
    for s in range(num_sequences):
        if length[s] > 0:
            base[s] += base[source[s]]
            last[s] = base[s] + size[s]


@compiled
def _write_subtree_ends(
    matched: Int32Array,
    source: Int32Array,
    length: Int32Array,
    by_depth: Int32Array,
    base: Int32Array,
    last: Int32Array,
    subtree_end: Int32Array,
) -> None:
    """Along a tail the subtree's end changes only where another tail hangs from it."""
    num_sequences = length.size - 1
    open_rows = length.copy()  # of each tail, from its first row
    end = base + length
    for s in by_depth:
        o = source[s]
        if o < num_sequences:
            above = matched[s] - matched[o]
            _fill(subtree_end, base[o] + above, open_rows[o] - above, end[o])
            open_rows[o] = above
            end[o] = max(end[o], last[s])
    for s in by_depth:
        _fill(subtree_end, base[s], open_rows[s], end[s])


@compiled
def write_plan(
    depth_first: bool,
    ids: Int32Array,
    id_shift: Int,
    positions: Int32Array,
    position_shift: Int,
    cu_seqlens: Int32Array,
    prefixes: Int32Array,
    scatter: Int32Array,
    gather: Int32Array,
    parent: Int32Array,
    subtree_end: Int32Array,
    compact_ids: Int32Array,
    compact_positions: Int32Array,
) -> None:
    """Write every field of a plan.

    Args:
        ids, positions, compact_ids, compact_positions: words of the [N] and [N'] values.
        prefixes: [2, B+1], `matched` and `source` of each sequence.
        scatter, gather, parent, subtree_end: [N], [N'], [N'], [N'], written, as `compact_*` are.
    """
    num_sequences = cu_seqlens.size - 1
    matched, source = prefixes[0], prefixes[1]
    length = np.zeros(num_sequences + 1, np.int32)
    base = np.zeros(num_sequences + 1, np.int32)
    last = np.zeros(num_sequences + 1, np.int32)
    for s in range(num_sequences):
        length[s] = cu_seqlens[s + 1] - cu_seqlens[s] - matched[s]
    by_depth = _deepest_first(matched, source, length)
    if depth_first:
        _number_depth_first(source, length, by_depth, base, last)
    else:
        _number_by_age(source, length, base, last)
    _write_subtree_ends(matched, source, length, by_depth, base, last, subtree_end)
    for s in range(num_sequences):
        row = cu_seqlens[s]
        shared = matched[s]
        if shared > 0:
            _copy(scatter, row, scatter, cu_seqlens[source[s]], shared)
        new = length[s]
        if new > 0:
            row += shared
            first = base[s]
            _fill_range(scatter, row, new, first)
            _fill_range(gather, first, new, row)
            _fill_range(parent, first, new, first - 1)
            parent[first] = scatter[row - 1] if shared > 0 else -1
            _copy(compact_ids, first << id_shift, ids, row << id_shift, new << id_shift)
            shift = position_shift
            _copy(compact_positions, first << shift, positions, row << shift, new << shift)
