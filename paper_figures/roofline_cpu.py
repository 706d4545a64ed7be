"""A CPU as it was measured: rates and costs of the primitives that a pass is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Curve = tuple[tuple[float, float], ...]  # (size, seconds per unit), by size

NORM, ROPE, GATE, ADD, COPY = "norm", "rope", "gate", "add", "copy"
FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class Allocations:
    """Tensors as large as its input that one element-wise operation allocates, in its dtype and in fp32.

    Args:
        forward, backward: in the dtype of the model.
        forward_wide, backward_wide: in fp32.
        kept, kept_wide: of the forward's, those that a training step keeps for its backward.
    """

    forward: int
    forward_wide: int = 0
    backward: int = 0
    backward_wide: int = 0
    kept: int = 0
    kept_wide: int = 0


# Counted from transformers' Qwen3 layer. RMSNorm casts to fp32, squares, scales, casts back and applies its weight;
# RoPE multiplies, negates and concatenates halves, multiplies and adds; the MLP applies SiLU and multiplies, and
# keeps both factors' products beside what it makes.
ALLOCATIONS = {
    NORM: Allocations(2, 3, backward=3, backward_wide=5, kept=2, kept_wide=1),
    ROPE: Allocations(4, backward=5, kept=1),
    GATE: Allocations(2, backward=3, kept=4),
    ADD: Allocations(1, backward=1),
    COPY: Allocations(1, backward=1, kept=1),
}


@dataclass(frozen=True)
class Products:
    """Matrix products: seconds = flops / rate + weights * per_weight.

    Args:
        flops: FLOP/s of a product with many rows.
        per_weight: seconds an element of the weight matrix costs, however many rows there are: it is read, and
            laid out anew for the vector units.
    """

    flops: float
    per_weight: float

    def seconds(self, rows: float, weights: int, products: int) -> float:
        """Of `products` products of `rows` rows with as many weights each; what a weight costs is paid once."""
        return products * 2 * rows * weights / self.flops + weights * self.per_weight


@dataclass(frozen=True)
class Pass:
    """What a forward pass is made of, or a forward and a backward together.

    Args:
        products: matrix products with weights.
        chain, merged: seconds of one computed (query, key) pair of one query head, by head size and by the mean keys
            of a query: in calls that write a row for the first time, and in those merged into an earlier one.
        elementwise: seconds per element by operation and elements, in memory that is in use already.
        layer: seconds of one layer on hardly any rows: Python and calls.
        logit: seconds of one logit of the loss beside the products; 0 in a forward.
        head_weight: seconds of one weight of the head beside the products; 0 in a forward.
    """

    products: Products
    chain: dict[int, Curve]
    merged: dict[int, Curve]
    elementwise: dict[str, Curve]
    layer: float
    logit: float = 0.0
    head_weight: float = 0.0

    def pair(self, merged: bool, head_size: int, keys: float) -> float:
        """Seconds of one pair; linear in the head size between and beyond the two sizes that were measured."""
        curves = self.merged if merged else self.chain
        low, high = min(curves), max(curves)
        first, second = at(curves[low], keys), at(curves[high], keys)
        if low == high:
            return first
        return max(first + (head_size - low) / (high - low) * (second - first), 0.0)


@dataclass(frozen=True)
class Cpu:
    """One machine in one dtype.

    Args:
        name: the processor and its cores.
        item: bytes of an element.
        touch: seconds per byte of memory that is fresh from the operating system: its page faults.
        fresh_bytes: an allocation of this size or more is fresh each time (glibc's largest mmap threshold).
        forward, training: what passes are made of; `training` None: not calibrated.
    """

    name: str
    item: int
    touch: float
    fresh_bytes: int
    forward: Pass
    training: Pass | None

    def operation(self, name: str, elements: float, training: bool) -> float:
        """Seconds of one element-wise operation, forward, or forward and backward."""
        made, narrow, wide = ALLOCATIONS[name], elements * self.item, elements * FLOAT32
        seconds = elements * at(self.of(training).elementwise[name], elements)
        seconds += self.fresh(narrow, made.forward) + self.fresh(wide, made.forward_wide)
        if training:
            seconds += self.fresh(narrow, made.backward) + self.fresh(wide, made.backward_wide)
            seconds += self.grown(narrow, made.kept) + self.grown(wide, made.kept_wide)
        return seconds

    def product(self, rows: float, inputs: int, outputs: int, training: bool) -> float:
        """Seconds of rows [rows, inputs] times a weight; in training, of the gradients of both too."""
        weights = inputs * outputs
        seconds = self.of(training).products.seconds(rows, weights, 3 if training else 1)
        seconds += self.fresh(rows * outputs * self.item)
        if training:
            seconds += self.fresh(rows * inputs * self.item) + self.fresh(weights * self.item)
        return seconds

    def fresh(self, size: float, count: int = 1) -> float:
        """Page faults of `count` tensors of `size` bytes, which are fresh each time where they are large."""
        return count * size * self.touch if size >= self.fresh_bytes else 0.0

    def grown(self, size: float, count: int = 1) -> float:
        """Page faults of `count` smaller tensors that stay: the heap grows by them and shrinks after the step."""
        return count * size * self.touch if size < self.fresh_bytes else 0.0

    def of(self, training: bool) -> Pass:
        """The pass' costs.

        Raises:
            ValueError: training was not calibrated.
        """
        if not training:
            return self.forward
        if self.training is None:
            raise ValueError(f"{self.name}: the training step was not calibrated in this dtype: use bfloat16")
        return self.training


def at(curve: Curve, size: float) -> float:
    """Seconds per unit at `size`: linear in log(size) between the points, constant beyond them."""
    if size <= curve[0][0]:
        return curve[0][1]
    for (low, first), (high, second) in pairwise(curve):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return first + share * (second - first)
    return curve[-1][1]


def cpu_device(measured: Mapping[str, Any], dtype: str = "bfloat16") -> Cpu:
    """The CPU that a measurement's calibration describes.

    Args:
        measured: the document of `measured/<device>.json`, with "environment" and "roofline".
        dtype: "bfloat16" or "float32" (prefill only).

    Raises:
        ValueError: there is no calibration, or none for the dtype.
    """
    roofline = measured.get("roofline")
    if not roofline:
        raise ValueError("the measurement has no roofline calibration: run radixmlp figures --measure")
    costs = roofline["dtypes"].get(dtype)
    if costs is None:
        raise ValueError(
            f"the roofline is not calibrated for {dtype}: choose from {sorted(roofline['dtypes'])}"
        )
    training = costs.get("training")
    return Cpu(
        name=str(measured.get("environment", {}).get("device", "this CPU")),
        item=4 if dtype == "float32" else 2,
        touch=float(roofline["touch"]),
        fresh_bytes=int(roofline["fresh_bytes"]),
        forward=_pass(costs["forward"]),
        training=None if training is None else _pass(training),
    )


def _pass(stored: Mapping[str, Any]) -> Pass:
    chain, merged = (
        {int(size): _curve(points) for size, points in stored[kind].items()} for kind in ("chain", "merged")
    )
    return Pass(
        products=Products(**stored["products"]),
        chain=chain,
        merged=merged,
        elementwise={name: _curve(points) for name, points in stored["elementwise"].items()},
        layer=stored["layer"],
        logit=stored.get("logit", 0.0),
        head_weight=stored.get("head_weight", 0.0),
    )


def _curve(points: Sequence[Sequence[float]]) -> Curve:
    return tuple((float(size), float(seconds)) for size, seconds in points)
