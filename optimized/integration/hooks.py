"""The two functions transformers calls: one for attention, one for masks; and the switch that routes to them.

While a compact forward runs, the model's configs name our attention implementation. A call that does not belong
to that forward (another thread, another model made from the same config object) is passed on to the
implementation the config named before.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from radixmlp.optimized.attention import get_attention
from radixmlp.optimized.attention.interface import AttentionBackend
from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.integration.masks import MaskKind, classify_mask
from radixmlp.reference import AttentionSpec, TriePlan

IMPLEMENTATION = "radixmlp"
AUTO_ORDER = ("trie-sdpa", "scatter-sdpa")  # what "auto" tries, layer by layer


@dataclass
class CompactCall:
    """One compact forward in flight.

    Args:
        plan: the batch's plan, on the model's device.
        attention: a backend's name or "auto".
        modules: ids of the model's modules; attention calls of others are not ours.
        windows: the mask markers handed out, by id, and the sliding window each stands for.
        layers: ids of the attention modules that ran on our backend, in order.
    """

    plan: TriePlan
    attention: str
    modules: frozenset[int]
    windows: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    layers: list[int] = field(default_factory=list)


_current: ContextVar[CompactCall | None] = ContextVar("radixmlp_compact_call", default=None)
_switch_lock = threading.Lock()
_switched: dict[int, tuple[Any, str | None, int]] = {}  # id(config) -> (config, its implementation, users)


@contextmanager
def compact_call(model: nn.Module, call: CompactCall) -> Iterator[CompactCall]:
    """Route `model`'s attention to `call.attention` for the time of the block, in this thread or task only."""
    configs = _configs_of(model)
    _acquire(configs)
    token = _current.set(call)
    try:
        yield call
    finally:
        _current.reset(token)
        _release(configs)


@contextmanager
def named_attention(model: nn.Module, implementation: str) -> Iterator[None]:
    """Have `model` itself use another of transformers' implementations for the time of the block."""
    configs = _configs_of(model)
    before = {key: config._attn_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = implementation
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


def _configs_of(model: nn.Module) -> dict[int, Any]:
    """The distinct config objects of all submodules, by id."""
    return {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}


def _acquire(configs: dict[int, Any]) -> None:
    with _switch_lock:
        for key, config in configs.items():
            _, original, users = _switched.get(key, (config, config._attn_implementation, 0))
            _switched[key] = (config, original, users + 1)
            config._attn_implementation_internal = IMPLEMENTATION


def _release(configs: dict[int, Any]) -> None:
    with _switch_lock:
        for key in configs:
            config, original, users = _switched[key]
            if users > 1:
                _switched[key] = (config, original, users - 1)
            else:
                config._attn_implementation_internal = original
                del _switched[key]


def _original(config: Any) -> str:
    """The implementation `config` named before the switch."""
    with _switch_lock:
        entry = _switched.get(id(config))
    implementation = entry[1] if entry else config._attn_implementation
    return implementation if implementation not in (None, IMPLEMENTATION) else "eager"


def attention_hook(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Hq, N', D], key and value [1, Hkv, N', D] -> [1, N', Hq, Dv]."""
    call = _current.get()
    if call is None or id(module) not in call.modules:
        passed = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: given for name, given in passed.items() if given is not None}
        return _pass_on(module, query, key, value, attention_mask, kwargs)
    name = type(module).__name__
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(f"{name} adds a position bias to its scores: not supported")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal: a token's value depends on what follows it")
    rows = call.plan.num_nodes
    if query.shape[0] != 1 or query.shape[2] != rows or key.shape[2] != rows:
        raise UnsupportedModelError(
            f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}, expected {rows} rows of one "
            "compact batch: it reshapes the sequence or uses another source of keys"
        )
    spec = AttentionSpec(
        softmax_scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=_window(call, attention_mask, name),
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    backend = _backend(call, spec, query, module.training)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = backend(q, k, v, call.plan, spec)
    call.layers.append(id(module))
    return out.unsqueeze(0), None


def mask_hook(**kwargs: Any) -> Any:
    """transformers' mask function: no mask for plain causal attention, a marker for a sliding window."""
    call = _current.get()
    config = kwargs["config"]
    if call is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[_original(config)](**kwargs)
    depth = int(call.plan.depth.max()) if call.plan.num_nodes else 0
    kind, window = classify_mask(
        kwargs["mask_function"], kwargs.get("local_size"), depth, kwargs.get("use_vmap")
    )
    if kind is MaskKind.OTHER:
        raise UnsupportedModelError(
            f"{type(config).__name__} asks for a mask that is neither causal nor a sliding window over the "
            f"first {depth + 1} positions (chunked, bidirectional or custom): rows could not be shared"
        )
    if window is None:
        return None
    marker = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=call.plan.gather.device)
    call.windows[id(marker)] = (marker, window)
    return marker


def _window(call: CompactCall, attention_mask: Tensor | None, name: str) -> int | None:
    if attention_mask is None:
        return None
    entry = call.windows.get(id(attention_mask))
    if entry is None:
        raise UnsupportedModelError(f"{name} was given a mask that transformers' mask functions did not make")
    return entry[1]


def _backend(call: CompactCall, spec: AttentionSpec, query: Tensor, training: bool) -> AttentionBackend:
    names = AUTO_ORDER if call.attention == "auto" else (call.attention,)
    reasons = []
    for name in names:
        backend = get_attention(name)
        reason = backend.unsupported(spec, query.device, query.dtype, training)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise UnsupportedAttentionError("; ".join(reasons))


def _pass_on(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Any:
    """Run what the module would have run had its config not been switched."""
    implementation = _original(module.config)
    if implementation == "eager":
        eager = getattr(__import__(type(module).__module__, fromlist=["_"]), "eager_attention_forward", None)
        if eager is None:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} runs beside a compact forward of the same config object with eager "
                "attention: give each model its own config, or use attn_implementation='sdpa'"
            )
        return eager(module, query, key, value, mask, **kwargs)
    return ALL_ATTENTION_FUNCTIONS[implementation](module, query, key, value, mask, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention_hook)
AttentionMaskInterface.register(IMPLEMENTATION, mask_hook)
