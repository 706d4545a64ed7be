"""First half of the index builder: which prefix of each sequence did an earlier sequence bring?

The sequences are inserted one by one into a path-compressed trie. An edge is a slice of ragged rows, so that
a sequence is compared with it by runs of tokens. Children are found in a hash table keyed by (edge, token,
position); an entry is only a candidate until the tokens themselves have been compared.

Edges 0 .. B-1 are leaf edges, each named by the sequence that created it; edges from B on are inner edges,
each made by splitting another edge. Only inner edges have children. So a sequence that runs past the end of a
leaf edge makes that edge longer, and a comb of ever longer sequences stays one edge.

Values come as 32-bit words with a shift, 0 for int32 and 1 for int64 (two words each), so that one compiled
kernel reads any mix of the two.

Numba counts references to arrays atomically, which costs more than a short sequence does, unless it can prove
the counts needless. It can where a helper has either loops or calls that pass arrays, not both, and uses
neither slices nor tuples of arrays; hence these helpers and their flat arguments.
"""

from __future__ import annotations

import numpy as np

from radixmlp.optimized._jit import Int, Int32Array, Int64Array, Uint64Array, compiled

BLOCK = 64  # words compared at once; LLVM does not vectorise a shorter block
TAG = np.uint64(0xFFFFFFFF00000000)  # of a table entry: upper half of the hash; the rest: edge + 1, 0 if free

SCATTER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio

# Columns of `edges`: the edge it hangs from (-1 - key at a root), the ragged rows that hold it, and the
# sequence that brought its last node.
ABOVE, START, LENGTH, OWNER = 0, 1, 2, 3
# Rows of `prefixes`.
MATCHED, SOURCE = 0, 1


@compiled
def _common_words(words: Int32Array, a: Int, b: Int, count: Int) -> Int:
    """How many of the `count` words from `a` and from `b` are equal before the first difference."""
    # Unsigned, so that Numba does not test each index for "counts from the end".
    left, right, end = np.uint64(a), np.uint64(b), np.uint64(a + count)
    block, one = np.uint64(BLOCK), np.uint64(1)
    while left + block <= end:
        difference = np.int32(0)
        for i in range(block):
            difference |= words[left + i] ^ words[right + i]
        if difference != 0:
            break
        left += block
        right += block
    while left < end and words[left] == words[right]:
        left += one
        right += one
    return np.int64(left) - a


@compiled
def _common_tokens(
    ids: Int32Array, id_shift: Int, positions: Int32Array, position_shift: Int, a: Int, b: Int, count: Int
) -> Int:
    """How many of the `count` (id, position) from rows `a` and `b` are equal before the first difference."""
    count = _common_words(ids, a << id_shift, b << id_shift, count << id_shift) >> id_shift
    shift = position_shift
    return _common_words(positions, a << shift, b << shift, count << shift) >> shift


@compiled
def _hash(multipliers: Uint64Array, above: Int, token: Int, position: Int) -> Int:
    """Hash of the child of edge `above` that begins with this token; its upper bits choose the slot."""
    code = (
        np.uint64(above) * multipliers[0]
        + np.uint64(token) * multipliers[1]
        + np.uint64(position) * multipliers[2]
    )
    return (code ^ (code >> np.uint64(32))) * SCATTER  # else consecutive ids may fall into few clusters


@compiled
def _edge(entry: Int) -> Int:
    return np.int64(entry & ~TAG) - 1


@compiled
def _next_candidate(edges: Int32Array, table: Uint64Array, above: Int, code: Int, slot: Int) -> Int:
    """The first slot from `slot` on that is free or holds a child of `above` with a hash like `code`."""
    entry = table[slot]
    while entry != 0 and ((entry ^ code) & TAG != 0 or edges[_edge(entry), ABOVE] != above):
        slot = (slot + 1) & (table.size - 1)
        entry = table[slot]
    return slot


@compiled
def _put(table: Uint64Array, code: Int, slot: Int, edge: Int) -> Int:
    """Store an edge in the first free slot from `slot` on, and return that."""
    while table[slot] != 0:
        slot = (slot + 1) & (table.size - 1)
    table[slot] = (code & TAG) | np.uint64(edge + 1)
    return slot


@compiled
def _set_edge(edges: Int32Array, edge: Int, above: Int, start: Int, length: Int, owner: Int) -> None:
    edges[edge, ABOVE] = above
    edges[edge, START] = start
    edges[edge, LENGTH] = length
    edges[edge, OWNER] = owner


@compiled
def _owner_at(prefixes: Int32Array, owner: Int, depth: Int) -> tuple[Int, Int]:
    """The sequence that brought the last of the first `depth` tokens of `owner`, and the steps to it.

    An edge made longer in place holds nodes that several sequences brought. A step passes a sequence at the
    depth of a split, where no later split can be: over a batch the steps stay below the number of tokens.
    """
    steps = 0
    while prefixes[MATCHED, owner] >= depth:
        owner = prefixes[SOURCE, owner]
        steps += 1
    return owner, steps


@compiled
def match_sequences(
    ids: Int32Array,
    id_shift: Int,
    positions: Int32Array,
    position_shift: Int,
    cu_seqlens: Int32Array,
    keys: Int64Array,
    multipliers: Uint64Array,
    prefixes: Int32Array,
    work: Int64Array,
) -> Int:
    """For each sequence the length of the prefix that earlier sequences brought, and one that starts with it.

    Args:
        ids, positions: words of the [N] values.
        keys: [B] numbers in 0 .. B-1, or empty where any two sequences may share.
        multipliers: [3] of the hash of (edge, token, position).
        prefixes: [2, B+1], written. Row 0, `matched`: the length. Row 1, `source`: an earlier sequence that
            starts with that prefix, B where the length is 0; for a sequence with more tokens than matched,
            the one that brought the prefix's last node. Column B stands for an empty sequence.
        work: [2], written: hash slots and owners looked at; tokens compared.

    Returns:
        The number of nodes, or -1 - s where `cu_seqlens` is wrong at sequence s.
    """
    num_sequences = cu_seqlens.size - 1
    bits = 2
    while (1 << bits) < 3 * num_sequences:
        bits += 1
    hash_shift = np.uint64(64 - bits)
    last_slot = (1 << bits) - 1
    table = np.zeros(1 << bits, np.uint64)
    edges = np.empty((2 * num_sequences, 4), np.int32)
    upper = num_sequences  # the next inner edge
    num_nodes = probes = compares = end = 0
    for s in range(num_sequences):
        row = at = cu_seqlens[s]
        if row != end or cu_seqlens[s + 1] < row or cu_seqlens[s + 1] > ids.size >> id_shift:
            return -1 - s
        end = cu_seqlens[s + 1]
        prefixes[SOURCE, s] = num_sequences
        above = -1 - (keys[s] if keys.size > 0 else 0)
        while at < end:
            code = _hash(multipliers, above, ids[at << id_shift], positions[at << position_shift])
            home = np.int64(code >> hash_shift)
            slot = _next_candidate(edges, table, above, code, home)
            run = 0
            while table[slot] != 0 and run == 0:
                edge = _edge(table[slot])
                start, length, owner = edges[edge, START], edges[edge, LENGTH], edges[edge, OWNER]
                longest = min(length, end - at)
                run = _common_tokens(ids, id_shift, positions, position_shift, start, at, longest)
                compares += min(run + 1, longest)
                if run == 0:
                    slot = _next_candidate(edges, table, above, code, (slot + 1) & last_slot)
            probes += ((slot - home) & last_slot) + 1
            if run == 0:
                _put(table, code, slot, s)
                _set_edge(edges, s, above, at, end - at, s)
                break
            at += run
            if at < end and run < length:
                # The lower part keeps its number, because its children are keyed by it.
                owner, steps = _owner_at(prefixes, owner, at - row)
                _set_edge(edges, upper, above, start, run, owner)
                table[slot] = (code & TAG) | np.uint64(upper + 1)
                start += run
                _set_edge(edges, edge, upper, start, length - run, edges[edge, OWNER])
                code = _hash(multipliers, upper, ids[start << id_shift], positions[start << position_shift])
                home = np.int64(code >> hash_shift)
                slot = _put(table, code, home, edge)
                probes += steps + ((slot - home) & last_slot) + 1
                edge = upper
                upper += 1
            prefixes[SOURCE, s] = owner
            if at < end and edge < num_sequences:
                _set_edge(edges, edge, above, at - run, run + end - at, s)
                break
            above = edge
        prefixes[MATCHED, s] = at - row
        num_nodes += end - at
    prefixes[MATCHED, num_sequences] = 0
    work[0] = probes
    work[1] = compares
    return num_nodes if end == ids.size >> id_shift else -max(num_sequences, 1)
