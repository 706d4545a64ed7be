"""`trie-flex`: its block mask against the mask itself, its values against the reference, its compilations counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from radixmlp import AttentionSpec, RaggedBatch, TriePlan, UnsupportedAttentionError, build_plan
from radixmlp.optimized.attention import trie_flex
from radixmlp.optimized.attention.flex_blocks import BLOCK, blocks_of, visible_pairs
from radixmlp.optimized.attention.trie_flex import TrieFlex
from radixmlp.reference.attention import trie_attention

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    TrieFlex().unsupported(AttentionSpec(1.0), CPU, torch.float32, False) is not None,
    reason="FlexAttention cannot be compiled for this CPU",
)
SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=15)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prefix_and_branches(prefix: int, own: int = 60, branches: int = 3) -> TriePlan:
    rows = [[*range(prefix), *range(1000 * b, 1000 * b + own)] for b in range(1, branches + 1)]
    return build_plan(RaggedBatch.from_sequences(rows))


def qkv(
    plan: TriePlan, heads: tuple[int, int], width: int, value_width: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(plan.num_nodes)
    shapes = ((heads[0], width), (heads[1], width), (heads[1], value_width))
    return [torch.randn(plan.num_nodes, h, w, generator=random).mul_(2).to(dtype) for h, w in shapes]


def mask_of(plan: TriePlan, window: int | None) -> np.ndarray:
    """[N', N'] bool, by walking up from every row."""
    parent = plan.parent.tolist()
    mask = np.zeros((len(parent), len(parent)), bool)
    for query in range(len(parent)):
        key, distance = query, 0
        while key >= 0 and (window is None or distance < window):
            mask[query, key] = True
            key, distance = parent[key], distance + 1
    return mask


@settings(max_examples=150, deadline=None)
@given(SEQUENCES, st.sampled_from([1, 2, 3, 8]), st.sampled_from([None, 1, 2, 5, 30]))
def test_visible_pairs_equal_the_mask(sequences: list[list[int]], block: int, window: int | None) -> None:
    plan = build_plan(RaggedBatch.from_sequences(sequences))
    mask = mask_of(plan, window)
    end, depth = (x.numpy().astype(np.int64) for x in (plan.subtree_end, plan.depth))
    part, full = visible_pairs(end, depth, window, block)
    part_set, full_set = ({*zip(*(x.tolist() for x in pairs), strict=True)} for pairs in (part, full))
    assert len(part_set) == len(part[0])
    assert len(full_set) == len(full[0])
    assert not part_set & full_set
    for query in range(-(-len(mask) // block)):
        for key in range(query + 1):
            tile = mask[query * block : (query + 1) * block, key * block : (key + 1) * block]
            if window is None:
                assert ((query, key) in part_set | full_set) == tile.any()
                assert ((query, key) in full_set) == (tile.all() and key < query)
            else:
                assert not tile.any() or (query, key) in part_set | full_set
                assert tile.all() or (query, key) not in full_set


@settings(max_examples=30, deadline=None)
@given(SEQUENCES, st.sampled_from([None, 4]))
def test_by_key_is_by_query_transposed(sequences: list[list[int]], window: int | None) -> None:
    rows = [row * 12 for row in sequences]  # several blocks
    plan = build_plan(RaggedBatch.from_sequences(rows))
    blocks = blocks_of(plan, window, backward=True)
    assert blocks.by_key is not None

    def dense(counts: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        assert lists.shape[-1] == lists.shape[-2] == counts.shape[-1] >= 2
        table = torch.zeros(lists.shape[-2:], dtype=torch.bool)
        for row, (count, columns) in enumerate(zip(counts[0, 0], lists[0, 0], strict=True)):
            assert columns[:count].unique().numel() == count
            table[row, columns[:count].long()] = True
        return table

    for first in (0, 2):
        query, key = (dense(*lists[first : first + 2]) for lists in (blocks.by_query, blocks.by_key))
        assert torch.equal(query, key.T)


def test_a_large_trie_needs_no_square_mask() -> None:
    """400,000 rows: an N' x N' mask would be 160 GB."""
    plan = build_plan(RaggedBatch.from_sequences([[b, *range(4000)] for b in range(100)]))
    counts, _, full_counts, _ = blocks_of(plan, None).by_query
    end, rows = plan.subtree_end.long(), torch.arange(plan.num_nodes)
    assert int(counts.sum() + full_counts.sum()) * BLOCK**2 < 1.1 * float((end - rows).sum())


@needs_compiler
def test_ten_sizes_compile_once_and_again_for_gqa() -> None:
    """Among them one row, whole blocks, and as many blocks as there are heads."""
    before = counters["stats"]["unique_graphs"]
    prefixes = (68, 8, 204, 0, 196, 330, 71, 460, 129, 17)
    plans = [prefix_and_branches(n) for n in prefixes[:-1]]
    plans.append(build_plan(RaggedBatch.from_sequences([[1]])))
    assert any(plan.num_nodes % BLOCK == 0 for plan in plans)
    for heads in ((4, 4), (4, 2)):
        for plan in plans:
            q, k, v = qkv(plan, heads, 16, 16, torch.float32)
            expected = trie_attention(q.double(), k.double(), v.double(), plan, AttentionSpec(0.2))
            got = TrieFlex()(q, k, v, plan, AttentionSpec(0.2))
            assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert counters["stats"]["unique_graphs"] - before <= 2


SPECS = {
    "plain": AttentionSpec(0.2),
    "window": AttentionSpec(0.2, sliding_window=40),
    "all": AttentionSpec(0.15, sliding_window=150, softcap=3.0),
}


def check_values(spec: AttentionSpec, dtype: torch.dtype, widths: tuple[int, int] = (16, 16)) -> None:
    """Several shapes of trie; below fp32 as good as the same computation rounded once."""
    sequences = [[*range(9), *(7 * b + i for i in range(b))] for b in range(1, 40)]
    for plan in (
        prefix_and_branches(200),
        build_plan(RaggedBatch.from_sequences(sequences)),
        build_plan(RaggedBatch.from_sequences([[b] for b in range(300)])),
        build_plan(RaggedBatch.from_sequences([[], [1, 2], []])),
    ):
        inputs = qkv(plan, (4, 2), *widths, dtype)
        before = [x.clone() for x in inputs]
        expected = trie_attention(*(x.double() for x in inputs), plan, spec)
        got = TrieFlex()(*inputs, plan, spec)
        assert got.dtype == dtype
        limit = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        assert (got.double() - expected).abs().max() <= limit * expected.abs().max()
        assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@needs_compiler
@pytest.mark.slow
def test_window_and_softcap_by_value() -> None:
    check_values(SPECS["all"], torch.float32)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS)
def test_values(spec: str, dtype: torch.dtype) -> None:
    check_values(SPECS[spec], dtype)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("widths", [(16, 40), (24, 8)])
def test_values_wider_or_narrower_than_keys(widths: tuple[int, int]) -> None:
    check_values(SPECS["plain"], torch.float32, widths)


@needs_compiler
@pytest.mark.slow
def test_scales_and_softcaps_of_several_layers() -> None:
    """A second value of a float must not become a symbol, which FlexAttention does not compile."""
    plan = prefix_and_branches(70)
    inputs = qkv(plan, (2, 2), 16, 16, torch.float32)
    for spec in (AttentionSpec(0.2, softcap=2.0), AttentionSpec(0.2, softcap=3.0), AttentionSpec(0.3)):
        expected = trie_attention(*(x.double() for x in inputs), plan, spec)
        assert (TrieFlex()(*inputs, plan, spec) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("window", [None, 40])
def test_sinks_by_the_log_sum_exp(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA runs for sinks, uncompiled: a CPU has no compiled log-sum-exp."""
    monkeypatch.setattr(trie_flex, "_compiled", lambda: trie_flex._attend)
    plan = prefix_and_branches(70)
    inputs = qkv(plan, (4, 2), 16, 16, torch.float32)
    spec = AttentionSpec(0.2, window, sinks=torch.linspace(-2, 3, 4, dtype=torch.float64))
    panels = [x.transpose(0, 1)[None] for x in inputs]
    out = trie_flex._run_compiled(panels, blocks_of(plan, window), spec, wants_grad=False)
    expected = trie_attention(*(x.double() for x in inputs), plan, spec)
    assert (out[0].transpose(0, 1) - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_refusals() -> None:
    backend, plain = TrieFlex(), AttentionSpec(1.0)
    assert "backward" in (backend.unsupported(plain, CPU, torch.float32, True) or "")
    assert "float64" in (backend.unsupported(plain, CPU, torch.float64, False) or "")
    assert "dtype" in (backend.unsupported(plain, CPU, torch.int32, False) or "")
    assert "sinks" in (
        backend.unsupported(AttentionSpec(1.0, sinks=torch.ones(2)), CPU, torch.float32, False) or ""
    )
    assert "dropout" in (backend.unsupported(AttentionSpec(1.0, dropout=0.1), CPU, torch.float32, True) or "")
    assert "meta" in (backend.unsupported(plain, torch.device("meta"), torch.float32, False) or "")
    cuda = torch.device("cuda")
    assert backend.unsupported(AttentionSpec(1.0, sinks=torch.ones(2)), cuda, torch.bfloat16, True) is None
    plan = prefix_and_branches(5)
    q, k, v = qkv(plan, (2, 2), 16, 16, torch.float32)
    with pytest.raises(UnsupportedAttentionError, match="no backward"):
        backend(q.requires_grad_(), k, v, plan, plain)
    unordered = build_plan(RaggedBatch.from_sequences([[1, 2], [1, 3]]), order="input")
    with pytest.raises(ValueError, match="depth-first"):
        backend(*qkv(unordered, (2, 2), 16, 16, torch.float32), unordered, plain)


def test_without_a_compiler_or_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("no compiler found")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    trie_flex._without_compiler.cache_clear()
    try:
        reason = TrieFlex().unsupported(AttentionSpec(1.0), CPU, torch.float32, False)
    finally:
        trie_flex._without_compiler.cache_clear()
    assert reason is not None
    assert "C++ compiler" in reason or "AVX2" in reason
    monkeypatch.setattr(trie_flex.importlib.util, "find_spec", lambda _name: None)
    assert "triton" in (
        TrieFlex().unsupported(AttentionSpec(1.0), torch.device("cuda"), torch.bfloat16, False) or ""
    )


def test_no_rows() -> None:
    plan = build_plan(RaggedBatch.from_sequences([[], []]))
    q, k, v = (torch.empty(0, h, w) for h, w in ((4, 16), (2, 16), (2, 8)))
    if TrieFlex().unsupported(AttentionSpec(1.0), CPU, torch.float32, False) is None:
        assert TrieFlex()(q, k, v, plan, AttentionSpec(1.0)).shape == (0, 4, 8)
