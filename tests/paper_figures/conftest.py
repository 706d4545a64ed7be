"""A made-up file of measurements with every series, so that figures can be drawn before anything is measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from radixmlp.verify.checkout import load_module
from radixmlp.verify.measured import HOUSE_DEVICE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def part() -> Callable[[str], ModuleType]:
    """A module of `paper_figures/`, by name."""
    return lambda name: load_module(ROOT / "paper_figures", "radixmlp_paper_figures", name)


@pytest.fixture
def document() -> dict[str, Any]:
    """The committed bars with made-up series; a fresh copy."""
    committed = json.loads((ROOT / "paper_figures" / "measured" / f"{HOUSE_DEVICE}.json").read_text())
    made = {"environment": committed["environment"], "bars": committed["bars"], "series": made_up_series()}
    made["roofline"] = made_up_calibration()
    return copy.deepcopy(made)


GAINS = {"scatter": 1.0, "trie": 1.4, "prefix-kv": 1.2, "auto": 1.4}


def made_up_series() -> list[dict[str, Any]]:
    """Points of every figure, in no relation to any machine."""
    return [*_speedups(), *_limits(), *_counts_and_copies(), *_rerank_and_memory()]


def made_up_calibration() -> dict[str, Any]:
    """A CPU's roofline in round numbers."""
    pairs = {"64": [[64, 2e-9], [1024, 3e-9]], "128": [[64, 4e-9], [1024, 5e-9]]}
    kinds = ("norm", "rope", "gate", "add", "copy")
    forward = {
        "products": {"flops": 1e12, "per_weight": 1e-11},
        "chain": pairs,
        "merged": pairs,
        "elementwise": {kind: [[1 << 10, 1e-10], [1 << 20, 2e-10]] for kind in kinds},
        "layer": 1e-4,
    }
    dtypes = {"bfloat16": {"forward": forward}}
    return {"threads": 2, "touch": 3e-10, "fresh_bytes": 1 << 25, "dtypes": dtypes, "batches": {}}


def _row(figure: str, series: str, x: float, y: float, unit: str = "times", **details: Any) -> dict[str, Any]:
    spread = {"q20": 0.97 * y, "q80": 1.02 * y}
    shape = "Made-up width, 1 layer, 128 + 32 tokens x 16, bf16"
    found = {"unit": unit, "shape": shape, "commit": "made up", "details": details}
    return {"figure": figure, "series": series, "x": x, "y": y, **spread, **found}


def _speedups() -> list[dict[str, Any]]:
    rows = [
        _row("prefix", f"{model} {path}", length, GAINS[path] * (1 + length / 600), ideal=2.0, r=2.0)
        for model in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
        for length in (256, 512, 1024, 2048)
        for path in ("scatter", "trie")
    ]
    for place, (suffix, prefix) in enumerate((s, p) for s in (32, 256) for p in (128, 512, 2048)):
        for path in ("scatter", "prefix-kv", "trie"):
            found = {"prefix": prefix, "suffix": suffix, "batch": 16, "r": 3.0, "against_seconds": 0.5}
            found["model"] = "qwen3-0.6b-width:1"
            ideal = None if path == "prefix-kv" else 4.0
            rows.append(_row("grid", path, place, GAINS[path] * 3, ideal=ideal, **found))
    return rows


def _limits() -> list[dict[str, Any]]:
    rows = [
        _row("long", path, length, GAINS[path] * 2000 / (length + 1000) + 1, ideal=3.0)
        for length in (1024, 4096, 8192)
        for path in ("scatter", "trie")
    ]
    for path in ("scatter", "trie", "auto"):
        gain = GAINS[path]
        rows += [_row("low", path, s, 1 + gain * s / 120, ideal=1 + s / 100) for s in (0, 10, 25, 50)]
        rows += [_row("small", path, n, 1 + gain * (n - 1) / 4, ideal=1 + (n - 1) / 2) for n in (1, 2, 4, 8)]
    return rows


def _counts_and_copies() -> list[dict[str, Any]]:
    shares = {
        "rerank, query first": 0.66,
        "rerank, document first": 0.9,
        "few-shot": 0.2,
        "nothing-shared": 1.0,
    }
    rows = [_row("gamma", series, x, share, "share") for x, (series, share) in enumerate(shares.items())]
    times = {"index_select": 900.0, "index_copy_": 1000.0, "copy": 700.0}
    return rows + [
        _row("copies", series, x, microseconds * (1 + x), "us", gigabytes_per_second=10.0)
        for x in range(3)
        for series, microseconds in times.items()
    ]


def _rerank_and_memory() -> list[dict[str, Any]]:
    rows = []
    for path, seconds in {"dense": 0.9, "scatter": 0.7, "trie": 0.6}.items():
        gain = {} if path == "dense" else {"speedup": 0.9 / seconds, "speedup_q20_q80": [1.2, 1.6]}
        rows.append(_row("rerank", path, 0, seconds, "s", p90=1.1 * seconds, queries=6, r=1.5, **gain))
    peaks = {"dense-padded": 800.0, "dense-sdpa": 820.0, "scatter-sdpa": 400.0, "trie-sdpa": 160.0}
    for path, share in {"scatter": 0.5, "trie": 0.2}.items():
        found = {"peak_mb": peaks, "against": "dense-padded", "one_over_r": 0.17}
        rows.append(_row("memory", path, 0, share, "share", **found))
    return rows
