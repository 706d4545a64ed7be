"""`cascade` and `cascade-1`: the reference's values and gradients, and counts that can be done by hand."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp import AttentionSpec, RaggedBatch, build_plan
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.checks import attention_errors

EXPERIMENT = load_experiment("cascade")
LEVELS = load_experiment("cascade", "levels")
BATCHES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9)
SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, sliding_window=3),
    "softcap and sinks": AttentionSpec(0.3, softcap=2.0, sinks=torch.linspace(-1, 2, 4).double()),
}


@pytest.mark.parametrize("backend", EXPERIMENT.backends(), ids=lambda backend: backend.name)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(batch=BATCHES)
@settings(max_examples=25, deadline=None)
def test_same_values_and_gradients_as_the_reference(backend, spec, batch):
    assert max(attention_errors(backend, batch, spec).values()) < 1e-12


@given(BATCHES, st.sampled_from([None, 0, 1, 2]))
@settings(max_examples=50, deadline=None)
def test_every_visible_pair_is_in_exactly_one_call(batch, levels):
    plan = build_plan(RaggedBatch.from_sequences(batch))
    schedule = LEVELS.cascade_schedule(plan, levels)
    seen = torch.zeros(plan.num_nodes, plan.num_nodes, dtype=torch.int64)
    for call in (*schedule.first, *schedule.merged):
        queries, keys = call.queries.indices("cpu"), call.keys.indices("cpu")
        for rows, columns in zip(queries, keys, strict=True):
            for i, row in enumerate(rows.tolist()):
                seen[row, columns[: call.lead + i + 1] if call.causal else columns] += 1
    rows = torch.arange(plan.num_nodes)
    visible = (rows <= rows[:, None]) & (rows[:, None] < plan.subtree_end)
    assert torch.equal(seen, visible.to(torch.int64))


def test_counts_of_one_level():
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6]]))
    count = LEVELS.counts(LEVELS.cascade_schedule(plan))
    # The prefix on itself (3 x 3), three tails on themselves (1 each), three rows on the prefix.
    assert count == {
        "calls": 3,
        "pairs": 9 + 3 + 9,
        "key_rows": 3 + 3 + 3,
        "merged_rows": 3,
        "most_merges_of_a_row": 1,
    }


def test_a_comb_costs_every_level_a_merge():
    plan = build_plan(EXPERIMENT.batches(quick=True)["comb of 12"])
    assert LEVELS.counts(LEVELS.cascade_schedule(plan))["most_merges_of_a_row"] == 11
    assert LEVELS.counts(LEVELS.cascade_schedule(plan, 1))["most_merges_of_a_row"] == 1


def test_what_is_measured_is_reported():
    measured = EXPERIMENT.measure(True, lambda _: None)
    text = EXPERIMENT.report(json.loads(json.dumps(measured)))
    for each in measured["batches"]:
        assert each["batch"] in text
        assert each["times"]["forward and backward"].keys() == {"cascade", "cascade-1", *EXPERIMENT.RIVALS}
