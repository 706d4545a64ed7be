"""Batch invariance: fixed attention is right, the fixed ways are equal bit by bit here, and movement is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import radixmlp
from radixmlp.reference import AttentionSpec, RaggedBatch
from radixmlp.reference.attention import trie_attention
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers

experiment = load_experiment("batch_invariance")
fixed = load_experiment("batch_invariance", "fixed")
parts = load_experiment("batch_invariance", "compositions")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return experiment.measure(True, lambda _: None)


rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(rows=rows, stem=st.sampled_from([0, 3, 61, 64, 130]), shares=st.booleans())
def test_fixed_attention_is_right(rows: list[list[int]], stem: int, shares: bool) -> None:
    """Against the reference in fp64; stems put the branches before, at and after the ends of tiles."""
    batch = RaggedBatch.from_sequences([[7] * stem + row for row in rows])
    plan = radixmlp.build_plan(batch) if shares else radixmlp.TriePlan.identity(batch)
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(plan.num_nodes, heads, 8, generator=noise, dtype=torch.float64) for heads in (4, 2, 2)
    )
    spec = AttentionSpec(0.3)
    got = fixed.FixedAttention(shares)(q, k, v, plan, spec)
    torch.testing.assert_close(got, trie_attention(q, k, v, plan, spec), rtol=1e-12, atol=1e-12)


def test_fixed_attention_refuses_what_it_lacks() -> None:
    backend, cpu = fixed.FixedAttention(True), torch.device("cpu")
    for spec in (AttentionSpec(1.0, sliding_window=4), AttentionSpec(1.0, softcap=5.0)):
        assert "no sliding windows" in backend.unsupported(spec, cpu, torch.float32, False)
    assert backend.unsupported(AttentionSpec(1.0), cpu, torch.float32, False) is None


@pytest.mark.parametrize("mode", [fixed.padded_products, fixed.tiled_products])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
def test_products_are_the_layers_own(mode: Any, count: int) -> None:
    layer = torch.nn.Linear(12, 5).double()
    x = torch.randn(2, count, 12, dtype=torch.float64)
    expected = layer(x)
    with mode(layer):
        got = layer(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert "forward" not in vars(layer)


def test_compositions_hold_the_request() -> None:
    first, *others = parts.compositions(9, 4, 6, 64)
    assert first.name == parts.ALONE
    request = first.batch.sequences()[0]
    assert len(request) == 13
    for composition in others:
        ids = composition.batch.input_ids[composition.rows].tolist()
        assert ids == composition.batch.sequences()[composition.place] == request
    assert max(composition.batch.num_sequences for composition in others) == 6


def test_movement_is_measured() -> None:
    alone = torch.tensor([[1.0, -4.0], [2.0, 0.0]])
    got = experiment.moved(torch.tensor([[1.0, -4.0], [2.5, 0.0]]), alone)
    assert got == experiment.Moved(0.5, 0.125, 0.75)


def test_the_same_batch_again_is_equal_and_fixed_ways_are_equal_in_every_batch(
    measured: dict[str, Any],
) -> None:
    for dtype, found in measured["found"].items():
        for moved in found["moved"]:
            for way, by_batch in moved["ways"].items():
                equal = {name: batch["equal"] for name, batch in by_batch.items()}
                assert equal["again"] == 1.0, (dtype, way)
                if way.endswith("fixed, products tiled"):
                    assert equal == dict.fromkeys(equal, 1.0), (dtype, way)
            assert moved["trie_is_dense"]["products tiled"] == 1.0


def test_ways_as_they_are_move_within_rounding(measured: dict[str, Any]) -> None:
    """Something does move, or equality would say nothing; and by no more than rounding."""
    movements = [
        batch
        for moved in measured["found"]["float32"]["moved"]
        for way in ("dense-padded", "dense-sdpa", "trie-sdpa")
        for batch in moved["ways"][way].values()
    ]
    assert min(batch["equal"] for batch in movements) < 1
    assert max(batch["relative"] for batch in movements) < 1e-5


def test_a_run_can_be_written_and_leaves_nothing_behind(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured))["found"] == measured["found"]
    assert not torch.are_deterministic_algorithms_enabled()
    assert not {fixed.FIXED_TRIE, fixed.FIXED_DENSE} & set(radixmlp.attention_backends())


def test_the_report_names_every_number(measured: dict[str, Any]) -> None:
    assert unreported_numbers(experiment.report, measured) == []


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fixed._attend
    monkeypatch.setattr(fixed, "_attend", lambda q, k, v, start, scale: real(q, k, v, start, 2 * scale))
    monkeypatch.setattr(experiment, "time_interleaved", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match="trie-fixed"):
        experiment.measure(True, lambda _: None)
