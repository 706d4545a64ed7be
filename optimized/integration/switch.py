"""The switch between a model's own attention and ours, and the calls it is made for.

While a compact forward runs, the model's configs name our attention implementation. A call that does not belong to
that forward (another thread, another model made from the same config object) is passed on to what the config named
before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from radixmlp.optimized.attention.interface import AttentionBackend
from radixmlp.reference import TriePlan

IMPLEMENTATION = "radixmlp"
AUTO_ORDER = ("trie-sdpa", "scatter-sdpa")  # what "auto" tries, layer by layer, where nothing else was chosen


@dataclass
class CompactCall:
    """One compact forward in flight.

    Args:
        plan: the batch's plan, on the model's device.
        attention: a backend's name or "auto", or a backend that is not registered.
        order: what "auto" tries, layer by layer.
        modules: ids of the model's modules; attention calls of others are not ours.
        markers: the mask markers handed out, by id, and the sliding window each stands for.
        seen: (module, mask, other arguments) of each attention call that ran on our backend, in order.
    """

    plan: TriePlan
    attention: str | AttentionBackend
    modules: frozenset[int]
    order: tuple[str, ...] = AUTO_ORDER
    markers: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    seen: list[tuple[nn.Module, Tensor | None, dict[str, Any]]] = field(default_factory=list)

    @classmethod
    def on(
        cls,
        model: nn.Module,
        plan: TriePlan,
        attention: str | AttentionBackend,
        chosen: str | None = None,
    ) -> CompactCall:
        """A call of `model`; `chosen` is what "auto" tries first."""
        order = AUTO_ORDER if chosen is None else tuple(dict.fromkeys((chosen, *AUTO_ORDER)))
        return cls(plan, attention, frozenset(id(module) for module in model.modules()), order)


@dataclass
class AttentionCall:
    """What one call of transformers' attention function was given and returned, outside compact forwards."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    attention_mask: Tensor | None
    kwargs: dict[str, Any]
    output: Tensor


current_call: ContextVar[CompactCall | None] = ContextVar("radixmlp_compact_call", default=None)
_named: ContextVar[str | None] = ContextVar("radixmlp_named_attention", default=None)
record: ContextVar[list[AttentionCall] | None] = ContextVar("radixmlp_attention_record", default=None)
_switch_lock = threading.Lock()
_wrapped: dict[int, tuple[Callable[..., Any], int]] = {}  # id(module) -> (its checkpointing function, users)
_switched: dict[int, tuple[Any, str | None, int]] = {}  # id(config) -> (config, its implementation, users)


@contextmanager
def compact_call(model: nn.Module, call: CompactCall, resumed: bool = False) -> Iterator[CompactCall]:
    """Route `model`'s attention to `call.attention` for the time of the block, in this thread or task only.

    `resumed`: the block recomputes a checkpointed layer of a forward that ended.
    """
    configs = _configs_of(model)
    _acquire(configs)
    token = current_call.set(call)
    checkpointing = [] if resumed else _wrap_checkpoints(model)
    try:
        yield call
    finally:
        _unwrap_checkpoints(checkpointing)
        current_call.reset(token)
        _release(configs)


def _wrap_checkpoints(model: nn.Module) -> list[Any]:
    """Have checkpointed layers, recomputed during backward, run within their forward's call; returns the modules."""
    if not (model.training and torch.is_grad_enabled()):
        return []
    found: list[Any] = [m for m in model.modules() if "_gradient_checkpointing_func" in vars(m)]
    with _switch_lock:
        for module in found:
            function, users = _wrapped.get(id(module), (module._gradient_checkpointing_func, 0))
            _wrapped[id(module)] = (function, users + 1)
            module._gradient_checkpointing_func = partial(_checkpoint, function, model)
    return found


def _unwrap_checkpoints(modules: list[Any]) -> None:
    with _switch_lock:
        for module in modules:
            function, users = _wrapped.pop(id(module))
            if users > 1:
                _wrapped[id(module)] = (function, users - 1)
            else:
                module._gradient_checkpointing_func = function


def _checkpoint(
    checkpoint: Callable[..., Any], model: nn.Module, layer: Callable[..., Any], *args: Any
) -> Any:
    call = current_call.get()
    if call is None:
        return checkpoint(layer, *args)

    def run(*inner: Any) -> Any:
        if current_call.get() is call:
            return layer(*inner)
        with compact_call(model, call, resumed=True):
            return layer(*inner)

    return checkpoint(run, *args)


def running_in(module: nn.Module) -> bool:
    """Whether `module` belongs to the compact forward that runs in this thread or task."""
    call = current_call.get()
    return call is not None and id(module) in call.modules


@contextmanager
def recorded_attention(model: nn.Module) -> Iterator[list[AttentionCall]]:
    """Collect the attention calls of `model`'s own forwards in the block; they run as ever."""
    configs, calls = _configs_of(model), list[AttentionCall]()
    _acquire(configs)
    tokens = current_call.set(None), record.set(calls)
    try:
        yield calls
    finally:
        current_call.reset(tokens[0])
        record.reset(tokens[1])
        _release(configs)


@contextmanager
def named_attention(model: nn.Module, implementation: str) -> Iterator[None]:
    """Have `model` itself use another of transformers' implementations for the time of the block, in this thread."""
    configs = _configs_of(model)
    _acquire(configs)
    tokens = current_call.set(None), _named.set(implementation)
    try:
        yield
    finally:
        current_call.reset(tokens[0])
        _named.reset(tokens[1])
        _release(configs)


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


def original_implementation(module: Any) -> str:
    """The implementation that `module` uses outside compact forwards."""
    return implementation_of(module.config)


def implementation_of(config: Any) -> str:
    """The implementation `config` named before the switch, or the one `named_attention` asks for."""
    named = _named.get()
    if named is not None:
        return named
    with _switch_lock:
        entry = _switched.get(id(config))
    implementation = entry[1] if entry else config._attn_implementation
    return implementation if implementation not in (None, IMPLEMENTATION) else "eager"
