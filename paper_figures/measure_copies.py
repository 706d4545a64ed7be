"""Series of table 3: moving rows to the ragged layout and back, against a copy of as many bytes."""

from __future__ import annotations

import math
from typing import Any

import torch

from radixmlp.verify.timing import quantile, time_interleaved

from .data import Point
from .measure_points import Progress, WrongOutputError

SHAPES = ((16_000, 1024), (100_000, 2048), (2_000, 64, 256))  # arXiv 2601.15013: fp16, on an H100


def copies(scale: int, rounds: int, progress: Progress) -> dict[str, Any]:
    """Microseconds of `index_select` (what the paper's path calls here), `index_copy_` and a copy, in fp16.

    Args:
        scale: divides the number of rows.
        rounds: timed rounds.
    """
    points = []
    for place, (rows, *width) in enumerate(SHAPES):
        shape = (max(1, rows // scale), *width)
        progress(f"copies {list(shape)}")
        points += _of_shape(place, shape, rounds)
    return {"series": [vars(point) for point in points]}


def _of_shape(place: int, shape: tuple[int, ...], rounds: int) -> list[Point]:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(*shape, generator=random).to(torch.float16)
    index = torch.randperm(shape[0], generator=random)
    out = torch.empty_like(x)
    calls = {
        "index_select": lambda: torch.index_select(x, 0, index),
        "index_copy_": lambda: out.index_copy_(0, index, x),
        "copy": lambda: out.copy_(x),
    }
    if not (torch.equal(calls["index_select"](), x[index]) and torch.equal(calls["index_copy_"]()[index], x)):
        raise WrongOutputError(f"rows of {list(shape)} did not arrive where they belong")
    timings = time_interleaved(calls, max(rounds, 2))
    moved = 2 * 2 * math.prod(shape)
    points = []
    for name in calls:
        seconds = timings.seconds[name]
        middle, low, high = (quantile(seconds, share) for share in (0.5, 0.2, 0.8))
        words = f"{list(shape)}, fp16, every row to another place"
        details = {"gigabytes_per_second": moved / middle / 1e9, "rounds": timings.rounds}
        points.append(
            Point("copies", name, place, 1e6 * middle, "us", words, 1e6 * low, 1e6 * high, details=details)
        )
    return points
