"""Attention by the definition, query by query, against the two formulations of the reference."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.reference.attention import causal_attention, leaf_paths, trie_attention
from radixmlp.reference.trie import build_plan

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=6)
HEADS = st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)])


@st.composite
def specs(draw, num_heads):
    sinks = torch.randn(num_heads, dtype=torch.float64) if draw(st.booleans()) else None
    return AttentionSpec(
        softmax_scale=draw(st.sampled_from([0.2, 1.0, 3.0])),
        sliding_window=draw(st.sampled_from([None, 1, 2, 3, 100])),
        softcap=draw(st.sampled_from([None, 0.5, 20.0])),
        sinks=sinks,
    )


@st.composite
def problems(draw):
    """A plan, a spec, and random q, k, v in its compact layout (D = 4, Dv = 3)."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    batch = RaggedBatch.from_sequences(draw(SEQUENCES))
    plan = build_plan(batch, draw(st.sampled_from(["trie", "input"])))
    Hq, Hkv = draw(HEADS)
    q, k, v = random_qkv(plan.num_nodes, Hq, Hkv)
    return plan, draw(specs(Hq)), q, k, v


def random_qkv(rows, Hq, Hkv, dtype=torch.float64):
    return (
        torch.randn(rows, Hq, 4, dtype=dtype),
        torch.randn(rows, Hkv, 4, dtype=dtype),
        torch.randn(rows, Hkv, 3, dtype=dtype),
    )


def by_definition(q, k, v, cu_seqlens, spec):
    """One query of one head at a time, with numbers and loops."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    for start, end in pairwise(cu_seqlens.tolist()):
        for row in range(start, end):
            first = start if spec.sliding_window is None else max(start, row - spec.sliding_window + 1)
            for head in range(q.shape[1]):
                keys = range(first, row + 1)
                scores = [float(q[row, head] @ k[j, head // group]) * spec.softmax_scale for j in keys]
                if spec.softcap is not None:
                    scores = [spec.softcap * math.tanh(s / spec.softcap) for s in scores]
                total = sum(math.exp(s) for s in scores)
                if spec.sinks is not None:
                    total += math.exp(float(spec.sinks[head]))
                for score, j in zip(scores, keys, strict=True):
                    out[row, head] += math.exp(score) / total * v[j, head // group]
    return out


@given(problems())
@settings(max_examples=60, deadline=None)
def test_causal_attention_is_the_definition(problem):
    plan, spec, q, k, v = problem
    q, k, v = (x[plan.scatter] for x in (q, k, v))
    got = causal_attention(q, k, v, plan.cu_seqlens, spec)
    torch.testing.assert_close(got, by_definition(q, k, v, plan.cu_seqlens, spec), rtol=0, atol=1e-12)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_trie_attention_is_causal_attention_without_the_copies(problem):
    plan, spec, q, k, v = problem
    ragged = causal_attention(q[plan.scatter], k[plan.scatter], v[plan.scatter], plan.cu_seqlens, spec)
    compact = trie_attention(q, k, v, plan, spec)
    assert compact.shape == (plan.num_nodes, q.shape[1], 3)
    torch.testing.assert_close(compact[plan.scatter], ragged, rtol=0, atol=1e-12)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_gradients_of_both_agree(problem):
    plan, spec, *qkv = problem
    weight = torch.randn(plan.num_tokens, qkv[0].shape[1], 3, dtype=torch.float64)

    def gradients(attend):
        leaves = [x.clone().requires_grad_() for x in qkv]
        (attend(*leaves) * weight).sum().backward()
        return [x.grad for x in leaves]

    rows = plan.scatter
    ragged = gradients(lambda q, k, v: causal_attention(q[rows], k[rows], v[rows], plan.cu_seqlens, spec))
    compact = gradients(lambda q, k, v: trie_attention(q, k, v, plan, spec)[rows])
    for a, b in zip(ragged, compact, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@given(SEQUENCES, st.sampled_from([None, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_in_depth_first_order_an_interval_is_the_whole_mask(sequences, window):
    plan = build_plan(RaggedBatch.from_sequences(sequences), "trie")
    q, k, v = random_qkv(plan.num_nodes, 2, 2)
    row = torch.arange(plan.num_nodes)
    sees = (row[None] <= row[:, None]) & (row[:, None] < plan.subtree_end[None])
    if window is not None:
        sees &= plan.depth[:, None] - plan.depth[None] < window
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~sees, float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    got = trie_attention(q, k, v, plan, AttentionSpec(1.0, window))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_plain_attention_is_pytorchs():
    q, k, v = random_qkv(10, 4, 2)
    plan = TriePlan.identity(RaggedBatch.from_sequences([list(range(10))]))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    for got in (
        causal_attention(q, k, v, plan.cu_seqlens, AttentionSpec(0.3)),
        trie_attention(q, k, v, plan, AttentionSpec(0.3)),
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_result_has_the_dtype_of_q_and_its_precision(dtype):
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 5]]))
    q, k, v = (x.to(dtype) for x in random_qkv(plan.num_nodes, 2, 1))
    got = trie_attention(q, k, v, plan, AttentionSpec(0.5))
    assert got.dtype == dtype
    truth = trie_attention(q.double(), k.double(), v.double(), plan, AttentionSpec(0.5))
    assert (got.double() - truth).abs().max() < 8 * torch.finfo(dtype).eps * v.abs().max()


def test_paths_cover_every_node_once():
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3, 5], [1, 2, 4, 7], [1, 2], [1, 2, 3, 6], [8]]))
    assert [(path.tolist(), shared) for path, shared in leaf_paths(plan)] == [
        ([0, 1, 2, 3], 0),
        ([0, 1, 2, 4], 3),
        ([0, 1, 5, 6], 2),
        ([7], 0),
    ]


def test_a_window_counts_along_the_path_not_in_compact_rows():
    """After a long first branch the second branch lies far off in compact rows, near along its path."""
    plan = build_plan(RaggedBatch.from_sequences([[1, *range(10, 30)], [1, 2]]))
    q, k, v = random_qkv(plan.num_nodes, 1, 1)
    narrow = trie_attention(q, k, v, plan, AttentionSpec(1.0, sliding_window=2))
    full = trie_attention(q, k, v, plan, AttentionSpec(1.0))
    torch.testing.assert_close(narrow[-1], full[-1], rtol=0, atol=1e-12)


BAD = {
    "dropout": ({"spec": AttentionSpec(1.0, dropout=0.1)}, r"dropout is 0\.1"),
    "window of zero": ({"spec": AttentionSpec(1.0, sliding_window=0)}, "sliding_window is 0"),
    "softcap of zero": ({"spec": AttentionSpec(1.0, softcap=0.0)}, r"softcap is 0\.0"),
    "sinks per KV head": ({"spec": AttentionSpec(1.0, sinks=torch.zeros(2))}, r"one per query head, 4"),
    "heads that do not divide": ({"q": torch.zeros(3, 3, 4)}, "3, 2, 2 heads"),
    "K and V heads differ": ({"v": torch.zeros(3, 1, 4)}, "4, 2, 1 heads"),
    "head_dim": ({"k": torch.zeros(3, 2, 5)}, "q has head_dim 4, but k has 5"),
    "a row too many": (
        {"k": torch.zeros(4, 2, 4)},
        r"k has shape \(4, 2, 4\): expected \[3, heads, head_dim\]",
    ),
    "a batch dimension": ({"q": torch.zeros(1, 3, 4, 4)}, r"q has shape \(1, 3, 4, 4\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(case):
    change, message = BAD[case]
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3]]))
    arguments = {
        "q": torch.zeros(3, 4, 4),
        "k": torch.zeros(3, 2, 4),
        "v": torch.zeros(3, 2, 4),
        "spec": AttentionSpec(1.0),
    } | change
    with pytest.raises(ValueError, match=message):
        trie_attention(plan=plan, **arguments)
    with pytest.raises(ValueError, match=message):
        causal_attention(cu_seqlens=plan.cu_seqlens, **arguments)
