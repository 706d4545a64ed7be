"""`enable` and `disable`: what a model's compact forwards use unless a call says otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from radixmlp.optimized.attention import get_attention
from radixmlp.optimized.integration.checks import ensure_verified, forget


@dataclass(frozen=True)
class Settings:
    """Defaults of `forward` for one model."""

    attention: str = "auto"
    threshold: float = 0.9


_settings: WeakKeyDictionary[nn.Module, Settings] = WeakKeyDictionary()


def enable(model: Any, attention: str = "auto", threshold: float = 0.9) -> Any:
    """Verify that `model` may share prefixes and set the defaults of `radixmlp.forward(model, ...)`.

    The model object is not changed. Structure is checked first; then a small probe batch is compared with the
    model's own forward, in its dtype and on its device.

    Args:
        model: a transformers causal LM, base decoder or sequence classifier.
        attention: a name of `attention_backends()` or "auto".
        threshold: for "auto": batches with gamma = N'/N above it run densely.

    Returns:
        `model`.

    Raises:
        UnsupportedModelError: the compact forward would not equal the model's own, and why.
        UnsupportedAttentionError: there is no such backend.
        ValueError: `threshold` is not in [0, 1].
    """
    if attention != "auto":
        get_attention(attention)
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold is {threshold!r}: expected a gamma between 0 and 1")
    forget(model)
    ensure_verified(model)
    _settings[model] = Settings(attention, threshold)
    return model


def disable(model: Any) -> Any:
    """Forget what `enable` set; the model object itself was never changed. Returns `model`."""
    _settings.pop(model, None)
    forget(model)
    return model


def settings_of(model: Any) -> Settings:
    """What `enable` set for `model`, or the defaults."""
    return _settings.get(model, Settings())
