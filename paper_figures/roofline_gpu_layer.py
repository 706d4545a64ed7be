"""A decoder on a GPU, kernel by kernel, as a serving engine with fused kernels runs it."""

from __future__ import annotations

from collections import defaultdict

from radixmlp.verify.ideal import DecoderShape

from .roofline_gpu import Gpu
from .roofline_work import Attended, Work

BYTES = 2  # bf16
ATTENTION_BACKWARD = 2.5  # five products for the forward's two: the scores are computed again


def gpu_parts(device: Gpu, shape: DecoderShape, work: Work, path: str, training: bool) -> dict[str, float]:
    """Seconds by part, all layers and the head."""
    rows = work.rows if path == "dense" else work.compact_rows
    attended = work.trie if path == "trie" else work.dense
    layers = len(shape.layer_windows)
    passes = 3 if training else 1
    parts: defaultdict[str, float] = defaultdict(float)
    for name, inputs, outputs in _matrices(shape):
        flops, moved = 2 * rows * inputs * outputs, BYTES * (rows * (inputs + outputs) + inputs * outputs)
        parts[name] += passes * layers * device.matmul(flops, moved)
    moved, kernels = _elementwise(shape, rows)
    parts["element-wise"] += passes * layers * device.elementwise(moved, kernels)
    parts["attention"] += layers * _attention(device, shape, attended, training)
    if path == "scatter":
        parts["scatter and gather"] += (2 if training else 1) * layers * _copies(device, shape, work)
    parts["head"] += _head(device, shape, work, path, training)
    return dict(parts)


def _matrices(shape: DecoderShape) -> list[tuple[str, int, int]]:
    """(part, inputs, outputs) of a layer's matrix products."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    return [
        ("projections", hidden, q + 2 * kv),
        ("projections", q, hidden),
        ("MLP", hidden, 2 * inner),
        ("MLP", inner, hidden),
    ]


def _elementwise(shape: DecoderShape, rows: int) -> tuple[int, int]:
    """(bytes, kernels): two norms that add the residual, head norms with RoPE in place, gated activation."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads = (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    width = 2 * 4 * hidden + 2 * heads + 3 * inner
    return BYTES * rows * width, 2 + 2 + 1


def _attention(device: Gpu, shape: DecoderShape, attended: Attended, training: bool) -> float:
    flops = attended.pairs * shape.flops_per_pair
    width = 2 * (shape.num_attention_heads + shape.num_key_value_heads) * shape.head_dim
    moved = BYTES * attended.rows * width
    seconds = device.attention(flops, moved)
    if training:
        seconds += device.attention(ATTENTION_BACKWARD * flops, 2 * moved, backward=True)
    return seconds


def _copies(device: Gpu, shape: DecoderShape, work: Work) -> float:
    """Q, K and V to the ragged layout, the result back: four kernels (paper, section 3)."""
    q, kv = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    out = BYTES * (work.compact_rows + work.rows) * (q + 2 * kv)
    back = BYTES * 2 * work.compact_rows * q
    return device.elementwise(out + back, 4)


def _head(device: Gpu, shape: DecoderShape, work: Work, path: str, training: bool) -> float:
    rows, passes = work.head_rows(path, training), 3 if training else 1
    if rows == 0:
        return 0.0
    hidden, vocab = shape.hidden_size, shape.vocab_size
    moved = BYTES * (rows * (hidden + vocab) + hidden * vocab)
    seconds = passes * device.matmul(rows * shape.flops_per_logits_row, moved)
    if training:  # the loss reads the logits and writes their gradient, in fp32
        seconds += device.elementwise(2 * 4 * rows * vocab)
    return seconds
