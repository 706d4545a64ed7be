"""The two curves of the cost model: a linear one with costs that are never negative, and one through points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations

import torch


def fit_costs(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """The costs c >= 0 with features @ c close to `seconds`, in relative error.

    With three features the sets of non-zero costs can be tried one by one.

    Args:
        features: [samples, k], not negative.
        seconds: [samples], positive.

    Raises:
        ValueError: there are no samples, or a time is not positive.
    """
    if not seconds or min(seconds) <= 0:
        raise ValueError(f"cannot fit costs to the times {list(seconds)}: expected positive seconds")
    weights = torch.tensor(seconds, dtype=torch.float64).reciprocal()
    matrix = torch.tensor(features, dtype=torch.float64) * weights[:, None]
    target = torch.ones(len(seconds), dtype=torch.float64)
    columns = [i for i in range(matrix.shape[1]) if bool(matrix[:, i].any())]
    best, least = [0.0] * matrix.shape[1], float(target.norm())
    for size in range(1, len(columns) + 1):
        for chosen in combinations(columns, size):
            part = matrix[:, list(chosen)]
            scale = part.norm(dim=0)
            solution = torch.linalg.lstsq(part / scale, target[:, None]).solution[:, 0] / scale
            error = float((part @ solution - target).norm())
            if bool((solution >= 0).all()) and error < least:
                best, least = [0.0] * matrix.shape[1], error
                for i, cost in zip(chosen, solution.tolist(), strict=True):
                    best[i] = cost
    return tuple(best)


def interpolate(points: Sequence[tuple[int, float]], x: float) -> float:
    """The value at `x` on the line through `points` (x ascending).

    Below the first point the value stays: a fixed cost does not shrink with the work. Beyond the last one the last
    slope goes on, but no flatter than half of that point's mean, whatever noise says.
    """
    places = [place for place, _ in points]
    if x <= places[0]:
        return points[0][1]
    index = min(bisect_left(places, x), len(points) - 1)
    high, above = points[index]
    low, below = points[index - 1] if index else (0, 0.0)
    slope = (above - below) / (high - low)
    if x > high:
        slope = max(slope, above / high / 2)
    return above + slope * (x - high)


def ascending(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Times that never fall as the rows grow: a smaller time later is noise in the earlier one."""
    risen: list[tuple[int, float]] = []
    least = float("inf")
    for rows, seconds in reversed(points):
        least = min(least, seconds)
        risen.append((rows, least))
    return tuple(reversed(risen))
