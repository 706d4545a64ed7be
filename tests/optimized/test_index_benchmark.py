"""Micro-benchmarks of the fast builder: `pytest --benchmark-only tests/optimized/test_index_benchmark.py`."""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from radixmlp.optimized.index import build_plan
from radixmlp.verify.index_shapes import IndexShape, index_shapes, ragged_batch

SHAPES = {shape.name: shape for shape in index_shapes()}


@pytest.mark.parametrize("order", ["trie", "input"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_build_plan(benchmark: BenchmarkFixture, shape: IndexShape, order: str) -> None:
    batch = ragged_batch(shape.rows())
    plan = benchmark(build_plan, batch, order)
    assert plan.num_tokens == batch.num_tokens
