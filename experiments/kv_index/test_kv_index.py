"""`kv-index`: the reference's values and gradients, tiles of every size; pages against a count by hand."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp import AttentionSpec, RaggedBatch, build_plan
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.checks import attention_errors

EXPERIMENT = load_experiment("kv_index")
WALK = load_experiment("kv_index", "walk")
PAGES = load_experiment("kv_index", "pages")
BATCHES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9)
SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, sliding_window=3),
    "softcap and sinks": AttentionSpec(0.3, softcap=2.0, sinks=torch.linspace(-1, 2, 4).double()),
}


@pytest.mark.parametrize(("query_rows", "key_rows"), [(256, 256), (2, 3), (1, 1)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(batch=BATCHES)
@settings(max_examples=20, deadline=None)
def test_same_values_and_gradients_as_the_reference(spec, query_rows, key_rows, batch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WALK, "QUERY_ROWS", query_rows)
        patch.setattr(WALK, "KEY_ROWS", key_rows)
        (backend,) = EXPERIMENT.backends()
        assert max(attention_errors(backend, batch, spec).values()) < 1e-12


@given(BATCHES)
@settings(max_examples=30, deadline=None)
def test_an_index_is_its_blocks_path(batch):
    plan = build_plan(RaggedBatch.from_sequences(batch))
    for block in WALK.blocks_of(plan):
        row = block.stop - 1
        path = []
        while row >= 0:
            path.append(row)
            row = int(plan.parent[row])
        assert block.index.tolist() == path[::-1]


def by_hand(batch, page):
    """(full pages, own pages, table entries, filled rows) from the tokens themselves."""
    full, own, entries, filled = set(), 0, 0, 0
    for sequence in batch:
        for end in range(page, len(sequence) + 1, page):
            full.add(tuple(sequence[:end]))
            entries += 1
        rest = len(sequence) % page
        own += rest > 0
        entries += rest > 0
        filled += rest
    return len(full), own, entries, len(full) * page + filled


@given(BATCHES, st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_pages_are_those_counted_by_hand(batch, page):
    pages = PAGES.pages_of(build_plan(RaggedBatch.from_sequences(batch)), page)
    assert (pages.shared, pages.own, pages.entries, pages.filled) == by_hand(batch, page)
    assert pages.rows == (pages.shared + pages.own) * page


def test_pages_of_one_row_are_the_compact_layout_and_empty_pages_are_refused():
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3], [1, 2, 4], []]))
    assert PAGES.pages_of(plan, 1).rows == plan.num_nodes
    with pytest.raises(ValueError, match="page of 0"):
        PAGES.pages_of(plan, 0)


def test_what_is_measured_is_reported():
    measured = json.loads(json.dumps(EXPERIMENT.measure(True, lambda _: None)))
    text = EXPERIMENT.report(measured)
    assert all(each["batch"] in text for each in measured["batches"])
