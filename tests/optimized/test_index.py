"""The fast builder equals the readable one, field by field, whatever the batch looks like in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.optimized import index
from radixmlp.optimized.index import build_plan
from radixmlp.reference.plan import TriePlan
from radixmlp.reference.ragged import RaggedBatch
from radixmlp.reference.trie import build_plan as reference_plan
from radixmlp.verify.index_shapes import WORK_FAMILIES, ragged_batch

FIELDS = ("gather", "scatter", "parent", "subtree_end", "input_ids", "position_ids", "cu_seqlens")
ORDERS = ("trie", "input")
DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

orders = st.sampled_from(ORDERS)


@st.composite
def small_rows(draw: st.DrawFn) -> list[list[int]]:
    """Few tokens, few distinct ids: every kind of branch, end and repetition."""
    return draw(st.lists(st.lists(st.integers(0, 2), max_size=7), max_size=14))


@st.composite
def long_rows(draw: st.DrawFn) -> list[list[int]]:
    """Each sequence is the beginning of an earlier one and a tail: edges longer than the kernel's block."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 12))):
        row: list[int] = []
        if rows and draw(st.integers(0, 5)):
            row = list(draw(st.sampled_from(rows)))
            row = row[: draw(st.integers(0, len(row)))] if draw(st.booleans()) else row
        length = draw(st.sampled_from((0, 1, 2, 31, 32, 33, 64, 100)))
        rows.append(row + [draw(st.integers(0, 1))] * length)
    return rows


@st.composite
def position_rows(draw: st.DrawFn, rows: list[list[int]]) -> list[list[int]] | None:
    """Omitted; counted from an offset of each sequence's own; or anything."""
    kind = draw(st.integers(0, 2))
    if kind == 0:
        return None
    if kind == 1:
        offsets = [draw(st.integers(0, 1)) for _ in rows]
        return [[offset + i for i in range(len(row))] for row, offset in zip(rows, offsets, strict=True)]
    return [[draw(st.integers(0, 1)) for _ in row] for row in rows]


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In `dtype` where that holds every value."""
    return values.to(dtype) if not values.numel() or values.max() <= torch.iinfo(dtype).max else values


def strided(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, torch.full_like(values, 77)], 1)[:, 0]


@st.composite
def ragged_batches(draw: st.DrawFn) -> RaggedBatch:
    rows = draw(st.one_of(small_rows(), long_rows()))
    keys = draw(st.none() | st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    batch = RaggedBatch.from_sequences(rows, draw(position_rows(rows)), keys)
    layouts = [strided, torch.Tensor.contiguous]
    return RaggedBatch(
        draw(st.sampled_from(layouts))(narrowed(batch.input_ids, draw(st.sampled_from(DTYPES)))),
        draw(st.sampled_from(layouts))(narrowed(batch.position_ids, draw(st.sampled_from(DTYPES)))),
        draw(st.sampled_from(layouts))(batch.cu_seqlens),
        batch.sharing_keys,
    )


def assert_same_plan(plan: TriePlan, expected: TriePlan) -> None:
    for field in FIELDS:
        got, want = getattr(plan, field), getattr(expected, field)
        assert got.dtype == want.dtype, field
        assert torch.equal(got, want), f"{field}: {got.tolist()} != {want.tolist()}"
    assert plan.order == expected.order


@settings(max_examples=400, deadline=None)
@given(ragged_batches(), orders)
def test_equals_the_reference(batch: RaggedBatch, order: str) -> None:
    assert_same_plan(build_plan(batch, order), reference_plan(batch, order))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", WORK_FAMILIES)
def test_equals_the_reference_on_batches_made_to_be_hard(family: str, order: str) -> None:
    batch = ragged_batch(WORK_FAMILIES[family](30))
    assert_same_plan(build_plan(batch, order), reference_plan(batch, order))


@settings(max_examples=200, deadline=None)
@given(ragged_batches(), orders)
def test_every_path_of_the_plan_spells_its_sequence(batch: RaggedBatch, order: str) -> None:
    """Walks `parent` up from each last row: comparing ids alone would also pass after a false merge."""
    plan = build_plan(batch, order)
    parent = plan.parent.tolist()
    tokens = list(zip(plan.input_ids.tolist(), plan.position_ids.tolist(), strict=True))
    given_tokens = list(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
    bounds = batch.cu_seqlens.tolist()
    for begin, end in pairwise(bounds):
        path = []
        node = plan.scatter[end - 1].item() if end > begin else -1
        while node >= 0:
            path.append(tokens[node])
            node = parent[node]
        assert path[::-1] == given_tokens[begin:end]


@settings(max_examples=300, deadline=None)
@given(ragged_batches())
def test_equals_the_published_package(batch: RaggedBatch) -> None:
    radix_mlp = pytest.importorskip("radix_mlp", reason="the published builder: pip install radix-mlp")
    batch = RaggedBatch(batch.input_ids, batch.position_ids, batch.cu_seqlens)
    arrays = [t.numpy().astype(np.uint32) for t in (batch.input_ids, batch.position_ids, batch.cu_seqlens)]
    theirs = radix_mlp.compute_fold_and_scatter(*arrays)
    plan = build_plan(batch, "input")
    for ours, want in zip(
        (plan.input_ids, plan.position_ids, plan.scatter, plan.gather), theirs, strict=True
    ):
        assert np.array_equal(ours.numpy().astype(np.uint32), want)


@settings(max_examples=300, deadline=None)
@given(ragged_batches(), orders, st.tuples(*[st.sampled_from((0, 1, 1 << 32, 2**64 - 1))] * 3))
def test_equal_hashes_never_merge(batch: RaggedBatch, order: str, multipliers: tuple[int, int, int]) -> None:
    """With these multipliers nearly all (edge, token, position) fall into one slot, with one tag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_MULTIPLIERS", np.array(multipliers, np.uint64))
        plan = build_plan(batch, order)
    assert_same_plan(plan, reference_plan(batch, order))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**10)), min_size=2, max_size=6), orders)
def test_ids_chosen_to_collide_never_merge(starts: list[tuple[int, int]], order: str) -> None:
    """For known multipliers a*token + b*position, moving a position by a moves the token back by b."""
    a, b = 3, 5
    rows, positions = [], []
    for token, position in starts:
        for step in range(min(4, token // b + 1)):
            rows.append([token - b * step, 1])
            positions.append([position + a * step, 0])
    codes = [(a * row[0] + b * p[0]) % 2**64 for row, p in zip(rows, positions, strict=True)]
    batch = RaggedBatch.from_sequences(rows, positions)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "_MULTIPLIERS", np.array([7, a, b], np.uint64))
        plan = build_plan(batch, order)
    assert len(set(codes)) <= len(starts)
    assert_same_plan(plan, reference_plan(batch, order))


@pytest.mark.parametrize("keys", [[5, -7, 5], [2**31 - 1, 0, 2**31 - 1], [0, 2, 0], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("layout", [strided, torch.Tensor.contiguous, lambda keys: keys.to(torch.int32)])
def test_any_sharing_keys_are_told_apart(
    keys: list[int], layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    plain = RaggedBatch.from_sequences([[1, 2, 3]] * 3)
    batch = RaggedBatch(plain.input_ids, plain.position_ids, plain.cu_seqlens, layout(torch.tensor(keys)))
    assert build_plan(batch).scatter.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]


@settings(max_examples=100, deadline=None)
@given(ragged_batches(), orders)
def test_the_batch_is_not_written(batch: RaggedBatch, order: str) -> None:
    tensors = [batch.input_ids, batch.position_ids, batch.cu_seqlens]
    before = [t.clone() for t in tensors]
    plan = build_plan(batch, order)
    for field in ("gather", "scatter", "parent", "subtree_end", "input_ids", "position_ids"):
        getattr(plan, field).fill_(-1)
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_values_written_after_construction_count() -> None:
    batch = RaggedBatch.from_sequences([[1, 2, 3], [1, 2, 3]])
    batch.position_ids[4] = 9
    assert build_plan(batch, "input").scatter.tolist() == [0, 1, 2, 0, 3, 4]


def test_all_bits_of_a_value_count() -> None:
    """Values beyond 32 bits are refused by RaggedBatch; written in later, they are still told apart."""
    batch = RaggedBatch.from_sequences([[1, 2], [1, 2], [1, 2]])
    batch.input_ids[2] += 2**32
    batch.input_ids[5] -= 2**40
    assert build_plan(batch, "input").scatter.tolist() == [0, 1, 2, 3, 0, 4]


@pytest.mark.parametrize(
    ("bounds", "row"),
    [([0, 1, 9], 1), ([0, -1, 4], 0), ([0, 3, 2], 1), ([1, 2, 4], 0), ([0, 2, 3], 1), ([0, 2, 2**31 - 1], 1)],
    ids=str,
)
def test_bounds_written_after_construction_are_refused(bounds: list[int], row: int) -> None:
    batch = RaggedBatch.from_sequences([[1, 2], [3, 4]])
    batch.cu_seqlens.copy_(torch.tensor(bounds))
    with pytest.raises(ValueError, match=f"cu_seqlens row {row} .*build a new RaggedBatch"):
        build_plan(batch)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [[], [[]], [[], [], []], [[], [4], []]], ids=str)
def test_nothing_to_do(rows: list[list[int]], order: str) -> None:
    batch = RaggedBatch.from_sequences(rows)
    plan = build_plan(batch, order)
    assert_same_plan(plan, reference_plan(batch, order))
    assert plan.num_nodes == sum(map(len, rows))


def test_bounds_that_end_before_the_tokens_are_refused_without_sequences() -> None:
    batch = RaggedBatch.from_sequences([])
    object.__setattr__(batch, "input_ids", torch.tensor([1]))
    object.__setattr__(batch, "position_ids", torch.tensor([0]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        build_plan(batch)


@pytest.mark.parametrize("order", ["", "depth-first", None, "TRIE"])
def test_an_unknown_order_is_refused(order: str | None) -> None:
    with pytest.raises(ValueError, match="'trie' or 'input'"):
        build_plan(RaggedBatch.from_sequences([[1]]), order)


def test_kernels_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from radixmlp.optimized import _jit

    real = _jit.njit

    def without_cache(**options: bool) -> Callable[..., object]:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(_jit, "njit", without_cache)
    assert _jit.compiled(lambda x: x + 1)(2) == 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_on_a_device_gets_its_plan_there(order: str) -> None:
    batch = RaggedBatch.from_sequences([[1, 2, 3], [1, 2, 4]], sharing_keys=["a", "a"])
    plan = build_plan(batch.to("cuda"), order)
    assert {getattr(plan, field).device.type for field in FIELDS} == {"cuda"}
    assert_same_plan(plan.to("cpu"), reference_plan(batch, order))
