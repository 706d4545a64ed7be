"""`rope_scatter` in the interpreter, against RoPE in fp64 and PyTorch's indexing."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from triton.runtime.interpreter import GridExecutor

from radixmlp.kernels.chunks import CHUNK, Segments
from radixmlp.kernels.rope import rope_scatter
from radixmlp.kernels.rope_kernel import TILE_BYTES, tile_shape

pytestmark = pytest.mark.usefixtures("nan_filled")
in_interpreter = settings(
    deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
# Of one rounding. fp32 products are rounded too; the interpreter truncates to bf16 where a GPU rounds.
EPS = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7, torch.float32: 2.0**-22}


def rotated(x, cos, sin):
    """x [rows, H, D] turned in fp64 by transformers' convention on the first R columns of each head."""
    x, cos, sin = x.double(), cos.double(), sin.double()
    turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    turned, _ = apply_rotary_pos_emb(turned[None], turned[None], cos[None], sin[None], unsqueeze_dim=2)
    return torch.cat([turned[0], rest], -1)


def assert_rounded(got, want, size):
    """`size`: the largest magnitude of what was added."""
    allowed = size * EPS[got.dtype]
    error = (got.double() - want).abs()
    assert (error <= allowed).all(), f"{error.max()}, allowed {allowed}"


@st.composite
def problems(draw):
    """q, k, v [N', ...], cos, sin [N', R] and an index [N] that holds every row of them."""
    nodes = draw(st.integers(1, 20))
    copies = draw(st.lists(st.integers(0, nodes - 1), max_size=80))
    index = torch.tensor([*range(nodes), *copies])[torch.randperm(nodes + len(copies))]
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (8, 2), (5, 3)]))
    rotary = 2 * draw(st.sampled_from([1, 3, 8, 16, 20]))
    dim = rotary + draw(st.sampled_from([0, 0, 1, 8, 30]))
    value_dim = draw(st.sampled_from([dim, 8, 5]))
    dtype = draw(st.sampled_from(list(EPS)))
    shapes = ((kv_heads * group, dim), (kv_heads, dim), (kv_heads, value_dim))
    q, k, v = (torch.randn(nodes, *shape).to(dtype) for shape in shapes)
    if draw(st.booleans()):  # one projection's output, and heads before rows as the models hold them
        q, k, v = torch.cat([q, q], -1)[..., :dim], k.transpose(0, 1).contiguous().transpose(0, 1), v
    cos, sin = torch.randn(2, nodes, rotary).to(draw(st.sampled_from([dtype, torch.float32])))
    return q, k, v, cos, sin, index


@in_interpreter
@given(problems())
def test_rotated_and_scattered(problem):
    q, k, v, cos, sin, index = problem
    outs = rope_scatter(q, k, v, cos, sin, Segments.of(index, len(q)))
    assert all(out.is_contiguous() and out.dtype == q.dtype for out in outs)
    for out, x in zip(outs[:2], (q, k), strict=True):
        want = rotated(x, cos, sin)[index]
        assert_rounded(out, want, float(2 * x.abs().max() * max(cos.abs().max(), sin.abs().max(), 1)))
        assert torch.equal(out[..., cos.shape[1] :], x[index][..., cos.shape[1] :])
    assert torch.equal(outs[2], v[index])


@in_interpreter
@given(problems())
def test_gradients_turn_back_and_add_up(problem):
    q, k, v, cos, sin, index = problem
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    outs = rope_scatter(*inputs, cos, sin, Segments.of(index, len(q)))
    grads = tuple(torch.randn(out.shape).to(out.dtype) for out in outs)
    got = torch.autograd.grad(outs, inputs, grads)

    wide = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    truth = (rotated(wide[0], cos, sin)[index], rotated(wide[1], cos, sin)[index], wide[2][index])
    want = torch.autograd.grad(truth, wide, tuple(grad.double() for grad in grads))
    most = torch.bincount(index).max()
    scale = float(most * max(cos.abs().max(), sin.abs().max(), 1))
    for ours, theirs, grad in zip(got, want, grads, strict=True):
        assert_rounded(ours, theirs, 2 * scale * float(grad.abs().max()))


def test_rows_with_many_copies():
    copies = 3 * CHUNK + 5
    index = torch.tensor([0] + [1] * copies + [2])
    q, k, v = (torch.randn(3, heads, 16) for heads in (2, 1, 1))
    cos, sin = torch.randn(2, 3, 16)
    outs = rope_scatter(q, k, v, cos, sin, Segments.of(index, 3))
    single = rope_scatter(q, k, v, cos, sin, Segments.of(torch.arange(3), 3))
    assert all(torch.equal(out, one[index]) for out, one in zip(outs, single, strict=True))


def test_gradients_are_rounded_once():
    copies = 2049  # has no fp16 of its own: 2048 and 2050 have
    segments = Segments.of(torch.zeros(copies, dtype=torch.int64), 1)
    q, k, v = (torch.zeros(1, 1, 2, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = rope_scatter(q, k, v, torch.ones(1, 2), -torch.ones(1, 2), segments)[0]
    grad = torch.ones_like(out)
    grad[0, 0, 1] = 0
    (got,) = torch.autograd.grad(out, q, grad)
    assert got.flatten().tolist() == [2049 - 2048, torch.tensor(2049.0 + 2048).half().item()]


def test_q_k_and_v_go_in_one_launch(monkeypatch):
    launches = []
    run = GridExecutor.__call__
    monkeypatch.setattr(
        GridExecutor,
        "__call__",
        lambda self, *args, **kwargs: (launches.append(self), run(self, *args, **kwargs)),
    )
    q, k, v = (torch.randn(4, heads, 16) for heads in (4, 2, 2))
    rope_scatter(q, k, v, *torch.randn(2, 4, 16), Segments.of(torch.tensor([0, 1, 2, 3, 3]), 4))
    assert len(launches) == 1


@pytest.mark.parametrize("rows", [0, 2])
def test_nothing_to_move(rows):
    heads = 0 if rows else 2
    q, k, v = (torch.randn(rows, heads, 8, requires_grad=True) for _ in range(3))
    outs = rope_scatter(q, k, v, *torch.randn(2, rows, 8), Segments.of(torch.arange(rows), rows))
    assert [out.shape for out in outs] == [x.shape for x in (q, k, v)]
    sum(out.sum() for out in outs).backward()
    assert q.grad.shape == q.shape


@given(
    st.sampled_from([16, 32, 64, 80, 96, 128, 192, 256]),
    st.sampled_from([32, 64, 128, 256]),
    st.integers(1, 128),
    st.sampled_from([2, 4]),
    st.booleans(),
)
def test_tiles_hold_every_column_and_stay_small(dim, value_dim, half, size, eight_heads):
    rotary = min(2 * half, dim)
    tile = tile_shape(dim, value_dim, rotary, size, eight_heads)
    assert 2 * tile["BLOCK_HALF"] >= rotary
    assert tile["BLOCK_REST"] >= dim - rotary
    assert tile["BLOCK_VALUE"] >= value_dim
    widest = max(2 * tile["BLOCK_HALF"], tile["BLOCK_REST"], tile["BLOCK_VALUE"])
    assert (
        tile["BLOCK_ROWS"] == 1 or tile["BLOCK_ROWS"] * tile["BLOCK_HEADS"] * widest * size <= 4 * TILE_BYTES
    )


Q, KV, ANGLES = torch.zeros(3, 4, 8), torch.zeros(3, 2, 8), torch.zeros(3, 8)
SEGMENTS = Segments.of(torch.tensor([0, 1, 2, 2]), 3)
REFUSED = {
    "flat": ((Q[:, 0], KV, KV, ANGLES, ANGLES), r"q has shape \(3, 8\): expected \[rows, H, D\]"),
    "rows": ((Q[:2], KV, KV, ANGLES, ANGLES), "q has 2 rows of torch.float32: expected 3 rows"),
    "dtypes": ((Q, KV.half(), KV, ANGLES, ANGLES), "k has 3 rows of torch.float16: .* q's torch.float32"),
    "double": ((Q.double(), KV, KV, ANGLES, ANGLES), "q has dtype torch.float64"),
    "head_dim": ((Q, KV[..., :6], KV, ANGLES, ANGLES), "q and k need one head_dim"),
    "heads": ((Q, KV, KV[:, :1], ANGLES, ANGLES), "k and v one number of heads"),
    "cos rows": ((Q, KV, KV, ANGLES[:2], ANGLES), r"cos has shape \(2, 8\) .*: expected \[3, rotary_dim\]"),
    "sin shape": ((Q, KV, KV, ANGLES, ANGLES[:, :4]), r"sin has shape \(3, 4\)"),
    "sin dtype": ((Q, KV, KV, ANGLES, ANGLES.half()), "sin has .* dtype torch.float16"),
    "odd": (
        (Q, KV, KV, ANGLES[:, :5], ANGLES[:, :5]),
        "cos has 5 columns: expected an even rotary_dim of 2 .. head",
    ),
    "wide": ((Q, KV, KV, torch.zeros(3, 10), torch.zeros(3, 10)), "cos has 10 columns"),
    "gradient": ((Q, KV, KV, ANGLES.clone().requires_grad_(), ANGLES), "cos requires a gradient"),
    "device": ((Q, KV, KV.to("meta"), ANGLES, ANGLES), "q is on cpu, but v on meta"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    tensors, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        rope_scatter(*tensors, SEGMENTS)
