"""Order: gamma against brute force, templates that hold query and passage, and no text in the result."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers
from radixmlp.verify.passages import SHIPPED_FILE, load_passages

experiment = load_experiment("order")
templates = load_experiment("order", "templates")
words = st.text("ab ", min_size=1, max_size=6)


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return experiment.measure(True, lambda _: None)


@settings(max_examples=40, deadline=None)
@given(batches=st.lists(st.lists(st.tuples(words, words), min_size=1, max_size=4), min_size=1, max_size=3))
@pytest.mark.parametrize("name", list(templates.TEMPLATES))
def test_counts_are_those_of_brute_force(name: str, batches: list[list[tuple[str, str]]]) -> None:
    form = templates.TEMPLATES[name]
    found = experiment.count(batches, form, encode)
    prompts = [[form(query, passage) for query, passage in pairs] for pairs in batches]
    nodes = sum(len({p[:end] for p in batch for end in range(1, len(p) + 1)}) for batch in prompts)
    tokens = sum(len(p) for batch in prompts for p in batch)
    assert found == {"batches": len(batches), "tokens": tokens, "rows": nodes, "gamma": nodes / tokens}


@pytest.mark.parametrize("name", list(templates.TEMPLATES))
def test_a_template_holds_both_in_the_order_it_names(name: str) -> None:
    text = templates.TEMPLATES[name]("What is tin?", "Tin is a metal.")
    query, passage = text.index("What is tin?"), text.index("Tin is a metal.")
    assert (query < passage) == (name.index("query") < name.index("passage"))


def test_batchings_pair_what_they_say() -> None:
    entries = load_passages(SHIPPED_FILE)[:3]
    by_query = templates.batches_by_query(entries)
    by_passage = templates.batches_by_passage(entries, 2)
    (both,) = templates.batch_of_both(entries, 2)
    assert [{query for query, _ in pairs} for pairs in by_query] == [{entry.query} for entry in entries]
    assert [{passage for _, passage in pairs} for pairs in by_passage] == [{e.passages[0]} for e in entries]
    assert all(len(pairs) == 2 for pairs in by_passage)
    assert len(set(both)) == len(both) == 2 * len(entries[0].passages)


def test_query_first_shares_more_by_query_and_less_by_passage(measured: dict[str, Any]) -> None:
    counted = measured["counted"]
    first, second = experiment.QUERY_FIRST, experiment.PASSAGE_FIRST
    assert counted[experiment.BY_QUERY][first]["gamma"] < counted[experiment.BY_QUERY][second]["gamma"]
    assert counted[experiment.BY_PASSAGE][first]["gamma"] > counted[experiment.BY_PASSAGE][second]["gamma"]


def test_the_result_holds_numbers_and_no_text(measured: dict[str, Any]) -> None:
    text = json.dumps(measured) + experiment.report(measured)
    for entry in load_passages(SHIPPED_FILE):
        for piece in (entry.query, *entry.passages):
            assert piece[:20] not in text
    assert "the passages we ship" in text


def test_the_report_names_every_number(measured: dict[str, Any]) -> None:
    assert unreported_numbers(experiment.report, measured) == []


def test_wrong_values_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "wrong_outputs", lambda *_: {"trie-sdpa": "far off"})
    monkeypatch.setattr(experiment, "time_interleaved", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match="far off"):
        experiment.measure(True, lambda _: None)
