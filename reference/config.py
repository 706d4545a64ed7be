"""What the reference decoder needs to know of a Hugging Face Qwen3 configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_REQUIRED = object()


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a Qwen3 decoder, under the names of its Hugging Face configuration.

    `sliding_windows` holds one window a layer (None: the layer attends to everything before it).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    attention_dropout: float
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]

    @classmethod
    def from_hugging_face(cls, config: Any) -> DecoderConfig:
        """Read a `transformers` configuration, any object with its attributes, or a `config.json` as a dict.

        Raises:
            ValueError: an attribute is missing, or asks for what the reference decoder does not compute.
        """
        _refuse_other_models(config)
        hidden_size = _get(config, "hidden_size")
        heads = _get(config, "num_attention_heads")
        return cls(
            vocab_size=_get(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_get(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=_get(config, "num_key_value_heads", None) or heads,
            head_dim=_get(config, "head_dim", None) or hidden_size // heads,
            rms_norm_eps=_get(config, "rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(config),
            attention_bias=_get(config, "attention_bias", False),
            attention_dropout=_get(config, "attention_dropout", 0.0),
            tie_word_embeddings=_get(config, "tie_word_embeddings", False),
            sliding_windows=_sliding_windows(config),
        )


def _get(config: Any, name: str, default: Any = _REQUIRED) -> Any:
    value = config.get(name, default) if isinstance(config, Mapping) else getattr(config, name, default)
    if value is _REQUIRED:
        raise ValueError(f"the configuration has no {name}: give a Qwen3 configuration")
    return value


def _refuse_other_models(config: Any) -> None:
    model_type = _get(config, "model_type", "qwen3")
    if model_type != "qwen3":
        raise ValueError(f"model_type is {model_type!r}: the reference decoder is a dense Qwen3")
    activation = _get(config, "hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act is {activation!r}: the reference decoder computes 'silu'")


def _rope_theta(config: Any) -> float:
    """Hugging Face keeps it in `rope_parameters`; configurations older than version 5 at the top level."""
    rope = {**(_get(config, "rope_scaling", None) or {}), **(_get(config, "rope_parameters", None) or {})}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ValueError(f"rope_type is {rope_type!r}: the reference decoder computes 'default'")
    theta = rope.get("rope_theta", _get(config, "rope_theta", None))
    return 10_000.0 if theta is None else float(theta)


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    layers = _get(config, "num_hidden_layers")
    window = _get(config, "sliding_window", None) if _get(config, "use_sliding_window", False) else None
    layer_types = _get(config, "layer_types", None)
    if layer_types is None:
        if window is None:
            return (None,) * layers
        first_sliding = _get(config, "max_window_layers")
        return tuple(window if layer >= first_sliding else None for layer in range(layers))
    if len(layer_types) < layers:
        raise ValueError(f"layer_types has {len(layer_types)} entries for {layers} layers: give one each")
    for layer, kind in enumerate(layer_types[:layers]):
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(
                f"layer_types[{layer}] is {kind!r}: expected full_attention or sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            raise ValueError(f"layer_types[{layer}] is sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types[:layers])
