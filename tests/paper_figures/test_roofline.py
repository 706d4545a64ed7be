"""The roofline: what is counted, its limits, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import radixmlp
from radixmlp.optimized.attention import partial
from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify.checkout import load_module
from radixmlp.verify.ideal import DecoderShape, ideal_speedup
from radixmlp.verify.training_ideal import step_flops

ROOT = Path(__file__).resolve().parents[2]
roofline: Any = load_module(ROOT / "paper_figures", "radixmlp_paper_figures", "roofline")
roofline_work: Any = load_module(ROOT / "paper_figures", "radixmlp_paper_figures", "roofline_work")
Work = roofline.Work
PATHS = ("dense", "scatter", "trie")
SHAPE = DecoderShape(1024, 16, 8, 128, 3072, 151_936, (None,) * 28)
PERFECT = replace(
    roofline.DEVICES["h100"],
    peak_bandwidth=math.inf,
    matmul_share=1.0,
    attention_share=1.0,
    attention_backward_share=1.0,
    launch=0.0,
)

batches = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=8).map(
    RaggedBatch.from_sequences
)
devices = st.sampled_from(sorted(roofline.DEVICES))
shared = st.tuples(st.integers(0, 600), st.integers(1, 200), st.integers(1, 12))


@given(batches)
@settings(max_examples=60, deadline=None)
def test_a_perfect_device_reaches_the_flop_ideal(batch: RaggedBatch) -> None:
    plan = radixmlp.build_plan(batch)
    flops = ideal_speedup(SHAPE, batch, plan, batch.num_sequences)
    work = Work.of(batch, plan)
    for path in PATHS:
        told = roofline.predict(PERFECT, SHAPE, work, path).seconds
        assert told == pytest.approx(getattr(flops, path) / PERFECT.peak_flops)
        assert roofline.predicted_speedup(PERFECT, SHAPE, work, path) == pytest.approx(flops.speedup(path))


@given(batches)
@settings(max_examples=60, deadline=None)
def test_work_counts_what_the_flop_ideal_counts(batch: RaggedBatch) -> None:
    plan = radixmlp.build_plan(batch)
    work, flops = Work.of(batch, plan), step_flops(SHAPE, batch, plan)
    assert (work.rows, work.compact_rows) == (flops.dense_rows, flops.trie_rows)
    assert (work.targets, work.compact_targets) == (flops.dense_logits, flops.trie_logits)
    assert work.r == plan.compression_ratio
    for attended, depth in ((work.dense, TriePlan.identity(batch).depth), (work.trie, plan.depth)):
        assert attended.pairs == int((depth.long() + 1).sum())
        assert attended.first_pairs + attended.merged_pairs >= attended.pairs
        assert attended.first_rows >= attended.rows
        assert attended.merged_pairs <= attended.pairs


@given(shared)
@settings(max_examples=40, deadline=None)
def test_a_shared_prefix_has_the_counts_of_its_batch(sizes: tuple[int, int, int]) -> None:
    prefix, suffix, batch = sizes
    work = Work.shared_prefix(prefix, suffix, batch)
    length = prefix + suffix
    assert (work.rows, work.sequences, work.longest) == (batch * length, batch, length)
    assert work.compact_rows == prefix + batch * suffix
    assert work.dense.pairs == batch * length * (length + 1) // 2
    own = prefix * (prefix + 1) // 2 + batch * (suffix * prefix + suffix * (suffix + 1) // 2)
    assert work.trie.pairs == own
    assert work.targets == batch * (length - 1)


def test_labels_say_which_rows_need_the_head() -> None:
    batch = RaggedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 5]])
    labels = torch.tensor([-100, -100, 3, 4, -100, -100, 5])
    work = Work.of(batch, labels=labels)
    assert (work.targets, work.compact_targets) == (3, 2)  # 1, 2 -> 3 and -> 5 are one row
    assert work.head_rows("dense", training=True) == 3
    assert work.head_rows("trie", training=True) == 2
    assert work.head_rows("trie", training=False) == 2
    assert work.without_head().head_rows("dense", training=False) == 0


@given(shared, st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_works_add_up(sizes: tuple[int, int, int], times: int) -> None:
    work = Work.shared_prefix(*sizes)
    many = work.repeated(times)
    assert many.rows == times * work.rows
    assert many.trie.pairs == times * work.trie.pairs
    assert (many.r, many.longest) == (work.r, work.longest)
    assert Work.mean([work, work, work]) == work
    assert Work.mean([work, work.repeated(3)]).rows == 2 * work.rows
    assert Work.from_dict(work.to_dict()) == work


def test_chunks_are_those_of_the_attention() -> None:
    assert roofline_work.WHOLE_CHAIN == partial._WHOLE_CHAIN
    assert roofline_work.CAUSAL_ROWS == partial._CAUSAL_ROWS


@given(shared, devices, st.booleans())
@settings(max_examples=60, deadline=None)
def test_parts_add_up_and_sharing_never_costs_more_than_copies(
    sizes: tuple[int, int, int], name: str, training: bool
) -> None:
    work, device = Work.shared_prefix(*sizes), roofline.DEVICES[name]
    told = {path: roofline.predict(device, SHAPE, work, path, training=training) for path in PATHS}
    for path, prediction in told.items():
        assert prediction.seconds == pytest.approx(sum(prediction.parts.values()))
        assert min(prediction.parts.values()) >= 0
        assert (prediction.path, prediction.device) == (path, device.name)
    copies = told["scatter"].parts["scatter and gather"]
    assert told["trie"].seconds <= told["dense"].seconds * (1 + 1e-9)
    assert told["scatter"].seconds - copies <= told["dense"].seconds * (1 + 1e-9)
    assert told["trie"].seconds < told["scatter"].seconds


@given(devices, st.integers(1, 100), st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_nothing_shared_is_nothing_gained(name: str, length: int, batch: int) -> None:
    work, device = Work.shared_prefix(0, length, batch), roofline.DEVICES[name]
    assert roofline.predicted_speedup(device, SHAPE, work, "trie") == pytest.approx(1.0)
    assert roofline.predicted_speedup(device, SHAPE, work, "scatter") < 1.0


def test_a_faster_memory_or_longer_context_is_seen() -> None:
    short, long = (Work.shared_prefix(length, 64, 8).without_head() for length in (1024, 16_384))
    fast, slow = roofline.DEVICES["h200"], roofline.DEVICES["h100"]
    for path in PATHS:
        assert (
            roofline.predict(fast, SHAPE, short, path).seconds
            < roofline.predict(slow, SHAPE, short, path).seconds
        )
    assert roofline.predicted_speedup(slow, SHAPE, long, "scatter") < roofline.predicted_speedup(
        slow, SHAPE, short, "scatter"
    )


def test_the_data_sheets() -> None:
    sheets = {name: (d.peak_flops / 1e12, d.peak_bandwidth / 1e9) for name, d in roofline.DEVICES.items()}
    assert sheets == {"h100": (989, 3350), "h200": (989, 4800), "a100": (312, 2039), "l4": (121, 300)}
    for device in roofline.DEVICES.values():
        assert "data sheet" in device.source
        assert device.attention_source
        assert 0 < device.attention_backward_share <= device.attention_share <= device.matmul_share < 1


def test_what_it_cannot_predict_is_refused() -> None:
    device, work = roofline.DEVICES["h100"], Work.shared_prefix(64, 16, 2)
    with pytest.raises(ValueError, match="unknown path 'trei'"):
        roofline.predict(device, SHAPE, work, "trei")
    windowed = replace(SHAPE, layer_windows=(None, 79))
    with pytest.raises(ValueError, match="layer 1 sees 79 tokens and the longest sequence has 80"):
        roofline.predict(device, windowed, work, "trie")
    assert roofline.predict(device, replace(SHAPE, layer_windows=(80,)), work, "trie").seconds > 0
    with pytest.raises(ValueError, match="suffix 0"):
        Work.shared_prefix(10, 0, 2)
    with pytest.raises(ValueError, match="no tokens"):
        Work.of(RaggedBatch.from_sequences([]))
    batch = RaggedBatch.from_sequences([[1, 2]])
    with pytest.raises(ValueError, match="order='input'"):
        Work.of(batch, radixmlp.build_plan(batch, order="input"))
