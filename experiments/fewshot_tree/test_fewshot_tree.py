"""The few-shot tree: its levels, rows against brute force, grouped reuse against each sequence alone."""

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

experiment = load_experiment("fewshot_tree")
tree = load_experiment("fewshot_tree", "tree")
TRIE = experiment.TRIE


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return experiment.measure(True, lambda _: None)


def encode(text: str) -> list[int]:
    return list(text.encode())


def test_leaves_share_what_their_paths_share() -> None:
    found = tree.leaves(2, 3, 4)
    assert len(found) == len({leaf.text for leaf in found}) == 2 * 3 * 4 * len(tree.LABELS)
    for level, parts in ((level, tree.groups(found, level)) for level in tree.LEVELS):
        assert sorted(number for part in parts for number in part) == list(range(len(found)))
        assert len(parts) == {"all": 1, "task": 2, "examples": 6, "item": 24}[level]
    for part in tree.groups(found, "item"):
        stems = {found[number].text.rsplit("Subject:", 1)[0] for number in part}
        assert len(stems) == 1
    small, large = (next(leaf.text for leaf in found if leaf.path[1] == s) for s in (0, 1))
    assert large.startswith(small.rsplit("Text:", 1)[0])


def test_a_tree_beyond_the_texts_is_refused() -> None:
    with pytest.raises(ValueError, match="3 tasks"):
        tree.leaves(3, 1, 1)


rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=rows, data=st.data())
def test_reuse_rows_are_those_of_brute_force(rows: list[list[int]], data: st.DataObject) -> None:
    owner = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    parts = [[n for n, g in enumerate(owner) if g == group] for group in sorted(set(owner))]
    expected = 0
    for part in parts:
        own = [rows[number] for number in part]
        prefix = 0
        while (
            all(len(row) > prefix + 1 for row in own) and len({tuple(row[: prefix + 1]) for row in own}) == 1
        ):
            prefix += 1
        expected += prefix + len(own) * max(len(row) - prefix for row in own)
    assert tree.reuse_rows(RaggedBatch.from_sequences(rows), parts) == expected


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 2], [3, 1]], [[3], [0, 1], [2]]])
def test_grouped_reuse_gives_the_logits_of_each_alone(parts: list[list[int]]) -> None:
    model = load_model("tiny-llama", torch.float64).model
    batch = RaggedBatch.from_sequences([[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 1, 2], [5, 6, 9, 4]])
    truth = each_alone(model, batch, keep=1).logits
    assert truth is not None
    torch.testing.assert_close(
        experiment.grouped_prefix_kv(model, batch, parts)(), truth, rtol=1e-6, atol=1e-6
    )


def test_the_trie_has_the_fewest_rows(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured))["counted"] == measured["counted"]
    for found in (measured["counted"], measured["timed"]):
        assert found["rows"]["dense-padded"] > found["rows"]["dense-sdpa"] == found["tokens"]
        reuse = [found["rows"][experiment.variant_of(level)] for level in tree.LEVELS]
        assert found["rows"][TRIE] < min(reuse)
        assert found["tokens"] / found["rows"][TRIE] == pytest.approx(found["r"])
    whole = tree.batch_of(tree.leaves(*measured["settings"]["counted"]), encode).sequences()
    nodes = {tuple(row[:end]) for row in whole for end in range(1, len(row) + 1)}
    assert measured["counted"]["rows"][TRIE] == len(nodes)


def test_the_report_names_every_number(measured: dict[str, Any]) -> None:
    assert unreported_numbers(experiment.report, measured) == []


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "wrong_outputs", lambda *_: {"trie-sdpa": "far off"})
    monkeypatch.setattr(experiment, "time_interleaved", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match="far off"):
        experiment.measure(True, lambda _: None)
