"""How long an experiment's backends take and what memory they need, beside dense, scatter and trie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from radixmlp.optimized.attention import AttentionBackend
from radixmlp.reference import AttentionSpec
from radixmlp.verify.memory import peak_megabytes
from radixmlp.verify.models import LoadedModel
from radixmlp.verify.records import Workload
from radixmlp.verify.speed import compare
from radixmlp.verify.variants import DENSE

RIVALS = ("scatter-sdpa", "trie-sdpa")
Progress = Callable[[str], None]


def timed_dtype(backends: Sequence[AttentionBackend], device: str) -> str:
    """bfloat16, or float32 where some backend does not take it."""
    layer = (AttentionSpec(1.0), torch.device(device), torch.bfloat16, False)
    return "bfloat16" if all(backend.unsupported(*layer) is None for backend in backends) else "float32"


def speed_rows(
    loaded: LoadedModel,
    workload: Workload,
    names: Sequence[str],
    dtype: str,
    rounds: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Seconds of each variant, and its speed-up over the faster dense and over both rivals, from paired rounds."""
    found = compare(loaded.model, workload.batch, [*RIVALS, *names], rounds, progress)
    timings = found.timings
    rows = []
    for variant in timings.seconds:
        row: dict[str, Any] = {
            "model": loaded.name,
            "workload": workload.name,
            "dtype": dtype,
            "variant": variant,
            "seconds": timings.median(variant),
            "rounds": timings.rounds,
            "r": found.plan.compression_ratio,
            "ideal": None if variant in DENSE else found.ideal_of(variant),
        }
        for key, rival in (("dense", found.fastest_dense), *zip(RIVALS, RIVALS, strict=True)):
            ratio = timings.ratio(rival, variant)
            row[f"over {key}"] = {"median": ratio.median, "q20": ratio.q20, "q80": ratio.q80}
        rows.append(row)
    return rows


def memory_rows(
    model: str,
    workload: Workload,
    names: Sequence[str],
    dtype: str,
    device: str,
    progress: Progress,
    folder: Path,
) -> list[dict[str, Any]]:
    """Peak MB above the weights of one forward pass of each variant, each in a fresh process.

    Args:
        folder: of the experiment that `names` come from.
    """
    variants = [*DENSE, *RIVALS, *names]
    peaks = peak_megabytes(model, workload.batch, variants, dtype, device, progress, experiment=folder)
    leanest = min(peaks[name] for name in DENSE)
    labels = {"model": model, "workload": workload.name, "dtype": dtype}
    return [
        {**labels, "variant": name, "peak_mb": peak, "over_dense": peak / leanest}
        for name, peak in peaks.items()
    ]
