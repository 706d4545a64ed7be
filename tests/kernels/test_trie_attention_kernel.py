"""The attention kernels in Triton's interpreter against fp64 autograd of the reference.

float32 and float16: the interpreter multiplies bfloat16 matrices wrongly. Outputs start as NaN.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from radixmlp import AttentionSpec, RaggedBatch, TriePlan, build_plan
from radixmlp.kernels import trie_attention as forward_module
from radixmlp.kernels import trie_attention_gradients as backward_module
from radixmlp.kernels import trie_launch
from radixmlp.kernels.trie_attention import trie_attention
from radixmlp.kernels.trie_attention_backward import trie_attention_backward
from radixmlp.optimized.attention.trie_triton import TrieTriton
from radixmlp.reference.attention import leaf_paths
from radixmlp.reference.attention import trie_attention as reference_attention

pytestmark = pytest.mark.usefixtures("nan_filled")

# Largest error, relative to max|truth|. float32: as in verification. float16: weights, scores' gradients and the
# result are rounded once each (half an ulp), gradients go through two such roundings.
FORWARD_LIMIT = {torch.float32: 1e-5, torch.float16: 2**-10}
GRADIENT_LIMIT = {torch.float32: 1e-5, torch.float16: 2**-9}

TRIES = {
    **{f"chain of {n}": [list(range(n))] for n in (1, 127, 128, 129, 137)},
    "comb": [[*range(n), 10_000 + n] for n in range(1, 90)],
    "300 one-token branches": [[7, 1000 + b] for b in range(300)],
    "three levels": [
        [*range(30), i, *range(20), 50 + j, *range(10), 70 + k] for i, j, k in product(range(3), repeat=3)
    ],
    "prefix and branches": [[*range(140), *range(1000 * b, 1000 * b + 50 + b)] for b in range(1, 4)],
    "few branches": [[*range(60), b, *range(9)] for b in range(3)],
    "empty": [[]],
}
SINKS = torch.tensor([-2.0, 0.0, 1.0, 3.0])
SPECS = {
    "plain": AttentionSpec(0.1),
    "window": AttentionSpec(0.1, sliding_window=33),
    "softcap": AttentionSpec(0.1, softcap=3.0),
    "sinks": AttentionSpec(0.1, sinks=SINKS),
    "all": AttentionSpec(0.1, sliding_window=70, softcap=2.0, sinks=SINKS),
}
SAMPLED = [
    ("chain of 1", "all", torch.float32, 96),
    ("chain of 129", "window", torch.float32, 64),
    ("few branches", "all", torch.float32, 64),
    ("chain of 127", "sinks", torch.float16, 64),
    ("chain of 128", "softcap", torch.float16, 128),
    ("chain of 137", "plain", torch.float16, 256),
    ("comb", "all", torch.float16, 64),
    ("300 one-token branches", "plain", torch.float16, 96),
    ("prefix and branches", "window", torch.float16, 128),
    ("few branches", "sinks", torch.float16, 192),
    ("three levels", "plain", torch.float16, 64),
    ("empty", "all", torch.float32, 64),
]
ALL = [
    *product(TRIES, SPECS, [torch.float16], [64]),
    *product(TRIES, ["plain", "all"], [torch.float16], [96, 128, 192, 256]),
    *product(["few branches", "comb", "chain of 129"], SPECS, [torch.float32], [64, 96, 128]),
]


def plan_of(trie: str) -> TriePlan:
    return build_plan(RaggedBatch.from_sequences(TRIES[trie]))


def qkv(
    plan: TriePlan, heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(plan.num_nodes)
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
    q, k, v = (
        torch.randn(plan.num_nodes, h, w, generator=random).to(dtype).requires_grad_() for h, w in shapes
    )
    return q, k, v


def error(got: Tensor, truth: Tensor, floor: float = 1e-30) -> float:
    """Largest, relative to max|truth| (or to `floor`, where the truth is smaller); infinite where not finite."""
    if truth.numel() == 0:
        return 0.0 if got.shape == truth.shape else float("inf")
    largest = (got.double() - truth).abs().max() / truth.abs().max().clamp_min(floor)
    return float(torch.nan_to_num(largest, nan=float("inf")))


def log_sum_exp(q: Tensor, k: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
    """[N', Hq] in fp64, row by row along the paths."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    for path, _ in leaf_paths(plan):
        for i, node in enumerate(path.tolist()):
            keys = path[: i + 1][-(spec.sliding_window or len(path)) :]
            scores = torch.einsum("hd,khd->hk", q[node].double(), k[keys].double()) * spec.softmax_scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.sinks is not None:
                scores = torch.cat([scores, spec.sinks.double()[:, None]], 1)
            lse[node] = scores.logsumexp(1)
    return lse


def errors(plan: TriePlan, spec: AttentionSpec, inputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, float]:
    """Of out, dq, dk, dv and dsinks; gradients relative to at least 1."""
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks.clone().requires_grad_())
    leaves = [x for x in (*inputs, spec.sinks) if x is not None]
    out = TrieTriton()(*inputs, plan, spec)
    truth = reference_attention(*(x.double() for x in inputs), plan, spec)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    grads = torch.autograd.grad((out * weights).sum(), leaves)
    expected = torch.autograd.grad((truth * weights.double()).sum(), leaves)
    assert [x.dtype for x in (out, *grads)] == [x.dtype for x in (inputs[0], *leaves)]
    found = {"out": error(out.detach(), truth.detach())}
    for name, grad, right in zip(("dq", "dk", "dv", "dsinks"), grads, expected, strict=False):
        found[name] = error(grad, right.double(), floor=1.0)
    return found


def check(plan: TriePlan, spec: AttentionSpec, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    dtype = inputs[0].dtype
    for name, found in errors(plan, spec, inputs).items():
        limit = FORWARD_LIMIT[dtype] if name == "out" else GRADIENT_LIMIT[dtype]
        assert found <= limit, f"{name} is {found:.2e} from the truth, limit {limit:.2e}"


@pytest.mark.parametrize(("trie", "spec", "dtype", "width"), SAMPLED)
def test_equals_reference(trie: str, spec: str, dtype: torch.dtype, width: int) -> None:
    plan = plan_of(trie)
    check(plan, SPECS[spec], qkv(plan, 4, 2, width, width, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("trie", "spec", "dtype", "width"), ALL)
def test_equals_reference_everywhere(trie: str, spec: str, dtype: torch.dtype, width: int) -> None:
    plan = plan_of(trie)
    check(plan, SPECS[spec], qkv(plan, 4, 2, width, width, dtype))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (14, 2), (20, 1), (4, 4)])
def test_any_group_of_heads(heads: tuple[int, int]) -> None:
    """One head to a tile, numbers of heads that do not divide it, and a group that takes several tiles."""
    plan = plan_of("few branches")
    check(plan, SPECS["window"], qkv(plan, *heads, 64, 64, torch.float16))


def test_narrower_values() -> None:
    plan = plan_of("few branches")
    check(plan, SPECS["window"], qkv(plan, 2, 1, 192, 128, torch.float16))


@pytest.mark.parametrize("name", ["plain", "all"])
def test_log_sum_exp(name: str) -> None:
    plan, spec = plan_of("three levels"), SPECS[name]
    q, k, v = (x.detach() for x in qkv(plan, 4, 2, 64, 64, torch.float32))
    lse = trie_attention(q, k, v, plan, spec)[1]
    assert lse.dtype == torch.float32
    assert error(lse, log_sum_exp(q, k, plan, spec)) <= 1e-6


def test_strided_inputs_and_gradients() -> None:
    """As attention layers have them: slices of one projection, heads outside; and an expanded gradient."""
    plan, spec = plan_of("comb"), SPECS["sinks"]
    q, k, v = (x.detach() for x in qkv(plan, 4, 2, 64, 64, torch.float16))
    heads_outside = q.transpose(0, 1).contiguous().transpose(0, 1)
    sliced = torch.cat([q, k, v], 1)[:, 4:6]
    odd = torch.cat([v.flatten(1), v[:, 0, :3]], 1)[:, :128].unflatten(1, (2, 64))
    out, lse = trie_attention(q, k, v, plan, spec)
    got, got_lse = trie_attention(heads_outside, sliced, odd, plan, spec)
    assert torch.equal(got, out)
    assert torch.equal(got_lse, lse)
    ones = torch.ones_like(out)
    expanded = torch.ones((), dtype=out.dtype).expand(out.shape)
    for one, other in zip(
        trie_attention_backward(ones, q, k, v, out, lse, plan, spec),
        trie_attention_backward(expanded, heads_outside, sliced, odd, out, lse, plan, spec),
        strict=True,
    ):
        assert torch.equal(one, other)


def test_split_key_blocks_and_the_same_bits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trie_launch, "PROGRAMS", 10_000)
    monkeypatch.setattr(trie_launch, "SHORTEST_PART", 2)
    plan = plan_of("prefix and branches")
    inputs = qkv(plan, 4, 1, 64, 64, torch.float16)
    check(plan, SPECS["all"], inputs)
    work = next(value for key, value in plan.memo.items() if key[0] == "key work")
    assert work.num_slots > 3
    out, lse = trie_attention(*(x.detach() for x in inputs), plan, SPECS["all"])
    arguments = (torch.ones_like(out), *(x.detach() for x in inputs), out, lse, plan, SPECS["all"])
    for one, other in zip(
        trie_attention_backward(*arguments), trie_attention_backward(*arguments), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_a_hidden_key_with_a_huge_score(name: str) -> None:
    """A score that overflows the exponential beside what other rows see must not reach them."""
    plan = build_plan(RaggedBatch.from_sequences([[1, *range(10, 40)], [1, *range(50, 80)]]))
    q, k, v = qkv(plan, 2, 1, 64, 64, torch.float32)
    with torch.no_grad():
        k[30] *= 1e4  # the last of the first branch: seen by itself alone,
        q[30] = 0  # where its score is 0, so that fp32 can tell the gradients
    check(plan, replace(SPECS[name], softmax_scale=1.0), (q, k, v))


@triton.jit
def sees_the_row_after_the_subtree(
    query, query_depth, key, key_end, key_depth, window, HAS_WINDOW: tl.constexpr
):
    visible = (key <= query) & (query <= key_end)
    if HAS_WINDOW:
        visible = visible & (query_depth - key_depth < window)
    return visible


@triton.jit
def sees_one_past_the_window(query, query_depth, key, key_end, key_depth, window, HAS_WINDOW: tl.constexpr):
    visible = (key <= query) & (query < key_end)
    if HAS_WINDOW:
        visible = visible & (query_depth - key_depth <= window)
    return visible


@triton.jit
def sees_itself_not(query, query_depth, key, key_end, key_depth, window, HAS_WINDOW: tl.constexpr):
    visible = (key < query) & (query < key_end)
    if HAS_WINDOW:
        visible = visible & (query_depth - key_depth < window)
    return visible


@pytest.mark.parametrize("module", [forward_module, backward_module])
@pytest.mark.parametrize(
    ("fault", "spec"),
    [
        (sees_the_row_after_the_subtree, "plain"),
        (sees_itself_not, "sinks"),
        (sees_one_past_the_window, "window"),
    ],
)
def test_a_wrong_mask_shows(
    monkeypatch: pytest.MonkeyPatch, module: object, fault: object, spec: str
) -> None:
    monkeypatch.setattr(module, "is_visible", fault)
    plan = plan_of("comb")
    found = errors(plan, SPECS[spec], qkv(plan, 4, 2, 64, 64, torch.float16))
    wrong = ("out",) if module is forward_module else ("dq", "dk", "dv")
    assert all(found[name] > 10 * GRADIENT_LIMIT[torch.float16] for name in wrong)


def test_sinks_counted_per_block_show(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = forward_module._attend

    def with_another_sink(*arguments):
        total, weight, top = attend(*arguments)
        return total, weight + tl.exp2(0.0 - top), top

    monkeypatch.setattr(forward_module, "_attend", with_another_sink)
    plan, spec = plan_of("chain of 137"), AttentionSpec(0.1, sinks=torch.zeros(4))
    found = errors(plan, spec, qkv(plan, 4, 2, 64, 64, torch.float16))
    assert found["out"] > 10 * FORWARD_LIMIT[torch.float16]


def test_bad_input_is_refused() -> None:
    plan = plan_of("comb")
    q, k, v = (x.detach() for x in qkv(plan, 4, 2, 64, 64, torch.float32))
    spec = AttentionSpec(0.1)
    narrow = (q[..., :32], k[..., :32], v[..., :32])
    wide = [torch.zeros(plan.num_nodes, 2, 256) for _ in range(3)]
    for inputs, given, words in [
        ((q[1:], k, v), spec, "q has shape"),
        ((q[:, :3], k, v), spec, "heads"),
        ((q, k[..., :32], v), spec, "head_dim 64"),
        (narrow, spec, "head_dim 32 .* not among"),
        (wide, spec, "head_dim 256 .*float32"),
        ((q, k.half(), v), spec, "k is torch.float16"),
        ((q.double(), k.double(), v.double()), spec, "float64"),
        ((q, k, v), AttentionSpec(0.0), "softmax_scale"),
        ((q, k, v), AttentionSpec(0.1, softcap=0.0), "softcap"),
        ((q, k, v), AttentionSpec(0.1, sliding_window=0), "sliding_window"),
        ((q, k, v), AttentionSpec(0.1, sinks=torch.zeros(3)), "sinks"),
    ]:
        with pytest.raises(ValueError, match=words):
            trie_attention(*inputs, plan, given)
