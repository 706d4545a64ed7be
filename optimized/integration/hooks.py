"""The two functions transformers calls: one for attention, one for masks."""

from __future__ import annotations

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
from radixmlp.optimized.integration.switch import (
    IMPLEMENTATION,
    AttentionCall,
    CompactCall,
    current_call,
    implementation_of,
    original_implementation,
    record,
    running_in,
)
from radixmlp.reference import AttentionSpec

# Tensors that attention functions are given and do not use for unpacked rows.
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings", "num_items_in_batch"})


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
) -> tuple[Tensor, Any]:
    """transformers' attention function: query [1, Hq, N', D], key and value [1, Hkv, N', D] -> [1, N', Hq, Dv]."""
    if not torch.compiler.is_compiling() and not running_in(module):
        passed = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: given for name, given in passed.items() if given is not None}
        return pass_on(module, query, key, value, attention_mask, kwargs)
    name = type(module).__name__
    for argument, given in kwargs.items():
        if argument not in _HARMLESS and isinstance(given, Tensor | tuple | list):
            raise UnsupportedModelError(
                f"{name} passes {argument} to its attention, which may change what a token sees: not supported"
            )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name} is not causal: a token's value depends on what follows it")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch.compiler.is_compiling():
        arguments = (query, key, value, attention_mask, s_aux, float(scale), softcap, float(dropout))
        return compiled_attention(*arguments, module.training), None
    call = current_call.get()
    assert call is not None
    out = _attend(
        call, query, key, value, attention_mask, s_aux, scale, softcap, dropout, module.training, name
    )
    options = {"scaling": scale, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
    call.seen.append((module, attention_mask, options))
    return out, None


def _attend(
    call: CompactCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    training: bool,
    name: str,
) -> Tensor:
    """[1, N', Hq, Dv]: the call's backend on the rows of its plan."""
    rows = call.plan.num_nodes
    if query.shape[0] != 1 or query.shape[2] != rows or key.shape[2] != rows:
        raise UnsupportedModelError(
            f"{name} attends from {tuple(query.shape)} to {tuple(key.shape)}, expected {rows} rows of one "
            "compact batch: it reshapes the sequence or uses another source of keys"
        )
    spec = AttentionSpec(
        softmax_scale=scale,
        sliding_window=_window(call, attention_mask, name),
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    reasons = []
    for backend in _candidates(call):
        reason = backend.unsupported(spec, query.device, query.dtype, training)
        if reason is None:
            try:
                return backend(q, k, v, call.plan, spec).unsqueeze(0)
            except UnsupportedAttentionError as error:  # what only the tensors' shapes show
                if call.attention != "auto":
                    raise
                reason = str(error)
        reasons.append(f"{backend.name}: {reason}")
    raise UnsupportedAttentionError("; ".join(reasons))


@torch.library.custom_op("radixmlp::attention", mutates_args=())
def compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    marker: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    dropout: float,
    training: bool,
) -> Tensor:
    """`attention_hook` as one node of a compiled graph: the plan is that of the forward in flight."""
    call = current_call.get()
    if call is None:
        raise UnsupportedModelError(
            "a graph compiled for compact forwards ran outside one: call torch._dynamo.reset() and compile anew"
        )
    out = _attend(call, query, key, value, marker, sinks, scale, softcap, dropout, training, "compiled layer")
    return out.contiguous()


@compiled_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _no_compiled_backward(_context: Any, _grad: Tensor) -> None:
    raise UnsupportedModelError(
        "torch.compile with gradients is not supported on the trie: train without torch.compile, or "
        "radixmlp.disable(model)"
    )


compiled_attention.register_autograd(_no_compiled_backward)


@torch.compiler.disable
def mask_hook(**kwargs: Any) -> Any:
    """transformers' mask function: no mask for plain causal attention, a marker for a sliding window."""
    call = current_call.get()
    config = kwargs["config"]
    if call is None:
        return ALL_MASK_ATTENTION_FUNCTIONS[implementation_of(config)](**kwargs)
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
    marker = torch.full((1, 1, 1, 1), window, dtype=torch.int64, device=call.plan.gather.device)
    call.markers[id(marker)] = (marker, window)
    return marker


def _window(call: CompactCall, attention_mask: Tensor | None, name: str) -> int | None:
    if attention_mask is None:
        return None
    entry = call.markers.get(id(attention_mask))
    if entry is not None:
        return entry[1]
    # A marker that was copied on its way: by hooks that move arguments, by a compiled graph.
    if attention_mask.dtype == torch.int64 and attention_mask.numel() == 1:
        window = int(attention_mask)
        if any(window == known for _, known in call.markers.values()):
            return window
    raise UnsupportedModelError(f"{name} was given a mask that transformers' mask functions did not make")


def _candidates(call: CompactCall) -> list[AttentionBackend]:
    """The named backend, or what "auto" tries in turn."""
    if not isinstance(call.attention, str):
        return [call.attention]
    return [get_attention(name) for name in (call.order if call.attention == "auto" else (call.attention,))]


def pass_on(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Any]:
    """Run what `module` would have run had its config not been switched."""
    implementation = original_implementation(module)
    if implementation == "eager":
        run = getattr(__import__(type(module).__module__, fromlist=["_"]), "eager_attention_forward", None)
        if run is None:
            raise UnsupportedAttentionError(
                f"{type(module).__name__} runs beside a compact forward of the same config object with eager "
                "attention: give each model its own config, or use attn_implementation='sdpa'"
            )
    else:
        run = ALL_ATTENTION_FUNCTIONS[implementation]
    result: tuple[Tensor, Any] = run(module, query, key, value, mask, **kwargs)
    calls = record.get()
    if calls is not None:
        calls.append(AttentionCall(module, query, key, value, mask, kwargs, result[0]))
    return result


AttentionInterface.register(IMPLEMENTATION, attention_hook)
AttentionMaskInterface.register(IMPLEMENTATION, mask_hook)
