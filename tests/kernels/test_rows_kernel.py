"""`gather_rows` and `scatter_rows` in the interpreter, bit for bit against PyTorch's indexing."""

import mmap
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import GridExecutor

from radixmlp.kernels import row_copy
from radixmlp.kernels.chunks import Segments
from radixmlp.kernels.launch import FLOATS, RowLaunch, Rows, block_columns
from radixmlp.kernels.rows import gather_rows, gather_rows_together, scatter_rows

NORESERVE = 0x4000  # Linux: address space without memory behind it; this Python has no name for it
pytestmark = pytest.mark.usefixtures("nan_filled")
WIDTHS = (1, 2, 3, 4, 6, 7, 8, 12, 16, 24, 40, 72, 129)
in_interpreter = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def bits(x):
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


def laid_out(layout, rows, heads, width, dtype):
    """Random bits (NaNs and all) as [rows, heads, width], or [rows, width] where heads is 0."""
    shape = (rows, heads, width) if heads else (rows, width)

    def random(*sizes):
        wide = torch.randint(-(2**31), 2**31, sizes, dtype=torch.int64).to(torch.int32)
        return wide.view(dtype)[..., : sizes[-1]]

    if layout == "contiguous":
        return random(*shape).contiguous()
    if layout == "columns of a wider tensor":
        return random(*shape[:-1], 2 * width + 8)[..., 8 : 8 + width]
    if layout == "odd columns":
        return random(*shape[:-1], 2 * width + 3)[..., 1 : 1 + width]
    if layout == "heads before rows" and heads:
        return random(heads, rows, width).transpose(0, 1)
    if layout == "strided columns":
        return random(*shape[:-1], 2 * width)[..., ::2]
    return random(1, *shape[1:]).expand(shape)


LAYOUTS = (
    "contiguous",
    "columns of a wider tensor",
    "odd columns",
    "heads before rows",
    "strided columns",
    "expanded",
)
sources = st.builds(
    laid_out,
    st.sampled_from(LAYOUTS),
    st.integers(1, 20),
    st.integers(0, 3),
    st.sampled_from(WIDTHS),
    st.sampled_from(FLOATS),
)


@in_interpreter
@given(sources, st.integers(0, 50), st.sampled_from([torch.int32, torch.int64]), st.booleans(), st.data())
def test_gather_is_indexing(x, n, dtype, with_segments, data):
    rows = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=n, max_size=n))
    index = torch.tensor(rows, dtype=dtype)
    before = bits(x).clone()
    out = gather_rows(x, index, Segments.of(index, len(x)) if with_segments else None)
    assert out.is_contiguous()
    assert torch.equal(bits(out), bits(x[index.long()]))
    assert torch.equal(bits(x), before)


@in_interpreter
@given(st.lists(sources, min_size=1, max_size=3), st.integers(1, 40), st.booleans())
def test_tensors_moved_together_are_each_what_they_are_alone(tensors, n, with_segments):
    rows = min(len(x) for x in tensors)
    tensors = tuple(x[:rows].to(tensors[0].dtype) for x in tensors)
    index = torch.randint(0, rows, (n,))
    segments = Segments.of(index, rows) if with_segments else None
    for out, x in zip(gather_rows_together(tensors, index, segments), tensors, strict=True):
        assert torch.equal(bits(out), bits(x[index]))


@in_interpreter
@given(sources, st.booleans(), st.data())
def test_scatter_is_a_loop_of_assignments(x, unique, data):
    num_rows = len(x) + data.draw(st.integers(0, 30))
    places = st.lists(st.integers(0, num_rows - 1), min_size=len(x), max_size=len(x), unique=unique)
    index = torch.tensor(data.draw(places), dtype=torch.int32)
    expected = torch.zeros(num_rows, *x.shape[1:], dtype=x.dtype)
    for row, place in enumerate(index.tolist()):
        expected[place] = x[row]
    assert torch.equal(bits(scatter_rows(x, index, num_rows)), bits(expected))


@in_interpreter
@given(st.integers(1, 30), st.sampled_from([(7,), (16,), (2, 8)]), st.integers(1, 200), st.booleans())
def test_gradient_of_gather_adds_up_duplicates(rows, shape, n, with_segments):
    x = torch.randn(rows, *shape, requires_grad=True)
    index = torch.randint(0, rows, (n,))
    grad = torch.randint(-99, 100, (n, *shape)).float()  # whole numbers: their sums are exact
    out = gather_rows(x, index, Segments.of(index, rows) if with_segments else None)
    (got,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(got, torch.zeros(rows, *shape).index_add_(0, index, grad))


@in_interpreter
@given(st.integers(1, 20), st.booleans(), st.data())
def test_gradient_of_scatter_gathers_what_was_written(n, unique, data):
    num_rows = n + 3
    places = st.lists(st.integers(0, num_rows - 1), min_size=n, max_size=n, unique=unique)
    index = torch.tensor(data.draw(places))
    x = torch.randn(n, 2, 8, requires_grad=True)
    grad = torch.randn(num_rows, 2, 8)
    (got,) = torch.autograd.grad(scatter_rows(x, index, num_rows), x, grad)
    owner = dict(zip(index.tolist(), range(n), strict=True))
    expected = torch.stack([grad[place] * (owner[place] == row) for row, place in enumerate(index.tolist())])
    assert torch.equal(got, expected)


def test_gradients_that_autograd_expands_or_leaves_out():
    x, y = (torch.randn(5, 8, requires_grad=True) for _ in range(2))
    index = torch.tensor([0, 0, 4])
    out, _ = gather_rows_together((x, y), index)
    out.sum().backward()
    assert torch.equal(x.grad, torch.tensor([2.0, 0, 0, 0, 1])[:, None].expand(5, 8))
    assert y.grad is None or not y.grad.any()
    assert not gather_rows(x.detach(), index).requires_grad


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 2, 8), (3, 0, 8), (3, 2, 0)])
def test_nothing_to_move(shape):
    x = torch.randn(shape, requires_grad=True)
    empty = torch.zeros(0, dtype=torch.int32)
    for out in (
        gather_rows(x, empty),
        gather_rows(x, empty, Segments.of(empty, len(x))),
        gather_rows(x, torch.arange(len(x))),
        scatter_rows(x, torch.arange(len(x)), len(x) + 2),
    ):
        assert out.shape[1:] == x.shape[1:]
        assert not out.any()
        x.grad = None
        out.sum().backward()
        assert x.grad.shape == x.shape
        assert not x.grad[:0].any()


def test_rows_that_are_not_there_are_nan():
    x = torch.randn(3, 2, 8).half()
    out = gather_rows(x, torch.tensor([-1, 1, 3, 2**40, -(2**40)]))
    assert out[[0, 2, 3, 4]].isnan().all()
    assert torch.equal(out[1], x[1])


def test_index_may_be_strided():
    x, index = torch.randn(9, 8), torch.arange(18) // 2
    assert torch.equal(gather_rows(x, index[::2]), x)


FLAT, INDEX = torch.zeros(4, 8), torch.zeros(2, dtype=torch.int64)
REFUSED = {
    "shape": (lambda: gather_rows(torch.zeros(4), INDEX), r"x has shape \(4,\): expected \[rows, D\] or"),
    "dtype": (lambda: gather_rows(FLAT.int(), INDEX), "x has dtype torch.int32: expected float16"),
    "index dtype": (
        lambda: gather_rows(FLAT, INDEX.float()),
        "index has dtype torch.float32: expected int32",
    ),
    "index shape": (lambda: gather_rows(FLAT, INDEX[None]), r"index has shape \(1, 2\): expected one"),
    "devices": (lambda: gather_rows(FLAT, INDEX.to("meta")), "x is on cpu, but index on meta: move them"),
    "device": (lambda: gather_rows(FLAT.to("meta"), INDEX.to("meta")), "x is on meta: .* runs on a GPU"),
    "none": (lambda: gather_rows_together((), INDEX), "got 0 tensors: one launch moves one to three"),
    "four": (lambda: gather_rows_together((FLAT,) * 4, INDEX), "got 4 tensors"),
    "rows": (lambda: gather_rows_together((FLAT, FLAT[:3]), INDEX), "tensor 1 has 3 rows of torch.float32"),
    "dtypes": (
        lambda: gather_rows_together((FLAT, FLAT.half()), INDEX),
        "tensor 1 has 4 rows of torch.float16",
    ),
    "segments": (
        lambda: gather_rows(FLAT, INDEX, Segments.of(INDEX, 5)),
        "segments hold 2 rows in 5 segments",
    ),
    "scatter": (lambda: scatter_rows(FLAT, INDEX, 9), "index names 2 rows, but x has 4"),
    "num_rows": (lambda: scatter_rows(FLAT[:2], INDEX, -1), "num_rows is -1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


ON_A_CPU = """
import torch
from radixmlp.kernels.rows import gather_rows
try:
    gather_rows(torch.zeros(3, 8), torch.zeros(2, dtype=torch.int64))
except ValueError as error:
    print(error)
"""


def test_a_cpu_without_the_interpreter_is_refused():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-P", "-c", ON_A_CPU], capture_output=True, text=True, env=environment, timeout=120
    )
    assert "x is on cpu: this is a Triton kernel and runs on a GPU" in run.stdout, run.stderr


@pytest.fixture
def far_rows(monkeypatch):
    """[239999, 8961] fp16: more than 2**31 elements of address space, of which only touched pages exist."""
    # The interpreter copies each storage onto itself after a launch, which would touch every page.
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    rows, columns = 239_999, 8_961
    memory = mmap.mmap(-1, rows * columns * 2, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.float16).view(rows, columns)


def test_reading_offsets_are_64_bit(far_rows):
    assert far_rows.numel() > 2**31
    far_rows[-1] = torch.randn(far_rows.shape[1]).half()
    far_rows[5] = 5
    index = torch.tensor([len(far_rows) - 1, 5], dtype=torch.int32)
    assert torch.equal(gather_rows(far_rows, index), far_rows[index.long()])


def test_writing_offsets_are_64_bit(far_rows):
    x = torch.randn(1, far_rows.shape[1]).half()
    last = torch.tensor([len(far_rows) - 1], dtype=torch.int32)
    zero, one = torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    launch = RowLaunch.of((x,), (far_rows,))
    row_copy.expand_rows_kernel[launch.grid(1)](
        last, zero, zero, one, 1, *launch.arguments(),
        VECTOR=launch.vector, BLOCK_ROWS=launch.block_rows, BLOCK=launch.block,
    )  # fmt: skip
    assert torch.equal(far_rows[-1], x[0])
    assert not far_rows[:2].any()


@pytest.mark.parametrize(
    ("width", "dtype", "aligned"),
    [
        (64, torch.float16, 16),
        (72, torch.float16, 16),
        (4, torch.float32, 16),
        (12, torch.bfloat16, 8),
        (6, torch.bfloat16, 4),
    ],
)
def test_accesses_are_as_wide_as_alignment_allows(width, dtype, aligned):
    x = torch.empty(5, width, dtype=dtype)
    assert RowLaunch.of((x,), (x,)).aligned == aligned
    assert RowLaunch.of((torch.empty(5, 3, width, dtype=dtype).transpose(0, 1),), (x,)).aligned == aligned
    one_off = torch.empty(5 * width + 1, dtype=dtype)[1:].view(5, width)
    assert RowLaunch.of((one_off,), (x,)).aligned == x.element_size()


def test_heads_that_lie_side_by_side_are_one():
    assert Rows.of(torch.empty(4, 3, 8)).columns == 24
    assert Rows.of(torch.empty(4, 3, 16)[..., :8]).heads == 3
    assert Rows.of(torch.empty(4, 48)[:, 8:32].unflatten(1, (3, 8))).columns == 24


def test_the_stride_of_a_single_row_does_not_narrow_accesses():
    x = torch.empty(2, 67, dtype=torch.float16)[:1, :64]
    assert RowLaunch.of((x,), (torch.empty(3, 64, dtype=torch.float16),)).aligned == 16


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=3))
def test_blocks_cover_the_columns_without_much_waste(columns):
    block = block_columns(columns, 32, 256)
    assert block & (block - 1) == 0
    assert block <= 256
    assert block >= 32 or block < 2 * max(columns)
    if min(columns) > 300:
        assert sum(-(-each // block) * block for each in columns) < 1.2 * sum(columns)
