"""Whether a compact call can fill a model's KV cache, and when the model has one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from radixmlp.optimized.errors import UnsupportedModelError
from radixmlp.optimized.integration.facts import Facts
from radixmlp.optimized.integration.settings import DropIn


def probe_cache(backbone: nn.Module, state: DropIn, ids: Tensor, mask: Tensor) -> Facts:
    """`state.facts` with what is known of caches, from padded calls of an enabled model in eval mode."""
    return replace(
        state.facts,
        caches=_fills_it(backbone, state, ids, mask),
        caches_in_training=_returns_it_in_training(backbone, state, ids, mask),
    )


def _fills_it(backbone: nn.Module, state: DropIn, ids: Tensor, mask: Tensor) -> bool:
    """Whether the cache of a compact call, once read, equals the model's own, layer by layer."""
    before, state.facts = state.facts, replace(state.facts, caches=True)
    try:
        ours = _cache_of(backbone(input_ids=ids, attention_mask=mask, use_cache=True))
        state.active = False
        own = _cache_of(backbone(input_ids=ids, attention_mask=mask, use_cache=True))
        if ours is None or own is None:
            return ours is own
        return _equal(ours, own, mask.bool(), max(before.tolerance, 1e-4))
    except (RuntimeError, IndexError, AttributeError, UnsupportedModelError):  # a cache of another kind
        return False
    finally:
        state.active, state.facts = True, before


def _equal(ours: Any, own: Any, real: Tensor, tolerance: float) -> bool:
    if type(own) is not DynamicCache or ours.get_seq_length() != own.get_seq_length():
        return False
    if [type(layer) for layer in ours.layers] != [type(layer) for layer in own.layers]:
        return False
    for mine, theirs in zip(ours.layers, own.layers, strict=True):
        for got, expected in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            if got is None or expected is None:
                if got is not expected:
                    return False
                continue
            seen = real[:, -expected.shape[2] :]
            a, b = (x.transpose(1, 2)[seen].double() for x in (got, expected))
            if got.shape != expected.shape or not float((a - b).norm()) <= tolerance * float(b.norm()):
                return False
    return True


def _returns_it_in_training(backbone: nn.Module, state: DropIn, ids: Tensor, mask: Tensor) -> bool:
    """Whether the model's own forward returns a cache in training mode, too."""
    state.active = False
    try:
        with torch.random.fork_rng(devices=[ids.device] if ids.is_cuda else []):
            backbone.train()
            return _cache_of(backbone(input_ids=ids, attention_mask=mask, use_cache=True)) is not None
    finally:
        backbone.eval()
        state.active = True


def _cache_of(output: Any) -> Any:
    """The cache in an output, a mapping or a tuple."""
    values = output.values() if hasattr(output, "values") else output
    return next((value for value in values if isinstance(value, Cache)), None)
