"""KV-cache reuse: the shapes are what they say, rows are counted right, the kept cache gives the same logits."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.reference import RaggedBatch
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers
from radixmlp.verify.models import load_model
from radixmlp.verify.oracle import each_alone
from radixmlp.verify.timing import Ratio
from radixmlp.verify.variants import PREFIX_KV

experiment = load_experiment("prefix_kv_cache")
shapes = load_experiment("prefix_kv_cache", "shapes")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return experiment.measure(True, lambda _: None)


@settings(max_examples=40, deadline=None)
@given(
    trunk=st.integers(1, 9),
    branch=st.integers(0, 5),
    fan=st.integers(1, 3),
    own=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
def test_rows_are_those_of_brute_force(trunk: int, branch: int, fan: int, own: list[int]) -> None:
    shape = shapes.Shape("any", trunk, own, fan if branch else 1, branch)
    batch = shape.batch(64)
    rows = batch.sequences()
    assert len(rows) == shape.sequences
    prefix = 0
    while all(len(row) > prefix + 1 for row in rows) and len({tuple(row[: prefix + 1]) for row in rows}) == 1:
        prefix += 1
    padded = max(len(row) - prefix for row in rows) * len(rows)
    nodes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    assert experiment.rows_of(batch) == {
        "dense": sum(map(len, rows)),
        PREFIX_KV: prefix + padded,
        experiment.WARM: padded,
        "trie-sdpa": len(nodes),
    }
    assert len(nodes) == trunk + shape.fan * (branch + sum(own))


@pytest.mark.parametrize("own", [[4, 4], [3, 6, 1]])
def test_the_kept_cache_gives_the_logits_of_each_alone(own: list[int]) -> None:
    model = load_model("tiny-llama", torch.float64).model
    batch = shapes.Shape("any", 7, own).batch(64)
    call = experiment.kept_prefix_kv(model, batch)
    truth = each_alone(model, batch, keep=1).logits
    first, second = call(), call()
    assert truth is not None
    torch.testing.assert_close(first, truth, rtol=1e-6, atol=1e-6)
    assert torch.equal(first, second)  # what is kept is left as it was


def test_better_needs_both_quantiles() -> None:
    assert experiment.better(Ratio(1.2, 1.1, 1.3)) == "trie"
    assert experiment.better(Ratio(0.8, 0.7, 0.9)) == "reuse"
    assert experiment.better(Ratio(1.2, 0.9, 1.3)) == "neither"


def test_a_run_measures_every_path(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured))["shapes"] == measured["shapes"]
    assert [shape["name"] for shape in measured["shapes"]] == [shape.name for shape in shapes.QUICK_SHAPES]
    two_levels = measured["shapes"][1]["rows"]
    assert two_levels["trie-sdpa"] < two_levels[PREFIX_KV] < two_levels["dense"]


def test_the_report_names_every_number(measured: dict[str, Any]) -> None:
    memory = {"12 + 6 x 4": {"dense-padded": 4.0, "prefix-kv": 3.0, "trie-sdpa": 1.5}}
    assert unreported_numbers(experiment.report, measured | {"peak_mb": memory}) == []


def test_memory_is_asked_for_shapes_that_exist() -> None:
    assert set(experiment.Settings().memory) <= {shape.name for shape in shapes.SHAPES}


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model: Any, batch: RaggedBatch) -> Any:
        return lambda: torch.zeros(batch.num_sequences, 512)

    monkeypatch.setattr(experiment, "kept_prefix_kv", shifted)
    with pytest.raises(ValueError, match="kept"):
        experiment.measure(True, lambda _: None)
