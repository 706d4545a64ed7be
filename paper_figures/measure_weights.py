"""Series of figure 7: the peak of one pass above the weights, each path in a fresh process."""

from __future__ import annotations

from typing import Any

import radixmlp
from radixmlp.verify.bars import SCATTER, TRIE
from radixmlp.verify.memory import peak_megabytes
from radixmlp.verify.models import load_model
from radixmlp.verify.variants import DENSE
from radixmlp.verify.workloads import make_workload

from .data import Point
from .measure_points import Progress


def memory(model: str, workload: str, progress: Progress) -> dict[str, Any]:
    """Each path's peak over the leaner dense's, and 1/r."""
    vocab_size = load_model(model, "bfloat16", "cpu").vocab_size
    made = make_workload(workload, None, vocab_size)
    peaks = peak_megabytes(model, made.batch, [*DENSE, SCATTER, TRIE], "bfloat16", progress=progress)
    leanest = min(DENSE, key=lambda name: peaks[name])
    share = radixmlp.build_plan(made.batch).gamma
    shape = f"{model}, {made.description}, bf16; peak above the weights, fresh process, one run"
    details = {"peak_mb": peaks, "against": leanest, "one_over_r": share}
    points = [
        Point("memory", name, 0, peaks[variant] / peaks[leanest], "share", shape, details=details)
        for name, variant in (("scatter", SCATTER), ("trie", TRIE))
    ]
    return {"series": [vars(point) for point in points]}
