"""The dictionary trie against a brute-force listing of all prefixes."""

import dataclasses
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.reference.trie import build_plan, path_of, reconstruct

ORDERS = ("trie", "input")
EXAMPLE = [[1, 2, 3, 5], [1, 2, 4, 7], [1, 2, 3, 6]]


@st.composite
def batches(draw):
    """Few distinct values, so that prefixes collide; now and then positions and sharing keys of their own."""
    sequences = draw(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=7))
    positions = keys = None
    if draw(st.booleans()):
        positions = [draw(st.lists(st.integers(0, 1), min_size=len(s), max_size=len(s))) for s in sequences]
    if draw(st.booleans()):
        keys = [draw(st.integers(0, 1)) for _ in sequences]
    return RaggedBatch.from_sequences(sequences, positions, keys)


def prefixes(batch: RaggedBatch) -> list[tuple]:
    """For each ragged row everything that decides its value: key and (id, position) pairs up to itself."""
    result = []
    pairs = list(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
    keys = [0] * batch.num_sequences if batch.sharing_keys is None else batch.sharing_keys.tolist()
    for key, (start, end) in zip(keys, pairwise(batch.cu_seqlens.tolist()), strict=True):
        result += [(key, *pairs[start : row + 1]) for row in range(start, end)]
    return result


def paths_of_nodes(batch: RaggedBatch, plan: TriePlan) -> list[tuple]:
    """The prefix each compact row stands for, by brute force."""
    return [prefixes(batch)[row] for row in plan.gather.tolist()]


@pytest.mark.parametrize("order", ORDERS)
@given(batch=batches())
@settings(max_examples=150, deadline=None)
def test_rows_are_shared_exactly_where_prefixes_are_equal(order, batch):
    plan = build_plan(batch, order)
    rows = prefixes(batch)
    assert plan.num_nodes == len(set(rows))
    assert plan.num_tokens == len(rows)
    assert len(set(zip(rows, plan.scatter.tolist(), strict=True))) == plan.num_nodes  # one to one
    first_row = {}
    for row, node in enumerate(plan.scatter.tolist()):
        first_row.setdefault(node, row)
    assert plan.gather.tolist() == [first_row[node] for node in range(plan.num_nodes)]


@pytest.mark.parametrize("order", ORDERS)
@given(batch=batches())
@settings(max_examples=100, deadline=None)
def test_parent_is_the_prefix_one_shorter(order, batch):
    plan = build_plan(batch, order)
    paths = paths_of_nodes(batch, plan)
    for path, parent in zip(paths, plan.parent.tolist(), strict=True):
        assert (parent == -1) == (len(path) == 2)
        assert parent == -1 or paths[parent] == path[:-1]
    assert plan.depth.tolist() == [len(path) - 2 for path in paths]


@pytest.mark.parametrize("order", ORDERS)
@given(batch=batches())
@settings(max_examples=100, deadline=None)
def test_subtree_end_is_one_past_the_last_descendant(order, batch):
    plan = build_plan(batch, order)
    paths = paths_of_nodes(batch, plan)
    for node, path in enumerate(paths):
        below = [other for other, longer in enumerate(paths) if longer[: len(path)] == path]
        assert plan.subtree_end[node] == max(below) + 1
        if order == "trie":
            assert below == list(range(node, max(below) + 1))


@given(batch=batches())
@settings(max_examples=100, deadline=None)
def test_orders_number_as_they_say(batch):
    by_input = build_plan(batch, "input")
    assert by_input.gather.tolist() == sorted(by_input.gather.tolist())
    by_trie = build_plan(batch, "trie")
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(by_trie.parent.tolist()):
        children.setdefault(parent, []).append(int(by_trie.gather[node]))
    assert all(siblings == sorted(siblings) for siblings in children.values())


@pytest.mark.parametrize("order", ORDERS)
@given(batch=batches())
@settings(max_examples=100, deadline=None)
def test_sequences_come_back_out_of_the_trie(order, batch):
    plan = build_plan(batch, order)
    pairs = list(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
    assert reconstruct(plan) == [pairs[a:b] for a, b in pairwise(batch.cu_seqlens.tolist())]
    assert plan.input_ids[plan.scatter].tolist() == batch.input_ids.tolist()
    assert plan.position_ids[plan.scatter].tolist() == batch.position_ids.tolist()


def test_the_example_depth_first():
    plan = build_plan(RaggedBatch.from_sequences(EXAMPLE))
    assert plan.order == "trie"
    assert plan.input_ids.tolist() == [1, 2, 3, 5, 6, 4, 7]
    assert plan.gather.tolist() == [0, 1, 2, 3, 11, 6, 7]
    assert plan.scatter.tolist() == [0, 1, 2, 3, 0, 1, 5, 6, 0, 1, 2, 4]
    assert plan.parent.tolist() == [-1, 0, 1, 2, 2, 1, 5]
    assert plan.subtree_end.tolist() == [7, 7, 5, 4, 5, 7, 7]
    assert plan.position_ids.tolist() == plan.depth.tolist() == [0, 1, 2, 3, 3, 2, 3]
    assert path_of(plan, 4) == [0, 1, 2, 4]
    assert (plan.gamma, plan.compression_ratio) == (7 / 12, 12 / 7)


def test_the_example_in_order_of_first_occurrence():
    plan = build_plan(RaggedBatch.from_sequences(EXAMPLE), order="input")
    assert plan.input_ids.tolist() == [1, 2, 3, 5, 4, 7, 6]
    assert plan.scatter.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 0, 1, 2, 6]
    assert plan.parent.tolist() == [-1, 0, 1, 2, 1, 4, 2]
    assert plan.subtree_end.tolist() == [7, 7, 7, 4, 6, 6, 7]  # of 3 (row 2): holds 4 and 7 (rows 4, 5) too


def test_same_ids_at_other_positions_share_nothing():
    batch = RaggedBatch.from_sequences([[1, 2, 3]] * 3, position_ids=[[0, 1, 2], [1, 2, 3], [0, 1, 3]])
    assert build_plan(batch).scatter.tolist() == [0, 1, 2, 4, 5, 6, 0, 1, 3]


def test_sharing_keys_keep_sequences_apart():
    batch = RaggedBatch.from_sequences([[1, 2], [1, 2], [1, 2]], sharing_keys=["a", "b", "a"])
    assert build_plan(batch).scatter.tolist() == [0, 1, 2, 3, 0, 1]
    given_as_tensor = dataclasses.replace(batch, sharing_keys=torch.tensor([-1, 0, 5]))
    assert build_plan(given_as_tensor).num_nodes == 6


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_dtypes(order, dtype):
    rows = [torch.tensor([1, 2], dtype=dtype), torch.tensor([1, 3], dtype=dtype)]
    plan = build_plan(RaggedBatch.from_sequences(rows), order)
    for maps in (plan.gather, plan.scatter, plan.parent, plan.subtree_end, plan.cu_seqlens):
        assert maps.dtype == torch.int32
    assert plan.input_ids.dtype == dtype
    assert plan.position_ids.dtype == torch.int64


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sequences", [[], [[]], [[], []]])
def test_nothing_to_number(order, sequences):
    plan = build_plan(RaggedBatch.from_sequences(sequences), order)
    assert (plan.num_nodes, plan.num_tokens, plan.gamma, plan.compression_ratio) == (0, 0, 1.0, 1.0)
    assert reconstruct(plan) == sequences


def test_an_unknown_order_is_refused():
    with pytest.raises(ValueError, match="order is 'depth': expected one of 'trie', 'input'"):
        build_plan(RaggedBatch.from_sequences([[1]]), order="depth")


@pytest.mark.parametrize("order", ORDERS)
def test_a_chain_of_20000_tokens(order):
    plan = build_plan(RaggedBatch.from_sequences([list(range(20_000)), list(range(10_000))]), order)
    assert plan.num_nodes == 20_000
    assert plan.parent.tolist() == list(range(-1, 19_999))
    assert plan.subtree_end.unique().tolist() == [20_000]
    assert [len(path) for path in reconstruct(plan)] == [20_000, 10_000]


@pytest.mark.parametrize("order", ORDERS)
def test_20000_sequences(order):
    sequences = [[0, i % 100, i] for i in range(20_000)]
    start = time.perf_counter()
    plan = build_plan(RaggedBatch.from_sequences(sequences), order)
    assert time.perf_counter() - start < 10
    assert plan.num_nodes == 1 + 100 + 20_000


@given(batch=batches())
@settings(max_examples=50, deadline=None)
def test_the_identity_plan_shares_nothing(batch):
    plan = TriePlan.identity(batch)
    assert plan.num_nodes == plan.num_tokens == batch.num_tokens
    assert [[token for token, _ in path] for path in reconstruct(plan)] == batch.sequences()
    row = torch.arange(plan.num_nodes)
    sees = (row[None] <= row[:, None]) & (row[:, None] < plan.subtree_end[None])
    owner = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths)
    assert torch.equal(sees, (owner[:, None] == owner[None]) & (row[:, None] >= row[None]))


def test_reconstruct_shows_a_false_merge_that_ids_and_positions_hide():
    batch = RaggedBatch.from_sequences([[1, 9, 5], [2, 9, 5]])
    plan = build_plan(batch)
    merged = dataclasses.replace(plan, scatter=torch.tensor([0, 1, 2, 3, 1, 2], dtype=torch.int32))
    assert torch.equal(merged.input_ids[merged.scatter], batch.input_ids)
    assert [[token for token, _ in path] for path in reconstruct(merged)] != batch.sequences()


@pytest.mark.parametrize(
    ("parent", "message"), [([1, 0], "never reaches a root"), ([-1, 7], "compact row 7")]
)
def test_reconstruct_refuses_a_broken_parent(parent, message):
    plan = build_plan(RaggedBatch.from_sequences([[1, 2]]))
    with pytest.raises(ValueError, match=message):
        reconstruct(dataclasses.replace(plan, parent=torch.tensor(parent, dtype=torch.int32)))


def test_a_plan_moves_to_where_it_is_for_nothing():
    plan = build_plan(RaggedBatch.from_sequences(EXAMPLE))
    assert plan.to("cpu") is plan
    moved = plan.to("meta")
    assert {t.device.type for t in (moved.gather, moved.scatter, moved.parent, moved.cu_seqlens)} == {"meta"}
