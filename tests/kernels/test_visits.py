"""Visited blocks against the whole mask, and what they cost."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp import AttentionSpec, RaggedBatch, TriePlan, build_plan
from radixmlp.kernels.trie_attention import forward_flops
from radixmlp.kernels.visits import WHOLE, BlockLists, Visits, build_visits, visits_of, work_of

CPU = torch.device("cpu")
NOT_VISITED, MASKED, FULL = 0, 1, 2


def plan_of(sequences: list[list[int]]) -> TriePlan:
    return build_plan(RaggedBatch.from_sequences(sequences))


def shared_prefix(prefix: int, suffix: int, batch: int) -> TriePlan:
    return plan_of([[*range(prefix), *range(10_000 * b, 10_000 * b + suffix)] for b in range(1, batch + 1)])


def mask_of(plan: TriePlan, window: int | None) -> np.ndarray:
    """[N', N'] the visible pairs, by walking up from each node."""
    mask = np.zeros((plan.num_nodes, plan.num_nodes), bool)
    parent = plan.parent.tolist()
    for query in range(plan.num_nodes):
        key, left = query, window or plan.num_nodes
        while key >= 0 and left > 0:
            mask[query, key] = True
            key, left = parent[key], left - 1
    return mask


def kinds_of(lists: BlockLists, num_others: int) -> np.ndarray:
    """[blocks, others] which of NOT_VISITED, MASKED, FULL each pair is."""
    kinds = np.full((len(lists.middle), num_others), NOT_VISITED)
    for i, (begin, middle, end) in enumerate(
        zip(lists.begin[:-1], lists.middle, lists.begin[1:], strict=True)
    ):
        for kind, others in ((FULL, lists.others[begin:middle]), (MASKED, lists.others[middle:end])):
            assert (np.diff(others) > 0).all()
            assert (kinds[i, others] == NOT_VISITED).all()
            kinds[i, others] = kind
    return kinds


def expected_kinds(mask: np.ndarray, visits: Visits) -> np.ndarray:
    rows, columns = visits.block_queries, visits.block_keys
    blocks = [
        [mask[i : i + rows, j : j + columns] for j in range(0, len(mask), columns)]
        for i in range(0, len(mask), rows)
    ]
    return np.array(
        [
            [FULL if b.shape[1] == columns and b.all() else MASKED if b.any() else NOT_VISITED for b in row]
            for row in blocks
        ]
    ).reshape(-(-len(mask) // rows), -(-len(mask) // columns))


@settings(max_examples=60, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 2), max_size=60), min_size=1, max_size=20),
    block_queries=st.sampled_from([1, 3, 8, 18, 64]),
    block_keys=st.sampled_from([1, 4, 16, 64]),
    window=st.sampled_from([None, 1, 2, 7, 30]),
)
def test_visits_are_the_blocks_of_the_mask(
    sequences: list[list[int]], block_queries: int, block_keys: int, window: int | None
) -> None:
    plan = plan_of(sequences)
    visits = build_visits(plan, block_queries, block_keys, window)
    mask = mask_of(plan, window)
    expected = expected_kinds(mask, visits)
    kinds = kinds_of(visits.by_query, expected.shape[1])
    if window is None:
        assert (kinds == expected).all()
    else:  # a block within reach of one query alone may turn out to hold no visible pair
        assert (kinds[expected != NOT_VISITED] == expected[expected != NOT_VISITED]).all()
        assert (kinds[expected == NOT_VISITED] != FULL).all()
    assert (kinds_of(visits.by_key, expected.shape[0]) == kinds.T).all()
    assert visits.useful_pairs == mask.sum()


@pytest.mark.parametrize("fault", ["subtree too short", "wrong parent"])
def test_a_wrong_trie_shows(fault: str) -> None:
    plan = shared_prefix(20, 12, 3)
    mask = mask_of(plan, None)
    if fault == "wrong parent":
        plan.parent[40] = 8
    else:
        plan.subtree_end[:16] -= 1
    visits = build_visits(plan, 4, 8)
    kinds = kinds_of(visits.by_query, -(-plan.num_nodes // 8))
    assert not (kinds == expected_kinds(mask, visits)).all()


@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (14, 2), (32, 32), (64, 4)])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_most_flops_are_useful_at_the_paper_s_shape(heads: tuple[int, int], head_dim: int) -> None:
    """Prefix 2048, suffix 256, batch 32 on the tiles of the forward kernel; also at lengths no block divides."""
    for prefix, suffix in ((2048, 256), (2003, 251)):
        plan = shared_prefix(prefix, suffix, 32)
        useful, computed = forward_flops(
            plan, AttentionSpec(1.0), heads, (head_dim, head_dim), torch.bfloat16
        )
        pairs = prefix * (prefix + 1) // 2 + 32 * (suffix * prefix + suffix * (suffix + 1) // 2)
        assert useful == 4 * pairs * heads[0] * head_dim
        assert 0.85 <= useful / computed < 1


def test_padding_counts_as_computed() -> None:
    plan = shared_prefix(100, 20, 3)
    spec = AttentionSpec(1.0)
    wide, narrow = (forward_flops(plan, spec, (4, 4), (d, d), torch.bfloat16) for d in (128, 96))
    assert wide[1] == narrow[1]
    assert wide[0] * 3 == narrow[0] * 4


def test_time_and_space_follow_the_visits() -> None:
    """A chain of 60,000 nodes with 20,000 one-token branches: its N' x N' mask would take 6 GB."""
    plan = plan_of([list(range(60_000)), *([*range(30_000), 100_000 + b] for b in range(0, 20_000, 400))])
    plan.depth  # noqa: B018 (built here, so that it is not counted)
    build_visits(shared_prefix(4, 4, 2), 16, 64).by_key  # noqa: B018 (compiles)
    tracemalloc.start()
    visits = build_visits(plan, 16, 64)
    visits.by_key  # noqa: B018
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 16 * (len(visits.by_query.others) + plan.num_nodes)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12), longest=st.integers(1, 8)
)
def test_items_cover_every_visit_once(lengths: list[tuple[int, int]], longest: int) -> None:
    full, masked = (np.array([x[i] for x in lengths], np.int32) for i in (0, 1))
    begin = np.concatenate([[0], np.cumsum(full + masked)]).astype(np.int32)
    lists = BlockLists(begin, (begin[:-1] + full).astype(np.int32), np.arange(begin[-1], dtype=np.int32))
    work = work_of(lists, CPU, longest)
    items = work.items.tolist()
    assert [i[3] - i[1] for i in items] == sorted((i[3] - i[1] for i in items), reverse=True)
    assert all(i[3] - i[1] <= longest for i in items)
    visited = [(i[0], v, v < i[2]) for i in items for v in range(i[1], i[3])]
    assert sorted(visited) == [
        (b, v, v < lists.middle[b]) for b in range(len(lengths)) for v in range(begin[b], begin[b + 1])
    ]
    assert {i[0] for i in items} == set(range(len(lengths)))  # also blocks that nothing visits are written
    by_slot = {i[4]: i[0] for i in items if i[4] != WHOLE}
    assert sorted(by_slot) == list(range(work.num_slots))
    assert [by_slot[s] for b, first, last in work.split.tolist() for s in range(first, last)] == [
        b for b, first, last in work.split.tolist() for _ in range(first, last)
    ]
    assert sum(last - first for _, first, last in work.split.tolist()) == work.num_slots


def test_lists_are_built_once_and_start_at_16_bytes() -> None:
    plan = shared_prefix(100, 9, 5)
    assert visits_of(plan, 8, 16) is visits_of(plan, 8, 16)
    assert visits_of(plan, 8, 16, window=10_000) is visits_of(plan, 8, 16)  # it reaches past the deepest node
    assert visits_of(plan, 8, 16, window=30) is not visits_of(plan, 8, 16)
    work = work_of(visits_of(plan, 8, 16).by_key, CPU, 2)
    assert all(x.data_ptr() % 16 == work.items.data_ptr() % 16 for x in (work.others, work.split))


def test_the_empty_trie_visits_nothing() -> None:
    visits = build_visits(plan_of([[]]), 8, 16)
    assert (visits.visited_pairs, visits.useful_pairs, visits.useful_share) == (0, 0, 1.0)
    assert len(work_of(visits.by_key, CPU).items) == 0


def test_bad_input_is_refused() -> None:
    batch = RaggedBatch.from_sequences([[1, 2], [1, 3]])
    with pytest.raises(ValueError, match="depth-first"):
        build_visits(build_plan(batch, order="input"), 8, 16)
    with pytest.raises(ValueError, match="at least 1 row"):
        build_visits(build_plan(batch), 0, 16)
    with pytest.raises(ValueError, match="at least 1"):
        build_visits(build_plan(batch), 8, 16, window=0)
