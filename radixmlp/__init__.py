"""radixmlp: compute every shared prefix of a batch once (arXiv 2601.15013), on any Hugging Face causal model.

The vocabulary (`RaggedBatch`, `TriePlan`, `AttentionSpec`) and `radixmlp.reference` need PyTorch alone;
everything else is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from radixmlp import reference
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

if TYPE_CHECKING:
    from radixmlp.optimized.attention import (
        AttentionBackend,
        attention_backends,
        register_attention,
        unregister_attention,
    )
    from radixmlp.optimized.engine import Engine, EngineConfig, RequestError
    from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
    from radixmlp.optimized.index import build_plan
    from radixmlp.optimized.integration import RaggedOutput, disable, enable, forward

_HOMES = {
    "AttentionBackend": "radixmlp.optimized.attention",
    "Engine": "radixmlp.optimized.engine",
    "EngineConfig": "radixmlp.optimized.engine",
    "RaggedOutput": "radixmlp.optimized.integration",
    "RequestError": "radixmlp.optimized.engine",
    "UnsupportedAttentionError": "radixmlp.optimized.errors",
    "UnsupportedModelError": "radixmlp.optimized.errors",
    "attention_backends": "radixmlp.optimized.attention",
    "build_plan": "radixmlp.optimized.index",
    "disable": "radixmlp.optimized.integration",
    "enable": "radixmlp.optimized.integration",
    "forward": "radixmlp.optimized.integration",
    "register_attention": "radixmlp.optimized.attention",
    "unregister_attention": "radixmlp.optimized.attention",
}

__version__ = "0.1.0"

__all__ = [
    "AttentionBackend",
    "AttentionSpec",
    "Engine",
    "EngineConfig",
    "RaggedBatch",
    "RaggedOutput",
    "RequestError",
    "TriePlan",
    "UnsupportedAttentionError",
    "UnsupportedModelError",
    "attention_backends",
    "build_plan",
    "disable",
    "enable",
    "forward",
    "reference",
    "register_attention",
    "unregister_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'radixmlp' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
