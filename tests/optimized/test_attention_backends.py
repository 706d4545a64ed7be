"""Every built-in backend against the fp64 reference, forward and backward, over random tries and specs."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp import AttentionSpec, RaggedBatch, TriePlan, attention_backends, build_plan
from radixmlp.optimized.attention.varlen import sdpa_varlen
from radixmlp.reference.attention import causal_attention

SHARING = ("scatter-sdpa", "trie-sdpa")


def comb(longest: int) -> list[list[int]]:
    return [[*range(n), 10_000 + n] for n in range(1, longest)]


def bushy(seed: int, count: int, longest: int, vocabulary: int) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest, (count,), generator=random).tolist()
    return [torch.randint(0, vocabulary, (n,), generator=random).tolist() for n in lengths]


TRIES = {
    "one node": [[1]],
    "one chain": [list(range(137))],
    "equal": [[1, 2, 3]] * 5,
    "prefix and branches": [[*range(40), 1000 + b, *range(7)] for b in range(20)],
    "long branches": [[*range(100), *range(1000 * b, 1000 * b + 90 + b)] for b in range(1, 5)],
    "300 one-token branches": [[7, 1000 + b] for b in range(300)],
    "comb": comb(90),
    "three levels": [
        [*range(30), i, *range(20), 50 + j, *range(10), 70 + k] for i, j, k in product(range(3), repeat=3)
    ],
    "bushy": bushy(0, 200, 12, 2),
    "bushy and long": bushy(1, 60, 200, 2),
    "forest": bushy(2, 50, 100, 1000),
    "empty ones": [[], [1, 2], [], [1, 3], []],
}  # fmt: skip


def qkv(
    plan: TriePlan, heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(plan.num_nodes)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
    return [
        torch.randn(plan.num_nodes, h, w, generator=random, dtype=torch.float64)
        .mul_(2)
        .to(dtype)
        .requires_grad_()
        for h, w in shapes
    ]


def truth(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TriePlan, spec: AttentionSpec
) -> torch.Tensor:
    """Per-sequence fp64 attention on the ragged layout, gathered: shares nothing with the backends."""
    rows = [x.double()[plan.scatter.long()] for x in (q, k, v)]
    return causal_attention(*rows, plan.cu_seqlens, spec)[plan.gather.long()]


def specs(heads: int) -> dict[str, AttentionSpec]:
    sinks = torch.linspace(-2, 3, heads, dtype=torch.float64)
    return {
        "plain": AttentionSpec(0.2),
        "window": AttentionSpec(0.2, sliding_window=5),
        "long window": AttentionSpec(0.2, sliding_window=33),
        "softcap": AttentionSpec(0.2, softcap=3.0),
        "sinks": AttentionSpec(0.2, sinks=sinks),
        "all": AttentionSpec(0.2, sliding_window=17, softcap=2.0, sinks=sinks),
    }


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("trie", TRIES)
@pytest.mark.parametrize("spec_name", specs(4))
def test_equals_reference_in_fp64(name: str, trie: str, spec_name: str) -> None:
    plan = build_plan(RaggedBatch.from_sequences(TRIES[trie]))
    spec = specs(4)[spec_name]
    inputs = qkv(plan, 4, 2, 16, 16, torch.float64)
    expected = truth(*inputs, plan, spec)
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    got = attention_backends()[name](*inputs, plan, spec)
    grads = torch.autograd.grad((got * weights).sum(), inputs)
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-10)


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(0, 2), max_size=90), min_size=1, max_size=25),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2)]),
    window=st.sampled_from([None, 1, 3, 40]),
)
def test_random_tries(sequences: list[list[int]], heads: tuple[int, int], window: int | None) -> None:
    plan = build_plan(RaggedBatch.from_sequences(sequences))
    spec = AttentionSpec(0.3, sliding_window=window)
    inputs = qkv(plan, *heads, 8, 8, torch.float64)
    for name in SHARING:
        got = attention_backends()[name](*inputs, plan, spec)
        torch.testing.assert_close(got, truth(*inputs, plan, spec), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("trie", TRIES)
def test_fp32(name: str, trie: str) -> None:
    plan, spec = build_plan(RaggedBatch.from_sequences(TRIES[trie])), specs(4)["all"]
    inputs = qkv(plan, 4, 2, 64, 64, torch.float32)
    expected = truth(*inputs, plan, spec)
    error = (attention_backends()[name](*inputs, plan, spec).double() - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("trie", ["prefix and branches", "comb", "bushy", "long branches"])
def test_low_precision_is_as_good_as_dense(name: str, dtype: torch.dtype, trie: str) -> None:
    batch = RaggedBatch.from_sequences(TRIES[trie])
    plan, spec = build_plan(batch), AttentionSpec(0.1)
    inputs = qkv(plan, 4, 2, 64, 64, dtype)
    expected = truth(*inputs, plan, spec)
    rows = plan.scatter.long()
    dense = attention_backends()["dense-sdpa"](*(x[rows] for x in inputs), TriePlan.identity(batch), spec)
    dense_error = (dense[plan.gather.long()].double() - expected).abs()
    error = (attention_backends()[name](*inputs, plan, spec).double() - expected).abs()
    ulp = torch.finfo(dtype).eps * expected.abs().max()
    assert error.square().mean().sqrt() <= 1.1 * dense_error.square().mean().sqrt() + 2 * ulp / 100
    assert error.max() <= 2 * dense_error.max() + 2 * ulp


def test_values_wider_or_narrower_than_keys() -> None:
    plan = build_plan(RaggedBatch.from_sequences(TRIES["three levels"]))
    for value_width in (4, 24):
        inputs = qkv(plan, 4, 2, 16, value_width, torch.float64)
        for name in SHARING:
            got = attention_backends()[name](*inputs, plan, AttentionSpec(0.2))
            torch.testing.assert_close(got, truth(*inputs, plan, AttentionSpec(0.2)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["dense-sdpa", *SHARING])
def test_inputs_are_not_written(name: str) -> None:
    batch = RaggedBatch.from_sequences(TRIES["bushy"])
    plan = TriePlan.identity(batch) if name.startswith("dense") else build_plan(batch)
    inputs = [x.detach() for x in qkv(plan, 4, 2, 16, 16, torch.float32)]
    before = [x.clone() for x in inputs]
    attention_backends()[name](*inputs, plan, specs(4)["all"])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("window", [None, 4])
def test_fused_dense_attention(window: int | None) -> None:
    """What other devices run: PyTorch's own kernel, per run of equal lengths."""
    batch = RaggedBatch.from_sequences([[1, 2, 3], [], [4, 5, 6], list(range(9)), [1], [2], [3, 4]])
    q, k, v = qkv(TriePlan.identity(batch), 4, 2, 16, 16, torch.float64)
    spec = AttentionSpec(0.2, sliding_window=window)
    got = sdpa_varlen(q, k, v, batch.cu_seqlens.tolist(), spec)
    torch.testing.assert_close(got, causal_attention(q, k, v, batch.cu_seqlens, spec), rtol=1e-11, atol=1e-11)


def test_input_order_is_refused() -> None:
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3, 5], [1, 2, 4, 7], [1, 2, 3, 6]]), order="input")
    inputs = qkv(plan, 2, 2, 8, 8, torch.float32)
    with pytest.raises(ValueError, match="depth-first"):
        attention_backends()["trie-sdpa"](*inputs, plan, AttentionSpec(0.2))


def test_dense_refuses_a_shared_plan() -> None:
    plan = build_plan(RaggedBatch.from_sequences([[1, 2], [1, 3]]))
    with pytest.raises(ValueError, match="one row per token"):
        attention_backends()["dense-sdpa"](*qkv(plan, 2, 2, 8, 8, torch.float32), plan, AttentionSpec(0.2))


@pytest.mark.parametrize("name", ["dense-sdpa", *SHARING])
def test_dropout_and_integers_are_refused_with_the_reason(name: str) -> None:
    backend, cpu = attention_backends()[name], torch.device("cpu")
    assert "dropout" in (backend.unsupported(AttentionSpec(1.0, dropout=0.1), cpu, torch.float32, True) or "")
    assert backend.unsupported(AttentionSpec(1.0, dropout=0.1), cpu, torch.float32, False) is None
    assert "dtype" in (backend.unsupported(AttentionSpec(1.0), cpu, torch.int32, False) or "")
