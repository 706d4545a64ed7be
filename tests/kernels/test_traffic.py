"""The bytes `traffic.py` computes are those the kernels request, and close to the least possible."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder

from radixmlp.kernels.chunks import Segments
from radixmlp.kernels.rope import rope_scatter
from radixmlp.kernels.rows import gather_rows_together
from radixmlp.kernels.segments import segment_sum
from radixmlp.kernels.traffic import (
    copy_rows_traffic,
    expand_rows_traffic,
    rope_scatter_traffic,
    segment_sum_traffic,
)

in_interpreter = settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Requests:
    """Bytes that the interpreted kernels load and store where their masks allow."""

    def __init__(self, monkeypatch):
        self.loaded = self.stored = 0
        load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

        def counted_load(builder, ptrs, mask, *rest):
            self.loaded += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
            return load(builder, ptrs, mask, *rest)

        def counted_store(builder, ptrs, value, mask, *rest):
            self.stored += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
            return store(builder, ptrs, value, mask, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", counted_load)
        monkeypatch.setattr(InterpreterBuilder, "create_masked_store", counted_store)

    def of(self, call):
        self.loaded = self.stored = 0
        call()
        return self.loaded, self.stored


def tensors(rows, *shapes, dtype=torch.float16, strided=False):
    if strided:
        return tuple(torch.randn(shape[0], rows, *shape[1:]).to(dtype).transpose(0, 1) for shape in shapes)
    return tuple(torch.randn(rows, *shape).to(dtype) for shape in shapes)


@in_interpreter
@given(
    st.integers(1, 30),
    st.integers(1, 60),
    st.sampled_from([((4, 16), (2, 16), (2, 8)), ((3, 7),), ((1, 600), (2, 9))]),
    st.booleans(),
)
def test_of_gathers(monkeypatch, rows, n, shapes, strided):
    requests = Requests(monkeypatch)
    xs = tensors(rows, *shapes, strided=strided)
    index = torch.randint(0, rows, (n,))
    traffic = copy_rows_traffic(xs, index)
    assert requests.of(lambda: gather_rows_together(xs, index)) == (traffic.loaded, traffic.stored)
    if n > rows:
        segments = Segments.of(index, rows)
        traffic = expand_rows_traffic(xs, segments)
        assert requests.of(lambda: gather_rows_together(xs, index, segments)) == (
            traffic.loaded,
            traffic.stored,
        )
    monkeypatch.undo()


@in_interpreter
@given(
    st.integers(1, 20),
    st.integers(0, 300),
    st.sampled_from([(16,), (2, 9), (3, 700)]),
    st.sampled_from([None, torch.float32]),
    st.booleans(),
)
def test_of_segment_sum(monkeypatch, num_segments, n, shape, dtype, strided):
    requests = Requests(monkeypatch)
    (x,) = tensors(n, shape, strided=strided and len(shape) == 2)
    segments = Segments.of(torch.randint(0, num_segments, (n,)), num_segments)
    traffic = segment_sum_traffic(x, segments, dtype)
    assert requests.of(lambda: segment_sum(x, segments, dtype)) == (traffic.loaded, traffic.stored)
    monkeypatch.undo()


@in_interpreter
@given(
    st.integers(1, 20),
    st.lists(st.integers(0, 19), max_size=100),
    st.sampled_from([(8, 8, 16, 16, 16), (6, 3, 24, 8, 16), (5, 1, 12, 12, 6)]),
)
def test_of_rope_scatter(monkeypatch, nodes, copies, shape):
    requests = Requests(monkeypatch)
    q_heads, kv_heads, dim, value_dim, rotary = shape
    q, k, v = tensors(nodes, (q_heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    cos, sin = torch.randn(2, nodes, rotary)
    segments = Segments.of(torch.tensor([*range(nodes), *(copy % nodes for copy in copies)]), nodes)
    traffic = rope_scatter_traffic(q, k, v, cos, segments)
    assert requests.of(lambda: rope_scatter(q, k, v, cos, sin, segments)) == (traffic.loaded, traffic.stored)
    monkeypatch.undo()


def shared_prefix(batch=32, prefix=2048, suffix=256):
    """[N] scatter of the paper's synthetic batch, and its N'."""
    own = torch.arange(batch * suffix).view(batch, suffix) + prefix
    return torch.cat([torch.arange(prefix).expand(batch, -1), own], 1).flatten(), prefix + batch * suffix


def on_meta(rows, *shapes, dtype=torch.bfloat16):
    return tuple(torch.empty(rows, *shape, dtype=dtype, device="meta") for shape in shapes)


@pytest.mark.parametrize(("n", "shape"), [(16_000, (1024,)), (100_000, (2048,)), (2000, (64, 256))])
def test_a_copy_of_distinct_rows_moves_hardly_more_than_it_must(n, shape):
    index = torch.randperm(n).int()
    assert copy_rows_traffic(on_meta(n, shape), index).ratio <= 1.002


def test_at_the_papers_shape_shared_rows_are_read_once():
    index, nodes = shared_prefix()
    segments = Segments.of(index, nodes)
    qkv = on_meta(nodes, (32, 128), (8, 128), (8, 128))
    (cos,) = on_meta(nodes, (128,))
    (grad,) = on_meta(len(index), (4096,))
    # By output row, duplicates are read again (from L2 at best).
    assert copy_rows_traffic(qkv, index).ratio >= 1.7
    assert expand_rows_traffic(qkv, segments).ratio <= 1.005
    assert rope_scatter_traffic(*qkv, cos, segments).ratio <= 1.03
    assert segment_sum_traffic(grad, segments).ratio <= 1.01


@pytest.mark.parametrize("copies", [1, 2, 33, 10_000])
def test_however_often_a_row_is_shared(copies):
    n = 20_000
    index = torch.arange(n) // copies
    segments = Segments.of(index, n // copies + 1)
    (x,), (y,) = on_meta(n // copies + 1, (4096,)), on_meta(n, (4096,))
    assert (
        segment_sum_traffic(y, segments).ratio <= 1.25
    )  # longest chunks: 2/33 of the rows wait in fp32, twice over
    assert copies == 1 or expand_rows_traffic((x,), segments).ratio <= 1.04
