"""Whether a model may run on the trie: structure first, then a probe of it against its own forward."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.integration.hooks import named_attention
from radixmlp.reference import RaggedBatch

# Branches at two depths, duplicates, a sequence that ends inside another, and a lone one.
_PROBE = (
    (5, 6, 7, 8, 9, 10),
    (5, 6, 7, 11, 12),
    (5, 6, 7, 8, 13, 14, 15),
    (5, 6, 7, 8, 9, 10),
    (5, 6, 7),
    (5, 16, 17, 18),
    (19, 6, 7, 8),
)
# Largest difference allowed, as a share of the norm. Below fp32 a deep model amplifies rounding by as much as
# it likes, so there it may also be `_NOISE_FACTOR` times what its own two attention implementations differ by.
_TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_NOISE_FACTOR = 2.0

_verified: WeakSet[nn.Module] = WeakSet()


def backbone_of(model: Any) -> nn.Module:
    """The decoder without its head (`model` itself where it has none)."""
    return getattr(model, "base_model", model)


class Head(Enum):
    """What a model puts on its decoder."""

    NONE = "none"
    LANGUAGE = "language"
    SEQUENCE = "sequence"


def head_of(model: Any) -> Head:
    """The kind of head.

    Raises:
        UnsupportedModelError: a head that is none of the three.
    """
    name = type(model).__name__
    if backbone_of(model) is model:
        return Head.NONE
    if name.endswith("ForSequenceClassification") and hasattr(model, "score"):
        return Head.SEQUENCE
    if model.get_output_embeddings() is not None:
        return Head.LANGUAGE
    raise UnsupportedModelError(
        f"{name} has a head that is neither a language model's nor a sequence classifier's: "
        "run its base_model and apply the head to last_hidden_state"
    )


def check_structure(model: Any) -> None:
    """Refuse what no probe is needed for.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise UnsupportedModelError(
            f"{name} is not a transformers model: it has no config with an attention choice"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder: only causal decoders share prefixes")
    head_of(model)
    accepted = inspect.signature(backbone_of(model).forward).parameters
    missing = [p for p in ("input_ids", "position_ids", "attention_mask") if p not in accepted]
    if missing:
        raise UnsupportedModelError(
            f"{name} takes no {' and no '.join(missing)}: the positions of shared rows could not be given"
        )


def check_call(model: Any, plan_max_position: int) -> None:
    """Refuse what depends on the call: gradient checkpointing, RoPE whose frequencies depend on the length.

    Raises:
        UnsupportedModelError: with the reason and the remedy.
    """
    name = type(model).__name__
    if model.training and torch.is_grad_enabled() and getattr(model, "is_gradient_checkpointing", False):
        raise UnsupportedModelError(
            f"{name} has gradient checkpointing on, which recomputes layers outside this call: "
            "model.gradient_checkpointing_disable(), or eval()"
        )
    limit = _length_dependent_rope_limit(model.config)
    if limit is not None and plan_max_position >= limit:
        raise UnsupportedModelError(
            f"{name} changes its RoPE frequencies from position {limit} on (position {plan_max_position} given): "
            "sequences on either side of it do not share prefixes; keep the batch below it"
        )


def _length_dependent_rope_limit(config: Any) -> int | None:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return None
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            return int(
                original
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
    return None


def ensure_verified(model: Any) -> None:
    """Check the structure and run the probe, once a model object.

    Raises:
        UnsupportedModelError: the compact forward would not equal the model's own, and why.
    """
    if model in _verified:
        return
    check_structure(model)
    _probe(model)
    _verified.add(model)


def forget(model: nn.Module) -> None:
    """Have the next use check `model` again."""
    _verified.discard(model)


def _probe(model: Any) -> None:
    # Imported here: the probe drives what it guards.
    from radixmlp.optimized.integration.compact import run_compact

    name = type(model).__name__
    sequences = _probe_sequences(model)
    batch = RaggedBatch.from_sequences(sequences)
    was_training = {module for module in model.modules() if module.training}
    model.eval()
    try:
        with torch.no_grad():
            own = _own_hidden(model, sequences)
            noise = _own_noise(model, sequences, own)
            result, call = run_compact(model, batch, "auto", logits_to_keep=1)
            compact = result.last_hidden_state
    except (UnsupportedModelError, UnsupportedAttentionError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name}: the probe failed ({type(error).__name__}: {error}); it does not attend through "
            "transformers' attention and mask interfaces alone"
        ) from error
    finally:
        for module in was_training:
            module.training = True
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", len(call.layers))
    if len(call.layers) != layers or len(set(call.layers)) != layers:
        raise UnsupportedModelError(
            f"{name}: {len(call.layers)} of its {layers} layers attended through transformers' attention "
            "interface; the others mix rows in a way the trie does not see"
        )
    _compare(name, compact, own, noise)


def _probe_sequences(model: Any) -> list[list[int]]:
    """The probe in ids from all over the vocabulary: the lowest are often special tokens, hardly trained."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [[(vocabulary // 3 + 1499 * token) % vocabulary for token in sequence] for sequence in _PROBE]


def _own_hidden(model: Any, sequences: list[list[int]]) -> Tensor:
    """[N, hidden] of the model's own forward, each sequence alone."""
    backbone, device = backbone_of(model), model.get_input_embeddings().weight.device
    rows = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=device)
        rows.append(backbone(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0][0])
    return torch.cat(rows)


def _own_noise(model: Any, sequences: list[list[int]], own: Tensor) -> float:
    """How far the model's eager and fused attention differ, as a share of the norm; 0 where it has but one."""
    if own.dtype not in (torch.float16, torch.bfloat16):
        return 0.0
    other = "eager" if model.config._attn_implementation != "eager" else "sdpa"
    try:
        with named_attention(model, other):
            return _difference(_own_hidden(model, sequences), own)
    except (ValueError, KeyError, RuntimeError):  # it has no other implementation
        return 0.0


def _difference(got: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def _compare(name: str, compact: Tensor, own: Tensor, noise: float) -> None:
    if compact.shape != own.shape:
        raise UnsupportedModelError(
            f"{name}: the compact forward gives {tuple(compact.shape)}, its own {tuple(own.shape)}"
        )
    difference = _difference(compact, own)
    tolerance = max(_TOLERANCE.get(own.dtype, _TOLERANCE[torch.float32]), _NOISE_FACTOR * noise)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{name}: a probe batch differs from the model's own forward by {difference:.2e} of its norm "
            f"(allowed: {tolerance:.0e}): something besides causal attention mixes rows"
        )
