"""The index benchmark: what it measures, and that it turns red."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch

from radixmlp.optimized.index import IndexWork
from radixmlp.reference.plan import TriePlan
from radixmlp.reference.ragged import RaggedBatch
from radixmlp.verify import index_bench, index_shapes
from radixmlp.verify.index_bench import MissingPeerError, lines, run_index_bench
from radixmlp.verify.index_shapes import IndexShape

Builder = Callable[[RaggedBatch, str], TriePlan]


@pytest.fixture
def small_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("radix_mlp", reason="the published builder: pip install radix-mlp")
    shapes = [
        IndexShape("counted", 1e-6, True, partial(index_shapes.shared_prefix, 4, 32, 8)),
        IndexShape("beside", 1e-6, False, partial(index_shapes.ascending_comb, 12)),
    ]
    monkeypatch.setattr(index_bench, "index_shapes", lambda: shapes)
    monkeypatch.setattr(index_bench, "MEAN_LIMIT", 1e-6)
    monkeypatch.setattr(index_bench, "SECONDS_PER_SHAPE", 1e-3)
    monkeypatch.setattr(index_bench, "WORK_SIZES", (40, 80))
    monkeypatch.setattr(index_bench, "WORK_FAMILIES", {"comb": index_shapes.ascending_comb})


@pytest.mark.usefixtures("small_bench")
def test_every_bar_becomes_a_record() -> None:
    said: list[str] = []
    records = run_index_bench(said.append)
    assert [(r.workload, r.details.get("order")) for r in records] == [
        ("counted", "input"),
        ("counted", "trie"),
        ("beside", "input"),
        ("beside", "trie"),
        ("geometric mean, 25% shared", "input"),
        ("comb", None),
    ]
    assert all(record.passed for record in records)
    assert records[0].value == pytest.approx(records[4].value)
    assert records[0].details["q20"] <= records[0].value <= records[0].details["q80"]
    assert records[1].limit is None
    assert said == ["counted", "beside", "work: comb"]
    assert len(list(lines(records))) == len(records)


@pytest.mark.usefixtures("small_bench")
def test_a_bar_that_is_missed_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_bench, "MEAN_LIMIT", 1e6)
    totals = iter((100, 500))
    monkeypatch.setattr(index_bench, "count_work", lambda batch: IndexWork(next(totals), 0))
    failed = [record.workload for record in run_index_bench() if not record.passed]
    assert failed == ["geometric mean, 25% shared", "comb"]


def shares_nothing(real: Builder, batch: RaggedBatch, order: str = "trie") -> TriePlan:
    return TriePlan.identity(batch)


def shares_nothing_depth_first(real: Builder, batch: RaggedBatch, order: str = "trie") -> TriePlan:
    return TriePlan.identity(batch) if order == "trie" else real(batch, order)


def moves_a_row(real: Builder, batch: RaggedBatch, order: str = "trie") -> TriePlan:
    plan = real(batch, order)
    plan.scatter[-1] = 0
    return plan


def forgets_positions(real: Builder, batch: RaggedBatch, order: str = "trie") -> TriePlan:
    plan = real(batch, order)
    plan.position_ids.zero_()
    return plan


@pytest.mark.usefixtures("small_bench")
@pytest.mark.parametrize(
    "wrong", [shares_nothing, shares_nothing_depth_first, moves_a_row, forgets_positions]
)
def test_a_wrong_builder_is_red(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., TriePlan]) -> None:
    monkeypatch.setattr(index_bench, "build_plan", partial(wrong, index_bench.build_plan))
    records = run_index_bench()
    failed = [record for record in records if not record.passed]
    assert [record.workload for record in failed] == ["counted", "beside", "geometric mean, 25% shared"]
    assert all(record.value < 1e-8 for record in failed)


def test_without_the_peer_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "radix_mlp", None)
    with pytest.raises(MissingPeerError, match=r"pip install 'radixmlp\[bench\]'"):
        run_index_bench()
    assert index_bench.main() == 2
    assert "radix-mlp is not installed" in capsys.readouterr().err


def test_the_shapes_are_what_their_names_say() -> None:
    shapes = {shape.name: shape for shape in index_shapes.index_shapes()}
    assert sum(shape.in_mean for shape in shapes.values()) == 11
    lengths = index_shapes.ragged_batch(shapes["100000 x 1..3"].rows()).lengths
    assert lengths.unique().tolist() == [1, 2, 3]
    assert lengths.numel() == 100_000
    rows = torch.from_numpy(index_shapes.random_ids(2, 3))
    assert torch.equal(rows, torch.from_numpy(index_shapes.random_ids(2, 3)))
    prefix = shapes["32 x 256, 25% shared"].rows()
    assert all((row[:64] == prefix[0][:64]).all() for row in prefix)
    assert len({row.tobytes() for row in prefix}) == 32
