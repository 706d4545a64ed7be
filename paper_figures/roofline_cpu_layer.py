"""A decoder on a CPU, operation by operation, as transformers' eager Qwen3 layer runs it."""

from __future__ import annotations

from collections import defaultdict

from radixmlp.verify.ideal import DecoderShape

from .roofline_cpu import ADD, COPY, GATE, NORM, ROPE, Cpu
from .roofline_work import Attended, Work


def cpu_parts(device: Cpu, shape: DecoderShape, work: Work, path: str, training: bool) -> dict[str, float]:
    """Seconds by part, all layers and the head."""
    rows = work.rows if path == "dense" else work.compact_rows
    layers = len(shape.layer_windows)
    parts = _layer(device, shape, rows, training)
    attended = work.trie if path == "trie" else work.dense
    parts["attention"] = _attention(device, shape, attended, training)
    if path == "scatter":
        parts["scatter and gather"] = _copies(device, shape, work, training)
    parts["calls"] = device.of(training).layer
    total = {name: layers * seconds for name, seconds in parts.items()}
    total[NORM] += device.operation(NORM, rows * shape.hidden_size, training)
    total["head"] = _head(device, shape, work, path, training)
    return total


def _layer(device: Cpu, shape: DecoderShape, rows: int, training: bool) -> dict[str, float]:
    """Everything that is done row by row."""
    hidden, inner, (q, kv) = shape.hidden_size, shape.intermediate_size, _widths(shape)
    parts: defaultdict[str, float] = defaultdict(float)
    for name, inputs, outputs in (
        ("projections", hidden, q),
        ("projections", hidden, kv),
        ("projections", hidden, kv),
        ("projections", q, hidden),
        ("MLP", hidden, inner),
        ("MLP", hidden, inner),
        ("MLP", inner, hidden),
    ):
        parts[name] += device.product(rows, inputs, outputs, training)
    for name, widths in (
        (NORM, (hidden, hidden, q, kv)),
        (ROPE, (q, kv)),
        (GATE, (inner,)),
        (ADD, (hidden,) * 2),
    ):
        for width in widths:
            parts[name] += device.operation(name, rows * width, training)
    return dict(parts)


def _attention(device: Cpu, shape: DecoderShape, attended: Attended, training: bool) -> float:
    heads, size, costs = shape.num_attention_heads, shape.head_dim, device.of(training)
    seconds = 0.0
    for merged, rows, pairs in (
        (False, attended.first_rows, attended.first_pairs),
        (True, attended.merged_rows, attended.merged_pairs),
    ):
        if rows:
            seconds += heads * pairs * costs.pair(merged, size, pairs / rows)
    out, value = (attended.rows * count * size * device.item for count in (heads, shape.num_key_value_heads))
    seconds += device.fresh(out)
    if training:  # the result and the values are kept; gradients are fp32
        seconds += device.grown(out) + device.grown(value) + device.fresh(out) + device.fresh(2 * out)
    return seconds


def _copies(device: Cpu, shape: DecoderShape, work: Work, training: bool) -> float:
    """Q, K and V to the ragged layout, the result back to the compact one."""
    q, kv = _widths(shape)
    sizes = [work.rows * q, work.rows * kv, work.rows * kv, work.compact_rows * q]
    return sum(device.operation(COPY, elements, training) for elements in sizes)


def _head(device: Cpu, shape: DecoderShape, work: Work, path: str, training: bool) -> float:
    rows = work.head_rows(path, training)
    if rows == 0:
        return 0.0
    costs, hidden, vocabulary = device.of(training), shape.hidden_size, shape.vocab_size
    if not training:
        return device.product(rows, hidden, vocabulary, training)
    products = costs.products.seconds(
        rows, hidden * vocabulary, 3
    )  # in chunks, whose memory a logit's cost includes
    return products + rows * vocabulary * costs.logit + hidden * vocabulary * costs.head_weight


def _widths(shape: DecoderShape) -> tuple[int, int]:
    """(of all query heads, of all KV heads)."""
    return shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
