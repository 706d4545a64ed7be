"""The primitives of a decoder on a CPU, timed one by one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

import radixmlp
from radixmlp.optimized.training.chunked import WeightedLoss
from radixmlp.optimized.training.edges import Edges
from radixmlp.optimized.training.head import LinearHead
from radixmlp.reference import RaggedBatch
from radixmlp.training import causal_lm_loss

from .roofline_cpu import ADD, GATE, NORM, ROPE

Widths = Sequence[tuple[int, int]]
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Clock:
    """The shortest of `repeats` calls after a first one: a busy machine only ever adds to it."""

    repeats: int
    now: Callable[[], float] = time.perf_counter

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""
        call()
        best = float("inf")
        collecting = gc.isenabled()
        gc.disable()
        try:
            for _ in range(self.repeats):
                start = self.now()
                call()  # what it returns is freed within the time, as inside a pass
                best = min(best, self.now() - start)
        finally:
            if collecting:
                gc.enable()
        return best

    def step_seconds(self, call: Call, leaves: Sequence[Tensor], training: bool) -> float:
        """Seconds of `call`, and where training of its backward into fresh gradients of `leaves`."""
        if not training:
            return self.seconds(call)
        upstream = torch.ones_like(call(), requires_grad=False)

        def step() -> None:
            for leaf in leaves:
                leaf.grad = None
            call().backward(upstream)

        return self.seconds(step)


def page_fault_seconds(clock: Clock, size: int) -> float:
    """Seconds per byte that writing a fresh tensor of `size` bytes costs more than writing it again."""
    used = torch.zeros(size, dtype=torch.uint8)
    fresh = clock.seconds(lambda: torch.empty(size, dtype=torch.uint8).fill_(1))
    return max(fresh - clock.seconds(lambda: used.fill_(1)), 0.0) / size


def product_costs(
    dtype: torch.dtype, widths: Widths, few: int, many: int, clock: Clock, training: bool
) -> dict[str, float]:
    """`Products` over all weights: few rows show what a weight costs, many the rate.

    Raises:
        RuntimeError: more rows took less time.
    """
    seconds, weights = {few: 0.0, many: 0.0}, 0
    for inputs, outputs in widths:
        weights += inputs * outputs
        weight = torch.randn(outputs, inputs).to(dtype).requires_grad_(training)
        for rows in (few, many):
            x = torch.randn(rows, inputs).to(dtype).requires_grad_(training)
            seconds[rows] += clock.step_seconds(lambda x=x, w=weight: linear(x, w), [x, weight], training)  # type: ignore[misc]
    flops = 2 * weights * (3 if training else 1)
    if seconds[many] <= seconds[few]:
        raise RuntimeError(
            f"products of {many} rows took {seconds[many]:.2e} s, of {few} rows {seconds[few]:.2e} s: the machine "
            "is too busy to calibrate; run it again when it is quiet"
        )
    rate = flops * (many - few) / (seconds[many] - seconds[few])
    return {"flops": rate, "per_weight": max(seconds[few] - flops * few / rate, 0.0) / weights}


def elementwise_seconds(kind: str, elements: int, dtype: torch.dtype, clock: Clock, training: bool) -> float:
    """Seconds per element of transformers' own code of one operation on tensors of 1024 columns."""
    rows, width = max(elements // 1024, 1), 1024
    x, other = (torch.randn(1, rows, width).to(dtype).requires_grad_(training) for _ in range(2))
    call, leaves = _elementwise(kind, x, other)
    return clock.step_seconds(call, leaves, training) / (rows * width)


def _elementwise(kind: str, x: Tensor, other: Tensor) -> tuple[Call, list[Tensor]]:
    rows, width = x.shape[1:]
    if kind == NORM:
        norm = Qwen3RMSNorm(width).to(x.dtype).requires_grad_(x.requires_grad)
        return lambda: norm(x), [x, norm.weight]
    if kind == ROPE:
        heads = x.unflatten(2, (-1, 128)).transpose(1, 2)  # [1, H, rows, 128]
        turn = torch.randn(1, rows, 128).to(x.dtype)
        return lambda: apply_rotary_pos_emb(heads, heads[:, :0], turn, turn)[0], [x]
    if kind == GATE:
        return lambda: silu(x) * other, [x, other]
    if kind == ADD:
        return lambda: x + other, [x, other]
    order = torch.arange(rows)
    return lambda: x[0].index_select(0, order), [x]


def layer_seconds(dtype: torch.dtype, clock: Clock, training: bool, layers: int = 8) -> float:
    """Seconds of one layer of a model so small, on so few rows, that calls are all there is."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config).eval()
    radixmlp.forward(model, RaggedBatch.from_sequences([[1, 2], [1, 3]]))  # the checks of a first use
    model = model.to(dtype)
    batch = RaggedBatch.from_sequences([[1, 2, 3], [1, 2, 4]])
    if not training:
        return clock.seconds(lambda: radixmlp.forward(model, batch, "trie-sdpa")) / layers
    leaves = list(model.parameters())
    return (
        clock.step_seconds(lambda: causal_lm_loss(model, batch, attention="trie-sdpa"), leaves, True) / layers
    )


def head_costs(
    dtype: torch.dtype, vocabulary: int, hidden: int, clock: Clock, products: dict[str, float]
) -> dict[str, float]:
    """What the loss costs beside its products: per logit, and per weight of the head whatever the rows."""
    few, many = 512, 2048
    linear_head = nn.Linear(hidden, vocabulary, bias=False).to(dtype)
    head = LinearHead(linear_head)
    seconds = {}
    for rows in (few, many):
        x = torch.randn(rows, hidden).to(dtype).requires_grad_()
        order = torch.arange(rows)
        edges = Edges(order, order, order % vocabulary, order)
        ones = torch.ones(rows)

        def loss(x: Tensor = x, edges: Edges = edges, ones: Tensor = ones) -> Tensor:
            total: Tensor = WeightedLoss.apply(x, head, edges, ones, *head.parameters)
            return total

        seconds[rows] = clock.step_seconds(loss, [x, linear_head.weight], True)
    weights = hidden * vocabulary
    row = (seconds[many] - seconds[few]) / (many - few)
    logit = max(row - 6 * weights / products["flops"], 0.0) / vocabulary
    fixed = max(seconds[few] - few * row - weights * products["per_weight"], 0.0)
    return {"logit": logit, "head_weight": fixed / weights}
