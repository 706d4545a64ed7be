"""The CPU's roofline: its arithmetic, its calibration, and that it predicts what was measured."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.verify.checkout import load_module
from radixmlp.verify.ideal import DecoderShape

ROOT = Path(__file__).resolve().parents[2]


def module(name: str) -> Any:
    return load_module(ROOT / "paper_figures", "radixmlp_paper_figures", name)


roofline, cpu, check, page, calibration, series = map(
    module,
    ("roofline", "roofline_cpu", "roofline_check", "roofline_page", "roofline_calibrate", "roofline_series"),
)
Work = roofline.Work
SHAPE = DecoderShape(1024, 16, 8, 128, 3072, 16_384, (None,) * 4)
KINDS = ("norm", "rope", "gate", "add", "copy")


def costs(scale: float = 1.0, **extra: float) -> dict[str, Any]:
    """A pass in round numbers."""
    pairs = {
        "64": [[64, 2e-9 * scale], [1024, 3e-9 * scale]],
        "128": [[64, 4e-9 * scale], [1024, 5e-9 * scale]],
    }
    return {
        "products": {"flops": 1e12, "per_weight": 1e-11},
        "chain": pairs,
        "merged": pairs,
        "elementwise": {kind: [[1 << 10, 1e-10 * scale], [1 << 20, 2e-10 * scale]] for kind in KINDS},
        "layer": 1e-4,
        **extra,
    }


def document(**changes: Any) -> dict[str, Any]:
    stored = {
        "threads": 2,
        "touch": 3e-10,
        "fresh_bytes": 1 << 25,
        "dtypes": {
            "bfloat16": {"forward": costs(), "training": costs(4.0, logit=5e-9, head_weight=1e-11)},
            "float32": {"forward": costs(2.0)},
        },
        "batches": {},
    }
    return {"environment": {"device": "Some CPU, 2 cores"}, "bars": [], "roofline": {**stored, **changes}}


@given(st.tuples(st.integers(0, 300), st.integers(1, 100), st.integers(1, 8)), st.booleans())
@settings(max_examples=40, deadline=None)
def test_parts_add_up_and_sharing_never_costs_more_than_copies(
    sizes: tuple[int, int, int], training: bool
) -> None:
    work, device = Work.shared_prefix(*sizes), roofline.cpu_device(document())
    told = {
        p: roofline.predict(device, SHAPE, work, p, training=training) for p in ("dense", "scatter", "trie")
    }
    for prediction in told.values():
        assert prediction.seconds == pytest.approx(sum(prediction.parts.values()))
        assert min(prediction.parts.values()) >= 0
        assert prediction.device == "Some CPU, 2 cores"
    assert told["scatter"].parts["scatter and gather"] > 0
    assert told["scatter"].parts["attention"] == told["dense"].parts["attention"]
    if sizes[0] == 0:
        assert told["trie"].seconds == pytest.approx(told["dense"].seconds)


def test_large_tensors_are_fresh_and_small_ones_are_not() -> None:
    device = roofline.cpu_device(document())
    free = roofline.cpu_device(document(touch=0.0))
    item, limit = 2, 1 << 25
    for rows, faults in ((limit // item // 1024 - 1, False), (limit // item // 1024, True)):
        extra = device.product(rows, 1024, 1024, False) - free.product(rows, 1024, 1024, False)
        assert extra == pytest.approx(rows * 1024 * item * 3e-10 if faults else 0.0, abs=1e-12)
    elements = limit // 4  # in fp32 as large as the limit, in bf16 half of it
    extra = device.operation("norm", elements, False) - free.operation("norm", elements, False)
    assert extra == pytest.approx(3 * limit * 3e-10)  # the fp32 copies of a norm
    assert device.operation("gate", elements, False) == free.operation("gate", elements, False)
    kept = device.operation("gate", elements, True) - free.operation("gate", elements, True)
    assert kept == pytest.approx(4 * elements * item * 3e-10)  # what stays until the backward


@given(st.floats(1.0, 1e12))
def test_a_curve_stays_between_its_points(size: float) -> None:
    curve = ((16.0, 5.0), (64.0, 3.0), (1024.0, 4.0))
    assert 3.0 <= cpu.at(curve, size) <= 5.0
    assert [cpu.at(curve, x) for x in (1, 16, 64, 1024, 1e9)] == [5, 5, 3, 4, 4]
    assert cpu.at(curve, 32) == pytest.approx(4.0)


def test_head_sizes_lie_on_a_line() -> None:
    forward = roofline.cpu_device(document()).forward
    assert [forward.pair(False, size, 64) for size in (64, 96, 128, 192)] == pytest.approx(
        [2e-9, 3e-9, 4e-9, 6e-9]
    )
    assert forward.pair(True, 16, 64) >= 0


def test_what_was_not_calibrated_is_refused() -> None:
    with pytest.raises(ValueError, match="no roofline calibration: run radixmlp figures --measure"):
        roofline.cpu_device({"environment": {}, "bars": []})
    with pytest.raises(ValueError, match="not calibrated for float16"):
        roofline.cpu_device(document(), "float16")
    work = Work.shared_prefix(8, 8, 2)
    with pytest.raises(ValueError, match="training step was not calibrated"):
        roofline.predict(roofline.cpu_device(document(), "float32"), SHAPE, work, "trie", training=True)


def test_a_calibration_is_stored_and_read_back() -> None:
    sizes = calibration.Sizes(
        product_rows=(4, 1024),
        product_widths=((256, 256),),
        elements=(1 << 11, 1 << 13),
        heads=((2, 1, 16), (2, 1, 32)),
        chains=((16, 2), (64, 1)),
        prefixes=((130, 8, 4),),
        head=(256, 32),
        repeats=1,
    )
    state, told = torch.random.get_rng_state(), []
    stored = json.loads(json.dumps(calibration.calibrate(told.append, sizes)))
    assert torch.equal(state, torch.random.get_rng_state())
    assert told[0] == "page faults"
    assert all(math.isfinite(x) and x >= 0 for x in numbers(stored))
    measured = {"environment": {"device": "here"}, "bars": [], "roofline": stored}
    work = Work.shared_prefix(64, 16, 4)
    for dtype, trainings in (("bfloat16", (False, True)), ("float32", (False,))):
        device = roofline.cpu_device(measured, dtype)
        for training in trainings:
            seconds = [
                roofline.predict(device, SHAPE, work, p, training=training).seconds for p in ("dense", "trie")
            ]
            assert all(math.isfinite(x) and x > 0 for x in seconds)


def test_times_are_taken_from_the_clock() -> None:
    """A clock that stands still but for the call makes the shortest call the answer."""
    primitives = module("roofline_primitives")
    now = [0.0]
    durations = iter([9.0, 3.0, 2.0, 5.0])

    def call() -> None:
        now[0] += next(durations)

    assert primitives.Clock(3, lambda: now[0]).seconds(call) == 2.0


def test_every_bar_that_is_predicted_exists() -> None:
    names = {bar["name"] for d in page.committed_documents() for bar in d["bars"]}
    assert {case.bar for case in check.cases({"batches": {}})} <= names


def test_the_check_compares_with_its_bars() -> None:
    measured = document(batches={"bfloat16": Work.shared_prefix(40, 80, 5).to_dict()})
    rows = {case.bar: case for case in check.cases(measured["roofline"])}
    measured["bars"] = [{"name": name, "value": 2.0, "wrong": None, "details": {}} for name in rows]
    known = check.measured_speedups(measured)
    assert len(known) == len(rows) == 6
    for row in known:
        case = rows[row.name]
        device = roofline.cpu_device(measured)
        predicted = roofline.predicted_speedup(
            device, case.shape, case.work, case.path, training=case.training
        )
        assert row.predicted == pytest.approx(predicted / (case.work.r if case.share_of_r else 1))
        assert row.ratio == pytest.approx(row.predicted / 2.0)
    measured["bars"][0]["wrong"] = "RMS error"
    assert len(check.measured_speedups(measured)) == 5
    assert all(f"{case.bar}\n  dense: " in check.explain(measured) for case in rows.values())


def test_the_published_speedups_are_predicted_without_a_fit() -> None:
    """What the page says of them: all below what was published, in the published order, none by a quarter."""
    rows = check.published_speedups()
    assert [row.predicted for row in rows] == sorted(row.predicted for row in rows)
    assert all(0.75 < row.ratio < 1.0 for row in rows)
    ratios = check.implied_ratios()
    assert max(ratios.values()) / min(ratios.values()) < 1.1


def test_the_committed_calibration_predicts_the_committed_speedups() -> None:
    calibrated = [d for d in page.committed_documents() if d.get("roofline")]
    if not calibrated:
        pytest.skip("no calibration is committed yet: run radixmlp figures --measure")
    for measured in calibrated:
        rows = check.measured_speedups(measured)
        assert len(rows) >= 5
        off = [f"{row.name}: {row.known:.2f}, predicted {row.predicted:.2f}" for row in rows if not row.close]
        assert not off, "\n".join([*off, check.explain(measured)])


def test_the_committed_calibration_predicts_most_points_of_the_figures() -> None:
    """Short calls on few rows are the hardest; the page names every point that is off."""
    points = [row for d in page.committed_documents() for row in series.series_speedups(d)]
    if not points:
        pytest.skip("no calibrated series is committed yet: run radixmlp figures --measure")
    close = [row for row in points if row.close]
    assert len(close) >= 0.75 * len(points)


@pytest.mark.parametrize(("predicted", "close"), [(2.29, True), (2.31, False), (1.71, True), (1.69, False)])
def test_close_is_within_15_percent(predicted: float, close: bool) -> None:
    assert check.Known("a", 2.0, predicted).close is close


def test_points_of_the_figures_are_predicted_by_their_shape() -> None:
    measured = document()
    shape = "Qwen3-0.6B width, 1 layer, 512 + 64 tokens x 16, bf16"
    point = {"figure": "grid", "series": "trie", "x": 0, "y": 5.0, "unit": "times", "shape": shape}
    others = [{"series": "prefix-kv"}, {"unit": "s"}, {"shape": "SmolLM2, 5 queries"}]
    measured["series"] = [
        point,
        {**point, "series": "qwen3-0.6b scatter"},
        *({**point, **other} for other in others),
    ]
    trie, scatter = series.series_speedups(measured)
    device, work = roofline.cpu_device(measured), Work.shared_prefix(512, 64, 16)
    one_layer = replace(SHAPE, layer_windows=(None,))
    assert trie.predicted == pytest.approx(roofline.predicted_speedup(device, one_layer, work, "trie"))
    assert scatter.predicted == pytest.approx(roofline.predicted_speedup(device, one_layer, work, "scatter"))
    assert (trie.name, trie.known) == (f"trie, {shape}", 5.0)
    assert series.series_speedups({**measured, "roofline": None}) == []


def test_the_page_is_what_the_model_says() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    fresh = page.page(text, page.committed_documents())
    assert fresh == text, "ROOFLINE.md is stale: call roofline_page.write_page()"
    measured = document(touch=4e-10)
    measured["bars"] = [
        {
            "name": "qwen3-0.6b: trie over dense",
            "value": 5.0,
            "wrong": None,
            "details": {"against": "dense-padded"},
        }
    ]
    changed = page.page(text, [measured])
    assert changed != text
    assert "### Measured on Some CPU, 2 cores" in changed
    assert "measured against dense-padded" in changed


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for item in value.values() for x in numbers(item)]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [float(value)]
