"""The schedule of `trie-sdpa`: every visible pair once, no other, and work proportional to the visible pairs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp import RaggedBatch, TriePlan, build_plan
from radixmlp.optimized.attention.schedule import Call, build_schedule, segments_of


def visible_pairs(plan: TriePlan) -> torch.Tensor:
    """[N', N'] bool by walking parents."""
    seen = torch.zeros(plan.num_nodes, plan.num_nodes, dtype=torch.bool)
    parent = plan.parent.tolist()
    for row in range(plan.num_nodes):
        node = row
        while node >= 0:
            seen[row, node] = True
            node = parent[node]
    return seen


def covered(call: Call, nodes: int) -> torch.Tensor:
    """[N', N'] how often the call lets a query see a key, padding left out."""
    cpu = torch.device("cpu")
    queries, keys = call.queries.indices(cpu), call.keys.indices(cpu)
    n, lq, lk = queries.shape[0], queries.shape[1], keys.shape[1]
    seen = torch.ones(n, lq, lk, dtype=torch.bool) if call.visible is None else call.visible.clone()
    if call.causal:
        seen &= torch.ones(lq, lk, dtype=torch.bool).tril(call.lead)
    if call.queries.real is not None:
        seen &= call.queries.real[:, :, None]
    count = torch.zeros(nodes, nodes, dtype=torch.int64)
    panel, query, key = seen.nonzero(as_tuple=True)
    count.index_put_((queries[panel, query], keys[panel, key]), torch.ones_like(query), accumulate=True)
    return count


def computed_pairs(plan: TriePlan) -> int:
    schedule = build_schedule(plan)
    return sum(c.queries.n * c.queries.length * c.keys.length for c in (*schedule.first, *schedule.merged))


sequences = st.one_of(
    st.lists(st.lists(st.integers(0, 1), max_size=60), max_size=12),
    st.lists(st.lists(st.integers(0, 3), max_size=8), max_size=60),
    st.lists(st.integers(1, 120).map(lambda n: [*range(n), 1000 + n]), max_size=10),
    st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90)), max_size=10).map(
        lambda pairs: [[*range(a), *range(500 + a, 500 + a + b)] for a, b in pairs]
    ),
)


@settings(max_examples=150, deadline=None)
@given(sequences)
def test_every_visible_pair_is_in_exactly_one_call(batch: list[list[int]]) -> None:
    plan = build_plan(RaggedBatch.from_sequences(batch))
    schedule = build_schedule(plan)
    total = torch.zeros(plan.num_nodes, plan.num_nodes, dtype=torch.int64)
    for call in (*schedule.first, *schedule.merged):
        total += covered(call, plan.num_nodes)
    assert torch.equal(total, visible_pairs(plan).long())


@settings(max_examples=60, deadline=None)
@given(sequences)
def test_first_calls_write_every_row_once(batch: list[list[int]]) -> None:
    plan = build_plan(RaggedBatch.from_sequences(batch))
    rows = []
    for call in build_schedule(plan).first:
        indices = call.queries.indices(torch.device("cpu"))
        rows.append(indices[call.queries.real] if call.queries.real is not None else indices.flatten())
    written = torch.cat(rows).sort().values if rows else torch.zeros(0, dtype=torch.int64)
    assert torch.equal(written, torch.arange(plan.num_nodes))


def test_segments_start_at_roots_and_below_branches() -> None:
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3, 5], [1, 2, 4, 7], [1, 2, 3, 6], [9]]))
    starts, stops, ends = segments_of(plan)
    assert (starts, stops, ends) == ([0, 2, 3, 4, 5, 7], [2, 3, 4, 5, 7, 8], [7, 5, 4, 5, 7, 8])


WIDE = {
    "500 branches of 7": [[*range(300), 1000 + b, *range(6)] for b in range(500)],
    "branches of mixed length": [[*range(300), 1000 + b, *range(b % 90)] for b in range(300)],
    "one-token prefix": [[1, 1000 + b, *range(50)] for b in range(300)],
    "binary": [[int(bit) for bit in f"{i:011b}"] for i in range(2048)],
    "comb": [[*range(n), 5000 + n] for n in range(1, 1200)],
    "one chain": [list(range(3000))],
    "unshared": [[b, *range(b % 50)] for b in range(400)],
    "three levels": [
        [*range(200), 300 + i, *range(100), 400 + j, *range(30), 500 + k, *range(20)]
        for i in range(8)
        for j in range(8)
        for k in range(4)
    ],
}


@pytest.mark.parametrize("name", WIDE)
def test_work_is_proportional_to_the_visible_pairs(name: str) -> None:
    plan = build_plan(RaggedBatch.from_sequences(WIDE[name]))
    visible = int((plan.depth.long() + 1).sum())
    # A causal panel is counted in full, so 2 is what plain causal attention would have.
    assert computed_pairs(plan) <= 2.2 * visible + 64 * plan.num_nodes


def test_hundreds_of_branches_take_a_handful_of_calls() -> None:
    for name in ("500 branches of 7", "one-token prefix", "unshared"):
        schedule = build_schedule(build_plan(RaggedBatch.from_sequences(WIDE[name])))
        assert len(schedule.first) + len(schedule.merged) <= 12, name
