"""The brute-force count and the index checks, on arbitrary batches."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.compression import check_index, count_distinct_prefixes
from radixmlp.verify.records import Workload
from radixmlp.verify.subject import Subject, fast_path

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=6), max_size=8)


def batch_of(rows, keys=None):
    ids, positions = ([[pair[i] for pair in row] for row in rows] for i in (0, 1))
    return RaggedBatch.from_sequences(ids, positions, keys)


@given(ROWS, st.data())
def test_the_count_is_the_number_of_distinct_prefixes(rows, data):
    keys = data.draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows)))
    prefixes = {
        (key, tuple(row[:end])) for key, row in zip(keys, rows, strict=True) for end in range(1, len(row) + 1)
    }
    assert count_distinct_prefixes(batch_of(rows, keys)) == len(prefixes)
    assert count_distinct_prefixes(batch_of(rows)) == len({prefix for _, prefix in prefixes})


@given(ROWS)
def test_the_fast_builder_passes(rows):
    records = check_index(Workload("any", batch_of(rows)), fast_path())
    assert len(records) == 5
    assert all(record.passed for record in records)


BATCH = batch_of([[(1, 0), (2, 1), (3, 2)], [(1, 0), (2, 1), (4, 2)], [(5, 0)]])


@pytest.mark.parametrize("name", ["gather", "scatter", "parent", "subtree_end", "input_ids", "position_ids"])
def test_any_map_that_is_off_by_one_is_red(name):
    def build_plan(batch, order="trie"):
        plan = radixmlp.build_plan(batch, order=order)
        changed = getattr(plan, name).clone()
        changed[-1] += 1 if int(changed[-1]) <= 0 else -1
        return dataclasses.replace(plan, **{name: changed})

    records = check_index(Workload("any", BATCH), Subject(radixmlp.forward, build_plan))
    failed = [record for record in records if not record.passed]
    assert {record.metric for record in failed} >= {"maps_equal_trie", "maps_equal_input"}
    assert all(name in record.details["unequal"] for record in failed if "unequal" in record.details)


def test_another_dtype_is_red_too():
    def build_plan(batch, order="trie"):
        plan = radixmlp.build_plan(batch, order=order)
        return dataclasses.replace(plan, scatter=plan.scatter.to(torch.int64))

    records = check_index(Workload("any", BATCH), Subject(radixmlp.forward, build_plan))
    assert not all(record.passed for record in records)
