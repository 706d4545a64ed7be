"""What `inspect` counts, against counting by hand: sets of prefixes, visible pairs, the tree, pools."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.optimized.index import build_plan
from radixmlp.verify.ideal import DecoderShape, ideal_speedup
from radixmlp.verify.inspect.numbers import quantiles
from radixmlp.verify.inspect.predictions import SHAPES, find_shape, flops, predict, values_per_row, windows_of
from radixmlp.verify.inspect.ragged import Tokens
from radixmlp.verify.inspect.survey import Survey, count_batch
from radixmlp.verify.inspect.terminal import tree_outline
from radixmlp.verify.inspect.tree import Tree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=14)
WINDOWED = DecoderShape(64, 4, 2, 16, 128, 1000, (None, 3, 3, None, 5))


def prefixes(sequences):
    return {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}


@given(SEQUENCES)
def test_a_batch_is_its_set_of_prefixes(sequences):
    got = count_batch(Tokens.of(sequences), (None, 1, 3))
    known = prefixes(sequences)
    assert (got.sequences, got.tokens, got.rows) == (len(sequences), sum(map(len, sequences)), len(known))
    for window in (None, 1, 3):
        seen = [min(n, window or n) for s in sequences for n in range(1, len(s) + 1)]
        assert got.dense_pairs[window] == sum(seen)
        assert got.trie_pairs[window] == sum(min(len(p), window or len(p)) for p in known)


@given(SEQUENCES)
def test_flops_are_those_of_the_ideal(sequences):
    tokens = Tokens.of(sequences)
    batch = tokens.batch()
    expected = ideal_speedup(WINDOWED, batch, build_plan(batch), logits_rows=len(sequences))
    assert flops(WINDOWED, count_batch(tokens, windows_of([WINDOWED]))) == expected


@given(SEQUENCES)
def test_the_tree_holds_every_row_and_token_once(sequences):
    tree = Tree.of(Tokens.of(sequences))
    known = prefixes(sequences)
    assert tree.rows.sum() == tree.num_rows == len(known)
    assert tree.num_tokens == sum(map(len, sequences))
    assert sorted(tree.order.tolist()) == list(range(len(sequences)))
    found = {}
    for segment in range(tree.num_segments):
        above = int(tree.parent[segment])
        path = (*(found[above] if above >= 0 else ()), *tree.segment_ids(segment))
        found[segment] = path
        assert int(tree.depth[segment]) == len(path) - int(tree.rows[segment])
        own = {i for i, s in enumerate(sequences) if tuple(s[: len(path)]) == path}
        assert set(tree.through(segment)) == own
        assert tree.sequences[segment] == len(own)
        assert tree.first_through(segment) in own
        assert tree.ending[segment] == sum(tuple(s) == path for s in sequences)
        below = {p for p in known if p[: len(path)] == path}
        assert tree.subtree_rows[segment] == len(below) + int(tree.rows[segment]) - 1
        before = len(path) - int(tree.rows[segment])
        assert tree.subtree_tokens[segment] == sum(len(sequences[i]) - before for i in own)
        assert tree.last_id(segment) == (path[before - 1] if before else None)
    assert sorted(found.values()) == sorted(set(found.values()))
    assert sum(int(tree.subtree_rows[root]) for root in tree.roots) == tree.num_rows


@given(SEQUENCES, st.integers(1, 30))
def test_an_outline_names_every_segment_or_counts_it_as_hidden(sequences, most):
    tree = Tree.of(Tokens.of(sequences))
    lines = tree_outline(tree, most)
    shown = {line.segment for line in lines if not line.hidden}
    for segment in [*shown, -1]:
        children = tree.children[segment]
        hidden = [line.hidden for line in lines if line.hidden and line.segment == segment]
        assert sum(hidden) == sum(child not in shown for child in children)
    assert len(shown) <= most
    assert len(lines) <= max(most, 3)


@given(SEQUENCES, st.integers(8, 20), st.integers(1, 40), st.lists(st.integers(0, 14), max_size=3))
@settings(deadline=None)
def test_batches_of_a_stream_hold_every_sequence_once(sequences, budget, pool, cuts):
    bounds = sorted({0, len(sequences), *(c for c in cuts if c <= len(sequences))})
    for policy in ("prefix", "fifo"):
        survey = Survey(policy, budget, pool_tokens=pool)
        for a, b in itertools.pairwise(bounds):
            survey.add(Tokens.of(sequences[a:b]))
        survey.finish()
        total = survey.total
        assert (total.sequences, total.tokens) == (len(sequences), sum(map(len, sequences)))
        assert all(batch.rows <= budget for batch in survey.batches)
        assert total.rows >= len(prefixes(sequences))
        if len(survey.batches) == 1:
            assert total.rows == len(prefixes(sequences))


def test_first_in_first_out_is_cut_as_the_stream_comes():
    rng = np.random.default_rng(0)
    sequences = [[int(t) for t in rng.integers(0, 3, rng.integers(1, 9))] for _ in range(400)]
    expected, taken = [], []
    for sequence in sequences:
        if len(prefixes([*taken, sequence])) > 40:
            expected.append(taken)
            taken = []
        taken.append(sequence)
    survey = Survey(
        "fifo", 40, pool_tokens=1
    )  # pools of 16 budgets, each with a batch that goes on in the next
    for sequence in sequences:
        survey.add(Tokens.of([sequence]))
    survey.finish()
    assert survey.pools > 1
    assert [batch.sequences for batch in survey.batches] == [len(taken) for taken in [*expected, taken]]


@given(SEQUENCES, st.data())
def test_picked_sequences_are_those_asked_for(sequences, data):
    tokens = Tokens.of(sequences)
    which = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=6)) if sequences else []
    picked = tokens.pick(which)
    assert [picked.sequence(i) for i in range(len(which))] == [sequences[i] for i in which]
    batch = picked.batch()
    assert batch.sequences() == [sequences[i] for i in which]
    assert batch.position_ids.tolist() == [n for i in which for n in range(len(sequences[i]))]
    assert Tokens.join([tokens, picked]).ids.tolist() == tokens.ids.tolist() + picked.ids.tolist()


@given(st.lists(st.floats(1, 100), min_size=1))
def test_quantiles_are_members_in_order(values):
    got = quantiles(values)
    assert got[0] == min(values)
    assert got[-1] == max(values)
    assert got == sorted(got)
    assert set(got) <= set(values)


def test_a_prediction_runs_batches_above_the_threshold_dense():
    shape = SHAPES["Qwen3-0.6B"]
    alike = count_batch(Tokens.of([[1] * 50 + [i] for i in range(10)]))
    apart = count_batch(Tokens.of([[i] * 50 for i in range(20)]))
    both = predict("m", shape, [alike, apart], threshold=0.9)
    work = [flops(shape, alike), flops(shape, apart)]
    assert both.trie == (work[0].dense + work[1].dense) / (work[0].trie + work[1].dense)
    assert both.rows == both.tokens == 1000  # the largest batch is the one that shares nothing
    assert both.activation_bytes == both.dense_activation_bytes == 1000 * 2 * (2 * 1024 + 3 * 3072)
    one = predict("m", shape, [alike], threshold=0.9)
    assert one.dense_activation_bytes / one.activation_bytes == pytest.approx(alike.ratio)
    assert predict("m", shape, [alike], threshold=0.05).trie == 1.0


def test_the_published_headline_shape_has_its_known_ideals():
    """2,048 + 256 tokens x 32, Qwen3-8B, without a head: 6.98x on the trie, 5.58x on the paper's path."""
    batch = count_batch(Tokens.of([[0] * 2048 + [i + 1] * 256 for i in range(32)]))
    shape = SHAPES["Qwen3-8B"]
    work = flops(DecoderShape(*list(vars(shape).values())[:5], 0, shape.layer_windows), batch)
    assert batch.ratio == pytest.approx(7.2)
    assert work.speedup("trie") == pytest.approx(6.98, abs=0.01)
    assert work.speedup("scatter") == pytest.approx(5.58, abs=0.01)


def test_known_shapes_are_found_by_any_of_their_names():
    for name in ("Qwen3-4B", "qwen3-4b", "Qwen/Qwen3-4B"):
        assert find_shape(name) == SHAPES["Qwen3-4B"]
    assert find_shape("HuggingFaceTB/SmolLM2-135M-Instruct") == SHAPES["SmolLM2-135M"]


def test_a_shape_is_read_from_a_local_config(tmp_path):
    from transformers import MistralConfig

    config = MistralConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=7,
    )
    config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    assert shape == DecoderShape(64, 4, 2, 16, 96, 100, (7, 7))
    assert windows_of([shape]) == [None, 7]
    assert values_per_row(shape) == 2 * 64 + max(3 * 96, 2 * 64 + 2 * 32)


@pytest.mark.parametrize("count", [20_000])
def test_a_tree_as_deep_as_it_is_long_is_no_special_case(count):
    """Each sequence a prefix of the next: one segment a sequence, and no recursion."""
    lengths = torch.arange(1, 400)
    tree = Tree.of(Tokens.of([[0] * int(n) for n in lengths]))
    assert tree.num_segments == len(lengths)
    assert len(tree_outline(tree, 24)) <= 26
    wide = Tree.of(Tokens.of([[i % 251, i] for i in range(count)]))
    assert wide.num_rows == 251 + count
    assert len(tree_outline(wide, 24)) <= 24
