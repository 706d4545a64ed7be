"""`Segments` and `segment_sum` in the interpreter, against fp64 sums."""

from dataclasses import fields

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from radixmlp.kernels import segments as segments_module
from radixmlp.kernels.chunks import CHUNK, Segments, scatter_segments
from radixmlp.kernels.segments import segment_sum
from radixmlp.reference import RaggedBatch
from radixmlp.reference.trie import build_plan

pytestmark = pytest.mark.usefixtures("nan_filled")
in_interpreter = settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EPS = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-24,
}  # bf16: the interpreter truncates


def truth(x, index, num_segments):
    return torch.zeros(num_segments, *x.shape[1:], dtype=torch.float64).index_add_(
        0, index.long(), x.double()
    )


def assert_summed(out, x, index, num_segments):
    """Within the rounding of n fp32 additions of these sizes, and of the result."""
    longest = int(torch.bincount(index.long(), minlength=1).max())
    sizes = truth(x.abs(), index, num_segments)
    allowed = sizes * longest * 2.0**-24 + sizes * EPS[out.dtype] + 2.0**-24
    error = (out.double() - truth(x, index, num_segments)).abs()
    assert (error <= allowed).all(), f"{(error - allowed).max()} beyond"


lengths = st.lists(
    st.one_of(
        st.integers(0, 3),
        st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 5 * CHUNK + 7]),
    ),
    min_size=1,
    max_size=12,
)


def shuffled(lengths, dtype=torch.int64):
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return index[torch.randperm(len(index))].to(dtype)


@in_interpreter
@given(
    lengths,
    st.sampled_from([(1,), (7,), (8,), (40,), (3, 8), (2, 5), (600,)]),
    st.sampled_from(list(EPS)),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from(["contiguous", "heads before rows", "columns of a wider tensor", "strided columns"]),
)
def test_sums_are_right_for_any_lengths(lengths, shape, dtype, index_dtype, layout):
    index = shuffled(lengths, index_dtype)
    x = torch.randn(len(index), *shape).to(dtype)
    if layout == "heads before rows":
        x = x.transpose(0, -2).contiguous().transpose(0, -2)
    elif layout == "columns of a wider tensor":
        x = torch.cat([x, x], -1)[..., : shape[-1]]
    elif layout == "strided columns":
        x = x.repeat_interleave(2, -1)[..., ::2]
    out = segment_sum(x, Segments.of(index, len(lengths)))
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_summed(out, x, index, len(lengths))


@in_interpreter
@given(lengths)
def test_every_row_is_in_one_chunk_of_its_segment(lengths):
    index = shuffled(lengths)
    segments = Segments.of(index, len(lengths))
    chunks = zip(
        *(getattr(segments, f"chunk_{name}").tolist() for name in ("segment", "first", "length", "slot")),
        strict=True,
    )
    seen, slots, chunked = [], [], set()
    for segment, first, length, slot in chunks:
        rows = segments.order[first : first + length].tolist()
        assert 0 <= length <= CHUNK
        assert all(int(index[row]) == segment for row in rows)
        assert length > 0 or segment == len(lengths) or lengths[segment] == 0
        seen += rows
        chunked |= {segment}
        if slot >= 0:
            slots.append((slot, segment))
    assert seen == segments.order.tolist()
    assert sorted(seen) == list(range(len(index)))
    assert chunked - {len(lengths)} == set(range(len(lengths)))
    assert [slot for slot, _ in slots] == list(range(len(slots)))
    assert len(slots) <= segments.num_slots
    long = [s for s, length in enumerate(lengths) if length > CHUNK]
    found = zip(
        segments.long_segment.tolist(),
        segments.long_first.tolist(),
        segments.long_count.tolist(),
        strict=True,
    )
    for place, (segment, first, count) in enumerate(found):
        if place < len(long):
            assert segment == long[place]
            assert [s for _, s in slots[first : first + count]] == [segment] * -(-lengths[segment] // CHUNK)
        else:
            assert segment == len(lengths)


def test_rows_of_a_segment_keep_their_order():
    index = torch.tensor([1, 0, 1, 1, 0])
    assert Segments.of(index, 2).order.tolist() == [1, 4, 0, 2, 3]


@pytest.mark.parametrize("n", [0, 1, CHUNK, CHUNK + 1, 1000])
def test_one_segment_and_none(n):
    index = torch.zeros(n, dtype=torch.int32)
    x = torch.randn(n, 8)
    assert_summed(segment_sum(x, Segments.of(index, 1)), x, index, 1)
    assert segment_sum(torch.empty(0, 8), Segments.of(torch.zeros(0, dtype=torch.int64), 0)).shape == (0, 8)
    assert segment_sum(x[:, :0], Segments.of(index, 1)).shape == (1, 0)


@pytest.mark.parametrize("chunks", [2, 4, 5, 9])
@pytest.mark.parametrize("width", [1024, 1030])
def test_long_segments_of_wide_rows(chunks, width):
    index = torch.zeros(chunks * CHUNK, dtype=torch.int64)
    x = torch.randn(len(index), width)
    assert_summed(segment_sum(x, Segments.of(index, 1)), x, index, 1)


def test_sums_are_in_fp32():
    index = torch.zeros(4096, dtype=torch.int64)
    ones = torch.ones(4096, 8, dtype=torch.float16)
    segments = Segments.of(index, 1)
    assert (segment_sum(ones, segments) == 4096).all()  # in fp16, 2048 + 1 is 2048
    large = torch.full_like(ones, 100.0)
    assert (segment_sum(large, segments, torch.float32) == 409_600).all()


def test_sums_are_bitwise_the_same_each_time():
    index = torch.randint(0, 7, (2000,))
    x = torch.randn(2000, 24) * torch.logspace(-4, 4, 2000)[:, None]
    first = segment_sum(x, Segments.of(index, 7))
    assert all(torch.equal(first, segment_sum(x, Segments.of(index, 7))) for _ in range(3))
    assert torch.equal(first, segment_sum(x, Segments.of(index.int(), 7)))
    wider = torch.cat([x, x], 1)
    assert torch.equal(first, segment_sum(wider, Segments.of(index, 7))[:, :24])


class Iterations:
    """How many loads of rows all programs make, and the most that one makes."""

    def __init__(self, monkeypatch):
        self.all, self.most, self.here = 0, 0, 0
        load, place = InterpreterBuilder.create_masked_load, InterpreterBuilder.set_grid_idx

        def counted(builder, ptrs, *rest):
            if ptrs.data.ndim == 2:
                self.all += 1
                self.here += 1
                self.most = max(self.most, self.here)
            return load(builder, ptrs, *rest)

        def moved(builder, *where):
            self.here = 0
            return place(builder, *where)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted)
        monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", moved)


@pytest.mark.parametrize(
    "spread", ["all on one", pytest.param("one each", marks=pytest.mark.slow), "half on one"]
)
def test_the_work_is_linear_however_rows_are_spread(spread, monkeypatch):
    n = 4000
    index = {
        "all on one": torch.zeros(n, dtype=torch.int64),
        "one each": torch.arange(n),
        "half on one": torch.arange(n).clamp(min=n // 2) - n // 2,
    }[spread]
    work = Iterations(monkeypatch)
    x = torch.randn(n, 512)
    out = segment_sum(x, Segments.of(index, int(index.max()) + 1))
    assert_summed(out, x, index, len(out))
    rows = segments_module.TILE // 512
    assert work.all <= 1.3 * n / rows + 2 * CHUNK
    assert work.most <= max(CHUNK, n / CHUNK / rows + 1) + 1  # of one program: no long chain of additions


def test_plans_keep_their_segments():
    batch = RaggedBatch.from_sequences([[1, 2, 3], [1, 2, 4], [1, 5]])
    plan = build_plan(batch)
    segments = scatter_segments(plan)
    assert scatter_segments(plan) is segments
    assert (segments.num_rows, segments.num_segments) == (plan.num_tokens, plan.num_nodes)
    x = torch.randn(plan.num_tokens, 8)
    assert_summed(segment_sum(x, segments), x, plan.scatter, plan.num_nodes)


def test_moving_segments_moves_every_table():
    segments = Segments.of(torch.tensor([0, 1, 1]), 2)
    assert segments.to("cpu") is segments
    moved = segments.to("meta")
    tables = [field.name for field in fields(Segments) if isinstance(getattr(segments, field.name), Tensor)]
    assert len(tables) == 8
    assert all(getattr(moved, name).is_meta for name in tables)
    assert (moved.num_rows, moved.num_segments, moved.num_slots) == (3, 2, segments.num_slots)


X, SEGMENTS = torch.zeros(3, 8), Segments.of(torch.tensor([0, 1, 1]), 2)
REFUSED = {
    "rows": (lambda: segment_sum(X[:2], SEGMENTS), "x has 2 rows, but segments were derived from 3"),
    "shape": (lambda: segment_sum(X[0], SEGMENTS), r"x has shape \(8,\): expected \[rows, D\]"),
    "dtype": (lambda: segment_sum(X.double(), SEGMENTS), "x has dtype torch.float64"),
    "result": (lambda: segment_sum(X, SEGMENTS, torch.int32), "the result has dtype torch.int32"),
    "device": (lambda: segment_sum(X.to("meta"), SEGMENTS), "x is on meta, but segments on cpu"),
    "index": (lambda: Segments.of(torch.zeros(3), 2), "index has dtype torch.float32"),
    "large": (lambda: Segments.of(torch.tensor([0, 2]), 2), r"index\[1\] is 2: expected 0 .. 1"),
    "negative": (lambda: Segments.of(torch.tensor([-1, 0]), 2), r"index\[0\] is -1: expected 0 .. 1"),
    "segments": (lambda: Segments.of(torch.tensor([0]), -1), "num_segments is -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
