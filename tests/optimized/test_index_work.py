"""The fast builder's work is linear in the tokens, on batches made to break that too."""

from __future__ import annotations

from math import log2

import numpy as np
import pytest

from radixmlp.optimized import index
from radixmlp.optimized.index import IndexWork, build_plan, count_work
from radixmlp.verify.index_bench import WORK_LIMIT_PER_DOUBLING
from radixmlp.verify.index_shapes import (
    WORK_FAMILIES,
    ascending_comb,
    nothing_shared,
    ragged_batch,
    shared_prefix,
)


@pytest.fixture(autouse=True)
def _fixed_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = np.random.default_rng(1).integers(0, 2**64, 3, dtype=np.uint64) | np.uint64(1)
    monkeypatch.setattr(index, "_MULTIPLIERS", drawn)


@pytest.mark.parametrize("family", WORK_FAMILIES)
def test_work_per_doubling_of_tokens(family: str) -> None:
    batches = [ragged_batch(WORK_FAMILIES[family](n)) for n in (100, 200, 400)]
    totals = [count_work(batch).total for batch in batches]
    for smaller, larger, before, after in zip(batches, batches[1:], totals, totals[1:], strict=False):
        doublings = log2(larger.num_tokens / smaller.num_tokens)
        assert after / before <= WORK_LIMIT_PER_DOUBLING**doublings


@pytest.mark.parametrize("family", WORK_FAMILIES)
def test_work_per_token(family: str) -> None:
    batch = ragged_batch(WORK_FAMILIES[family](300))
    assert count_work(batch).total <= 2.5 * batch.num_tokens


def test_a_counter_that_can_see_superlinear_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every hash equal the table degrades to a list, and the count shows it."""
    monkeypatch.setattr(index, "_MULTIPLIERS", np.zeros(3, np.uint64))
    small, large = (count_work(ragged_batch(nothing_shared(n))).total for n in (10, 20))
    assert large > 3.9 * small


def test_an_ascending_comb_stays_one_edge() -> None:
    work = count_work(ragged_batch(ascending_comb(500)))
    assert work == IndexWork(probes=500, compares=499 * 500 // 2)


def test_counting_is_the_build_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """`count_work` reads what the kernel under `build_plan` counts."""
    seen = []
    kernel = index.match_sequences

    def recorded(*arguments: object) -> int:
        result: int = kernel(*arguments)
        seen.append(np.array(arguments[-1]).tolist())
        return result

    monkeypatch.setattr(index, "match_sequences", recorded)
    batch = ragged_batch(shared_prefix(20, 64, 48))
    build_plan(batch)
    work = count_work(batch)
    assert seen == [[work.probes, work.compares]] * 2
