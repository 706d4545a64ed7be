"""Prefix grouping: exact on one level, values and gradients; refused beyond; and the run that measures it, tiny."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.training import causal_lm_loss
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers
from radixmlp.verify.families import small_model

experiment = load_experiment("prefix_grouping")
grouping = load_experiment("prefix_grouping", "grouping")
ONE_LEVEL = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 10, 11, 12, 13, 14],
    [5, 6, 7],
    [5, 6, 7, 20],
    [30, 31, 32],
    [40, 41, 42, 43],
    [40, 41, 44],
]
THREE_LEVELS = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 10], [5, 6, 11, 12], [5, 6, 11, 13]]
SIZES = {"gemma2": {"attn_implementation": "eager"}, "gpt_oss": {"attn_implementation": "eager"}}


def model_of(family: str) -> Any:
    model = small_model(family, torch.float64, **SIZES.get(family, {}))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products take no fp64
    return model


def own_loss(model: Any, sequences: list[list[int]]) -> Tensor:
    """Each sequence alone through the model's own forward: the sum over its next tokens."""
    total = torch.zeros((), dtype=torch.float64)
    for sequence in sequences:
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        total = total + cross_entropy(logits.double(), torch.tensor(sequence[1:]), reduction="sum")
    return total / sum(len(sequence) - 1 for sequence in sequences)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "gpt_oss"])
def test_values_and_gradients_on_one_level(family: str) -> None:
    """gemma2 has sliding windows and a soft cap, gpt_oss attention sinks."""
    model, batch = model_of(family), RaggedBatch.from_sequences(ONE_LEVEL)
    with grouping.registered():
        ours = grouping.grouped_loss(model, batch)
        got = gradients(model, ours)
    own = own_loss(model, ONE_LEVEL)
    expected = gradients(model, own)
    assert float(ours.detach()) == pytest.approx(float(own.detach()), rel=1e-6)
    rounding = 1e-14 * max(float(gradient.abs().max()) for gradient in expected.values())
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (got[name] - gradient).abs().max() <= 1e-6 * gradient.abs().max() + rounding, name


def test_three_levels_are_right_on_the_groups_plan() -> None:
    """It then shares the first level alone: 2 rows of prefix and everybody's own 3 + 3 + 2 + 2."""
    model, batch = model_of("qwen3"), RaggedBatch.from_sequences(THREE_LEVELS)
    with grouping.registered():
        ours = grouping.grouped_loss(model, batch)
    assert float(ours.detach()) == pytest.approx(float(own_loss(model, THREE_LEVELS).detach()), rel=1e-6)
    assert grouping.group_plan(batch).num_nodes == 12
    assert radixmlp.build_plan(batch).num_nodes == 9


def test_a_deeper_trie_is_refused() -> None:
    model, batch = model_of("qwen3"), RaggedBatch.from_sequences(THREE_LEVELS)
    with (
        grouping.registered(),
        pytest.raises(ValueError, match=r"shares one level, but row 4 branches off row 3"),
    ):
        causal_lm_loss(model, batch, attention=grouping.NAME)
    assert grouping.NAME not in radixmlp.attention_backends()


rows = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=7), min_size=1, max_size=7)


@settings(max_examples=80, deadline=None)
@given(rows=rows)
def test_the_plan_holds_every_sequence_and_shares_one_prefix_a_group(rows: list[list[int]]) -> None:
    plan = grouping.group_plan(RaggedBatch.from_sequences(rows))
    parent, ids, end = plan.parent.tolist(), plan.input_ids.tolist(), plan.subtree_end.tolist()
    bounds = plan.cu_seqlens.tolist()
    for row, start, stop in zip(rows, bounds[:-1], bounds[1:], strict=True):
        nodes = plan.scatter[start:stop].tolist()
        assert [ids[node] for node in nodes] == row
        assert [parent[node] for node in nodes] == [-1, *nodes][: len(nodes)]
        assert plan.position_ids[nodes].tolist() == plan.depth[nodes].tolist() == list(range(len(row)))
    ancestors: list[set[int]] = []
    for node, above in enumerate(parent):
        ancestors.append({node} | (ancestors[above] if above >= 0 else set()))
    for node in range(plan.num_nodes):
        below = {other for other in range(plan.num_nodes) if node in ancestors[other]}
        assert below == set(range(node, end[node]))
    groups: dict[int, list[list[int]]] = {}
    for row in filter(None, rows):
        groups.setdefault(row[0], []).append(row)
    assert plan.num_nodes == sum(_rows_of(group) for group in groups.values())


def _rows_of(group: list[list[int]]) -> int:
    """The prefix runs to the first node of the trie that does not have exactly one child."""
    prefix = 0
    while True:
        following = {tuple(row[: prefix + 1]) for row in group if len(row) > prefix}
        if len(following) != 1:
            break
        prefix += 1
    return prefix + sum(max(len(row) - prefix, 0) for row in group)


def test_a_run_measures_both_batches() -> None:
    measured = experiment.measure(True, lambda _: None)
    assert json.loads(json.dumps(measured)) == measured
    assert max(measured["parity"].values()) < 1e-6
    one, three = measured["one_level"], measured["three_levels"]
    name, by_prompt, trie = experiment.NAME, experiment.BY_PROMPT, experiment.TRIE
    assert one["rows"] == {name: 192, trie: 192}
    assert one["ideal_speedup"][name] == one["ideal_speedup"][trie]
    assert three["rows"] == {name: 672, by_prompt: 384, trie: 288}
    assert one["tokens"] == three["tokens"]
    assert three["ideal_speedup"][trie] > three["ideal_speedup"][by_prompt]
    assert set(three["trie_over"]) == {name, by_prompt}
    assert unreported_numbers(experiment.report, measured) == []


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "parity", lambda: {"loss": 1e-12, "gradient": 1e-3})
    monkeypatch.setattr(experiment, "time_interleaved", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(ValueError, match="nothing was timed"):
        experiment.measure(True, lambda _: None)
    assert experiment.NAME not in radixmlp.attention_backends()
