"""What a named model would gain: FLOP ratios and activation memory from its shape. Predicted, not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixmlp.verify.ideal import DecoderShape, IdealSpeedup
from radixmlp.verify.inspect.survey import BatchSum

BYTES = 2  # of a bf16 or fp16 value
MEMORY_FORMULA = (
    "rows x 2 bytes x max(2 hidden + 3 intermediate, 2 hidden + 2 query widths + 2 key-value widths)"
)
_QWEN3_VOCAB = 151_936


def _qwen3(hidden: int, intermediate: int, heads: int, layers: int) -> DecoderShape:
    return DecoderShape(hidden, heads, 8, 128, intermediate, _QWEN3_VOCAB, (None,) * layers)


SHAPES = {
    "Qwen3-0.6B": _qwen3(1024, 3072, 16, 28),
    "Qwen3-4B": _qwen3(2560, 9728, 32, 36),
    "Qwen3-8B": _qwen3(4096, 12288, 32, 36),
    "SmolLM2-135M": DecoderShape(576, 9, 3, 64, 1536, 49_152, (None,) * 30),
}
DEFAULT_MODELS = ("Qwen3-0.6B", "Qwen3-4B", "Qwen3-8B")


@dataclass(frozen=True)
class Prediction:
    """One model.

    Args:
        model: its name.
        trie, scatter: FLOPs of dense over those of the path, batches above the threshold run dense; the head for
            the last token of each sequence included.
        rows, tokens: N' and N of the batch whose dense run would need most memory.
        activation_bytes, dense_activation_bytes: peak activations of that batch beside the weights.
    """

    model: str
    trie: float
    scatter: float
    rows: int
    tokens: int
    activation_bytes: int
    dense_activation_bytes: int


def find_shape(name: str) -> DecoderShape:
    """The shape of a model by name, with or without its owner; of a folder or a hub name from its config.

    Raises:
        ValueError: it cannot be read; the message lists the names that need no network.
    """
    for known, shape in SHAPES.items():
        if name.lower().split("/")[-1].removesuffix("-instruct") == known.lower():
            return shape
    from transformers import AutoConfig

    try:
        return DecoderShape.from_config(AutoConfig.from_pretrained(name))
    except Exception as error:  # OSError, ValueError, KeyError of a config nobody wrote for us
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"cannot read the shape of the model {name!r}: {reason} Known without a network: {', '.join(SHAPES)}, "
            "or a local folder with a config.json."
        ) from None


def windows_of(shapes: Iterable[DecoderShape]) -> list[int | None]:
    """The sliding windows whose pairs have to be counted for these models; the whole path is always one."""
    found = dict.fromkeys([None, *(window for shape in shapes for window in shape.layer_windows)])
    return list(found)


def predict(model: str, shape: DecoderShape, batches: Sequence[BatchSum], threshold: float) -> Prediction:
    """Add up what each batch costs on each path."""
    work = [_work(shape, batch, threshold) for batch in batches]
    ideal = IdealSpeedup(
        sum(part.dense for part in work), sum(part.scatter for part in work), sum(part.trie for part in work)
    )
    largest = max(batches, key=lambda batch: batch.tokens)
    rows = largest.rows if largest.gamma <= threshold else largest.tokens
    per_row = BYTES * values_per_row(shape)
    return Prediction(
        model,
        ideal.speedup("trie"),
        ideal.speedup("scatter"),
        rows,
        largest.tokens,
        rows * per_row,
        largest.tokens * per_row,
    )


def flops(shape: DecoderShape, batch: BatchSum) -> IdealSpeedup:
    """One forward pass on each path, from a batch's sums; last-token logits included."""
    layers = len(shape.layer_windows)
    head = batch.sequences * shape.flops_per_logits_row
    dense_attention = shape.flops_per_pair * sum(batch.dense_pairs[w] for w in shape.layer_windows)
    trie_attention = shape.flops_per_pair * sum(batch.trie_pairs[w] for w in shape.layer_windows)
    return IdealSpeedup(
        dense=layers * batch.tokens * shape.flops_per_row + dense_attention + head,
        scatter=layers * batch.rows * shape.flops_per_row + dense_attention + head,
        trie=layers * batch.rows * shape.flops_per_row + trie_attention + head,
    )


def values_per_row(shape: DecoderShape) -> int:
    """Values alive at once per row, at the widest point of a layer.

    Hidden state and residual, and beside them either gate, up and their product, or Q, K, V and attention's output.
    """
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    return 2 * shape.hidden_size + max(3 * shape.intermediate_size, 2 * queries + 2 * keys)


def _work(shape: DecoderShape, batch: BatchSum, threshold: float) -> IdealSpeedup:
    work = flops(shape, batch)
    return work if batch.gamma <= threshold else IdealSpeedup(work.dense, work.dense, work.dense)
