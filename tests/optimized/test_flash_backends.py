"""`dense-flash` and `scatter-flash`: what they hand to a FlashAttention function, checked by what it makes of it.

The functions below have the signatures of the real ones and compute, in fp64, what their documentation says of
each argument. A wrong argument gives a wrong result.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from radixmlp import AttentionSpec, RaggedBatch, TriePlan, UnsupportedAttentionError, build_plan
from radixmlp.optimized.attention import flash
from radixmlp.optimized.attention.flash import DenseFlash, ScatterFlash
from radixmlp.optimized.attention.flash_kernels import (
    VarlenKernel,
    installed_kernel,
    package_kernel,
    torch_kernel,
)
from radixmlp.reference.attention import causal_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOLERANCE = 2e-3  # of the largest: one rounding of the result to fp16, one of the weighted result


class AuxRequest(NamedTuple):
    lse: bool = False


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    left: int,
    right: int,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(out [N, Hq, D], log-sum-exp [Hq, N] fp32) of windows `left` before to `right` after each token."""
    for bounds, longest in ((cu_q, max_q), (cu_k, max_k)):
        assert bounds.dtype == torch.int32
        assert type(longest) is int
        assert longest == int(bounds.diff().max())
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert scale is not None
    group = q.shape[1] // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
    for start, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        queries = q[start:end].double()
        keys, values = (x[start:end].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance <= left
        if right >= 0:
            seen &= -distance <= right
        scores = scores.masked_fill(~seen, -torch.inf)
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values).to(q.dtype)
        lse[:, start:end] = scores.logsumexp(-1)
    return out, lse


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    assert isinstance(window_size, tuple)
    assert enable_gqa or query.shape[1] == key.shape[1]
    out, lse = attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, *window_size)
    return (out, lse) if return_aux is not None and return_aux.lse else out


def varlen_attn_without_gqa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: AuxRequest | None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Any:
    """As older versions are; this one returns its log-sum-exp as the documentation has it, [N, Hq]."""
    out, lse = attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, *window_size)
    return (out, lse.T.contiguous()) if return_aux is not None and return_aux.lse else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    assert dropout_p == 0.0
    left, right = window_size
    bounds = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = attend(q, k, v, *bounds, softmax_scale, left, 0 if causal else right, softcap)
    return (out, lse, None) if return_attn_probs else out


def on_cpu(kernel: VarlenKernel) -> VarlenKernel:
    return VarlenKernel(kernel.name, kernel.attend, kernel.softcap, "cpu")


KERNELS = {
    "torch": on_cpu(torch_kernel(varlen_attn, AuxRequest(lse=True))),
    "older torch": on_cpu(torch_kernel(varlen_attn_without_gqa, AuxRequest(lse=True))),
    "flash-attn": on_cpu(package_kernel(flash_attn_varlen_func)),
}


def qkv(rows: int, heads: tuple[int, int], width: int = 16) -> list[Tensor]:
    random = torch.Generator().manual_seed(rows)
    shapes = ((heads[0], width), (heads[1], width), (heads[1], width))
    return [torch.randn(rows, *shape, generator=random).mul_(2).half() for shape in shapes]


def check(kernel: VarlenKernel, batch: RaggedBatch, spec: AttentionSpec, heads: tuple[int, int]) -> None:
    plan = build_plan(batch)
    compact = qkv(plan.num_nodes, heads)
    ragged = [x[plan.scatter.long()] for x in compact]
    expected = causal_attention(*(x.double() for x in ragged), batch.cu_seqlens, spec)
    dense = DenseFlash(kernel)(*ragged, TriePlan.identity(batch), spec)
    scattered = ScatterFlash(kernel)(*compact, plan, spec)
    if expected.numel():
        limit = TOLERANCE * expected.abs().max()
        assert (dense.double() - expected).abs().max() <= limit
        assert (scattered.double() - expected[plan.gather.long()]).abs().max() <= limit
    assert dense.dtype == scattered.dtype == torch.float16
    assert dense.shape == expected.shape
    assert scattered.shape == (plan.num_nodes, *expected.shape[1:])


@pytest.mark.parametrize("kernel", KERNELS)
@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 1), max_size=20), min_size=1, max_size=8),
    heads=st.sampled_from([(1, 1), (2, 2), (6, 2)]),
    scale=st.sampled_from([0.05, 0.3]),
    window=st.sampled_from([None, 1, 2, 7, 50]),
    sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
)
def test_arguments_by_value(
    kernel: str,
    sequences: list[list[int]],
    heads: tuple[int, int],
    scale: float,
    window: int | None,
    sinks: bool,
    softcap: float | None,
) -> None:
    logits = torch.linspace(-1, 2, heads[0], dtype=torch.float64) if sinks else None
    cap = softcap if KERNELS[kernel].softcap else None
    check(
        KERNELS[kernel],
        RaggedBatch.from_sequences(sequences),
        AttentionSpec(scale, window, cap, logits),
        heads,
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("lengths", [[6], [4, 2], [0, 5, 1]])
def test_as_many_rows_as_heads(kernel: str, lengths: list[int]) -> None:
    sequences = [[number] * length for number, length in enumerate(lengths)]
    sinks = torch.linspace(-1, 2, 6, dtype=torch.float64)
    check(KERNELS[kernel], RaggedBatch.from_sequences(sequences), AttentionSpec(0.3, sinks=sinks), (6, 2))


def test_the_fakes_take_what_the_installed_function_takes() -> None:
    real = pytest.importorskip("torch.nn.attention.varlen")
    parameters = inspect.signature(real.varlen_attn).parameters
    for fake in (varlen_attn, varlen_attn_without_gqa):
        for name, parameter in inspect.signature(fake).parameters.items():
            assert parameters[name].kind == parameter.kind
            assert parameters[name].default == parameter.default
    assert real.AuxRequest(lse=True).lse


def test_the_kernel_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own, or the package's where there is one that imports."""
    own, package = ModuleType("torch.nn.attention.varlen"), ModuleType("flash_attn")
    own.varlen_attn, own.AuxRequest = varlen_attn, AuxRequest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", own)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package if name in sys.modules else None)
    look = installed_kernel.__wrapped__
    assert look().name == "torch.nn.attention.varlen"
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    assert look().name == "torch.nn.attention.varlen"
    package.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    assert look().name == "flash-attn"
    monkeypatch.delitem(sys.modules, "flash_attn")
    own.varlen_attn = lambda query, key, value, is_causal=False: query  # type: ignore[attr-defined]
    assert "window_size" in look()
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)
    assert "flash-attn" in look()


@pytest.mark.parametrize("backend", [DenseFlash(), ScatterFlash()])
def test_without_cuda_the_reason_is_given(backend: DenseFlash | ScatterFlash) -> None:
    plain = AttentionSpec(1.0)
    assert "CUDA" in (backend.unsupported(plain, CPU, torch.float16, False) or "")
    if not torch.cuda.is_available():
        assert "CUDA" in (backend.unsupported(plain, CUDA, torch.float16, False) or "")
    plan = TriePlan.identity(RaggedBatch.from_sequences([[1, 2]]))
    with pytest.raises(UnsupportedAttentionError, match="CUDA"):
        backend(*qkv(2, (2, 2)), plan, plain)


def test_refusals() -> None:
    torch_backend, package_backend = ScatterFlash(KERNELS["torch"]), ScatterFlash(KERNELS["flash-attn"])
    plain, sinks = AttentionSpec(1.0), AttentionSpec(1.0, sinks=torch.ones(2))
    assert torch_backend.unsupported(plain, CPU, torch.float16, True) is None
    assert "float32" in (torch_backend.unsupported(plain, CPU, torch.float32, False) or "")
    capped = AttentionSpec(1.0, softcap=3.0)
    assert "softcap" in (torch_backend.unsupported(capped, CPU, torch.float16, False) or "")
    assert package_backend.unsupported(capped, CPU, torch.float16, False) is None
    assert "dropout" in (
        torch_backend.unsupported(AttentionSpec(1.0, dropout=0.1), CPU, torch.float16, True) or ""
    )
    assert torch_backend.unsupported(sinks, CPU, torch.float16, False) is None
    assert "gradient" in (torch_backend.unsupported(sinks, CPU, torch.float16, True) or "")
    plan = build_plan(RaggedBatch.from_sequences([[1, 2], [1, 3]]))
    q, k, v = qkv(3, (2, 2))
    for widths in ((q, k, v[..., :8]), (q[..., :12], k[..., :12], v[..., :12])):
        with pytest.raises(UnsupportedAttentionError, match="head_dim"):
            torch_backend(*widths, plan, plain)
    with pytest.raises(UnsupportedAttentionError, match="gradient"):
        torch_backend(q.requires_grad_(), k, v, plan, sinks)
    with pytest.raises(ValueError, match="one row per token"):
        DenseFlash(KERNELS["torch"])(q, k, v, plan, plain)


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 5))
    backend = DenseFlash(torch_kernel(varlen_attn, AuxRequest(lse=True)))
    assert "7.5" in (backend.unsupported(AttentionSpec(1.0), CUDA, torch.float16, False) or "")


WITH_OUR_KERNELS = """
import torch
from radixmlp import AttentionSpec, RaggedBatch, build_plan
from radixmlp.optimized.attention import flash

moves = {kind: flash._row_moves(kind) for kind in ("cpu", "cuda")}
plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 5], [], [1, 2, 3, 4], [6]]))
q, k, v = (torch.randn(plan.num_nodes, heads, 16).half().requires_grad_() for heads in (4, 2, 2))
results = []
for kind in moves:
    expanded = moves[kind].expand((q, k, v), plan)
    back = moves[kind].compact(expanded[0] * 2, plan)
    loss = sum((x.float() * torch.arange(x.numel()).view(x.shape)).sum() for x in (*expanded, back))
    results.append((*expanded, back, *torch.autograd.grad(loss, (q, k, v))))
assert len(results) == 2 and moves["cpu"] is not moves["cuda"]
for mine, theirs in zip(*results, strict=True):
    torch.testing.assert_close(mine, theirs)
assert len(plan.memo) == 2, plan.memo.keys()
print("moved")
"""


def test_our_kernels_move_the_rows() -> None:
    """What CUDA runs, in Triton's interpreter."""
    pytest.importorskip("triton")
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-P", "-c", WITH_OUR_KERNELS]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr
    assert "moved" in run.stdout


def test_our_kernels_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith("radixmlp.kernels.")]:
        monkeypatch.delitem(sys.modules, name)
    plan = build_plan(RaggedBatch.from_sequences([[1, 2], [1, 3]]))
    moves = flash._row_moves.__wrapped__("cuda")
    assert moves.expand((torch.arange(3.0),), plan)[0].tolist() == [0, 1, 0, 2]


def test_no_tokens() -> None:
    batch = RaggedBatch.from_sequences([[], []])
    check(KERNELS["torch"], batch, AttentionSpec(1.0), (2, 1))
    check(KERNELS["torch"], batch, AttentionSpec(1.0, sinks=torch.ones(2)), (2, 1))
