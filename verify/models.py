"""Models by name: tiny random families, exact Qwen3 widths, SmolLM2's real weights, anything from the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from radixmlp.verify import smollm2

SMOLLM2 = "smollm2-135m"
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# With transformers' own std of 0.02 attention is almost uniform and a wrong mask hides; with a much larger
# one the models' own float32 casts alone cost more than an fp64 parity allows.
MATRIX_SCALE = 4.0
_TINY_VOCAB = 512
# Neither the embedding look-up nor a last-token head costs enough to justify Qwen3's 151,936 rows.
_WIDTH_VOCAB = 16_384
_MAX_LAYERS = 4


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode, how many ids it knows, and (read when first asked for) its tokenizer."""

    name: str
    model: Any
    vocab_size: int
    read_tokenizer: Callable[[], Any | None] = field(repr=False)

    @cached_property
    def tokenizer(self) -> Any | None:
        """What text workloads encode with; None: bytes."""
        return self.read_tokenizer()


@dataclass(frozen=True)
class _Width:
    """One layer of a published model."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    tie_word_embeddings: bool


_WIDTHS = {
    "qwen3-0.6b-width": _Width(1024, 3072, 16, True),
    "qwen3-4b-width": _Width(2560, 9728, 32, True),
    "qwen3-8b-width": _Width(4096, 12288, 32, False),
}
_WIDTH_NAME = re.compile(rf"({'|'.join(map(re.escape, _WIDTHS))})(?::(\d+))?")


def model_names() -> list[str]:
    """The names `load_model` knows without a folder or the hub; widths also take `:LAYERS`, 1 to 4."""
    return [*_TINY, *_WIDTHS, SMOLLM2]


def check_model_name(name: str) -> None:
    """Refuse a name that cannot be loaded, before anything is computed.

    Raises:
        ValueError: the message lists the known names, or says why a folder or hub name cannot be read.
    """
    if name in _TINY or name == SMOLLM2:
        return
    if _WIDTH_NAME.fullmatch(name):
        _width_config(name)
    elif "/" in name or Path(name).is_dir():
        _pretrained_config(name)
    else:
        raise ValueError(
            f"unknown model {name!r}: known are {', '.join(model_names())}, a width with :LAYERS (1 to "
            f"{_MAX_LAYERS}), a local folder, or a Hugging Face name such as Qwen/Qwen3-0.6B"
        )


def load_model(
    name: str,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Load the model called `name`, in eval mode.

    Random weights depend on the name alone: every dtype is a rounding of the same fp32 values. Rotary tables
    stay fp32 in every dtype, as `from_pretrained` leaves them.

    Args:
        name: see `model_names()`, or a local folder, or a name on the hub.
        dtype: torch dtype, or its name ("bfloat16").
        attn_implementation: of the model's own forward; "eager" is taken where SDPA cannot express the layer
            (softcap, sinks).

    Raises:
        ValueError: an unknown name, dtype or an unreachable model.
    """
    dtype = _dtype(dtype)
    if name in _TINY:
        config, eager_only = _TINY[name]()
        model = _random_model(config, "eager" if eager_only else attn_implementation)
        _strengthen(model)
        cast_parameters(model, dtype)
        return _loaded(name, model, smollm2.load_tokenizer, device)
    if _WIDTH_NAME.fullmatch(name):
        model = cast_parameters(_random_model(_width_config(name), attn_implementation), dtype)
        return _loaded(name, model, smollm2.load_tokenizer, device)
    if name == SMOLLM2:
        return _loaded(name, smollm2.load_model(dtype, attn_implementation), smollm2.load_tokenizer, device)
    check_model_name(name)
    return _load_pretrained(name, dtype, device, attn_implementation)


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Round the weights to `dtype` in place, as `from_pretrained(dtype=...)` would.

    `model.to(dtype)` would also round the rotary frequencies, which transformers keeps in fp32.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products take no fp64
    return model


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _loaded(
    name: str, model: nn.Module, tokenizer: Callable[[], Any | None], device: torch.device | str
) -> LoadedModel:
    model = model.to(device).eval()
    vocab_size: int = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    return LoadedModel(name, model, vocab_size, tokenizer)


def _random_model(config: Any, attn_implementation: str) -> Any:
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        )


@torch.no_grad()
def _strengthen(model: nn.Module) -> None:
    """Larger matrices, and vectors (norms, biases, sinks) away from their defaults: every weight matters."""
    noise = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2:
            parameter.mul_(MATRIX_SCALE)
        else:
            spread = 1.0 if name.endswith("sinks") else 0.1
            parameter.add_(spread * torch.randn(parameter.shape, generator=noise))


def _width_config(name: str) -> Any:
    from transformers import Qwen3Config

    match = _WIDTH_NAME.fullmatch(name)
    assert match is not None
    width, layers = _WIDTHS[match[1]], int(match[2] or 1)
    if not 1 <= layers <= _MAX_LAYERS:
        raise ValueError(f"{name}: {layers} layers, expected 1 to {_MAX_LAYERS} (all layers cost the same)")
    return Qwen3Config(
        vocab_size=_WIDTH_VOCAB,
        hidden_size=width.hidden_size,
        intermediate_size=width.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=width.num_attention_heads,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=width.tie_word_embeddings,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )


def _tiny_sizes(**changes: Any) -> dict[str, Any]:
    sizes = {
        "vocab_size": _TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return sizes | changes


def _tiny_qwen3() -> tuple[Any, bool]:
    from transformers import Qwen3Config

    return Qwen3Config(**_tiny_sizes(tie_word_embeddings=True)), False


def _tiny_llama() -> tuple[Any, bool]:
    from transformers import LlamaConfig

    return LlamaConfig(**_tiny_sizes(num_key_value_heads=1, tie_word_embeddings=False)), False


def _tiny_mistral() -> tuple[Any, bool]:
    """Every layer sees only the last 24 tokens."""
    from transformers import MistralConfig

    return MistralConfig(**_tiny_sizes(sliding_window=24)), False


def _tiny_gemma2() -> tuple[Any, bool]:
    """Soft-capped scores, sliding and full layers in turn."""
    from transformers import Gemma2Config

    sizes = _tiny_sizes(sliding_window=24, query_pre_attn_scalar=16, attn_logit_softcapping=5.0)
    return Gemma2Config(**sizes), True


def _tiny_gpt_oss() -> tuple[Any, bool]:
    """Attention sinks, sliding and full layers in turn, a mixture of experts.

    Every token goes to every expert: a choice that flips when a router's score is rounded would be the
    model's own noise, larger than anything measured here.
    """
    from transformers import GptOssConfig

    rope = {"rope_type": "default", "rope_theta": 150_000.0}
    sizes = _tiny_sizes(sliding_window=24, num_local_experts=2, num_experts_per_tok=2, rope_parameters=rope)
    return GptOssConfig(**sizes), True


_TINY: dict[str, Callable[[], tuple[Any, bool]]] = {
    "tiny-qwen3": _tiny_qwen3,
    "tiny-llama": _tiny_llama,
    "tiny-mistral": _tiny_mistral,
    "tiny-gemma2": _tiny_gemma2,
    "tiny-gpt-oss": _tiny_gpt_oss,
}


def _pretrained_config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        where = (
            "folder" if Path(name).is_dir() else "Hugging Face name (is there a network, and does it exist?)"
        )
        raise ValueError(f"cannot load model {name!r} as a {where}: {reason}") from None


def _load_pretrained(
    name: str, dtype: torch.dtype, device: torch.device | str, attn_implementation: str
) -> LoadedModel:
    from transformers import AutoModel, AutoModelForCausalLM

    architectures = _pretrained_config(name).architectures or []
    headless = architectures and not any("CausalLM" in a or "LMHead" in a for a in architectures)
    kind = AutoModel if headless else AutoModelForCausalLM
    try:
        with smollm2.quiet_loading():
            model = kind.from_pretrained(name, dtype=dtype, attn_implementation=attn_implementation)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load model {name!r}: {str(error).strip().splitlines()[0]}") from None
    return _loaded(name, model, partial(_pretrained_tokenizer, name), device)


def _pretrained_tokenizer(name: str) -> Any | None:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None  # weights without a tokenizer
