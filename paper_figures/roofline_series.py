"""The measured points of the figures beside what the CPU's roofline predicts for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from .data_models import QWEN3
from .roofline import Path, Work, cpu_device, predicted_speedup
from .roofline_check import BENCH_VOCABULARY, Known

# How the measured series write their shapes; those that say less are not predicted.
_SHAPE = re.compile(r"Qwen3-(0\.6B|4B|8B) width, (\d) layers?, (\d+) \+ (\d+) tokens x (\d+), bf16")
_PATHS: dict[str, Path] = {"scatter": "scatter", "trie": "trie"}


def series_speedups(measured: Mapping[str, Any]) -> list[Known]:
    """One row a measured point of the paper's path or the trie over dense; none without a calibration."""
    if not measured.get("roofline"):
        return []
    device = cpu_device(measured)
    rows = []
    for point in measured.get("series", []):
        found = _SHAPE.fullmatch(point["shape"])
        path = _PATHS.get(point["series"].split(" ")[-1])
        if found is None or path is None or point["unit"] != "times":
            continue
        model, layers, *sizes = found.groups()
        shape = replace(
            QWEN3[model.lower()], vocab_size=BENCH_VOCABULARY, layer_windows=(None,) * int(layers)
        )
        predicted = predicted_speedup(device, shape, _work(*map(int, sizes)), path)
        rows.append(Known(f"{path}, {point['shape']}", point["y"], predicted))
    return rows


@cache
def _work(prefix: int, suffix: int, batch: int) -> Work:
    return Work.shared_prefix(prefix, suffix, batch)
