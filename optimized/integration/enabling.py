"""`enable` and `disable`: a model whose ordinary calls share prefixes, and the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from radixmlp.optimized.attention import get_attention
from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.integration.arguments import signature_of
from radixmlp.optimized.integration.cache_probe import probe_cache
from radixmlp.optimized.integration.checks import check_structure
from radixmlp.optimized.integration.decoder import DecoderInterception
from radixmlp.optimized.integration.facts import Facts
from radixmlp.optimized.integration.interception import HeadInterception, Interception, ModelInterception
from radixmlp.optimized.integration.models import (
    Head,
    backbone_of,
    decoder_of,
    embedding_of,
    head_module,
    head_of,
    unwrapped,
)
from radixmlp.optimized.integration.probe import (
    compare,
    ensure_verified,
    evaluating,
    forget,
    probe_sequences,
)
from radixmlp.optimized.integration.settings import DropIn, Settings, probing

_STATS = "radixmlp_stats"
_REPLICATE = "_replicate_for_data_parallel"


def enable(
    model: Any,
    attention: str = "auto",
    threshold: float = 0.9,
    *,
    strict: bool = False,
    verify: bool = True,
) -> Any:
    """Have the ordinary calls of `model` compute every shared prefix of a batch once.

    Calls keep their arguments, their output class, shapes, dtypes and values; slots of padding show the values of
    the nearest token of their row. A call that cannot be compacted (a filled cache, a custom mask, ...), or that has
    too little to share, runs the model's own forward. `model.radixmlp_stats` counts both.

    Args:
        model: a transformers causal LM, base decoder, sequence or token classifier, or a module around one (PEFT,
            `SentenceTransformer`, a compiled model). Its modules get a `forward` attribute; class, config and hooks
            stay as they are.
        attention: a name of `attention_backends()` or "auto".
        threshold: batches with gamma = N'/N above it run the model's own forward.
        strict: raise where a call cannot be compacted, instead of running it as ever; decoding steps are such calls,
            so that `generate` needs it off.
        verify: compare a small batch with the model's own forward first, in its dtype and on its device. Without it
            only the structure is checked, and left-padded batches share only where positions are given.

    Returns:
        `model`.

    Raises:
        UnsupportedModelError: the compact forward would not equal the model's own, and why.
        UnsupportedAttentionError: there is no such backend.
        ValueError: `threshold` is not in [0, 1].

    Source: arXiv 2601.15013, sections 3 and 4 (`radix_mlp_threshold`).
    """
    if attention != "auto":
        get_attention(attention)
    if isinstance(threshold, bool | str) or not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold is {threshold!r}: expected a gamma between 0 and 1")
    inner = unwrapped(model)
    check_structure(inner)
    disable(inner)
    facts = ensure_verified(inner) if verify else Facts(caches=True)
    state = DropIn(Settings(attention, threshold, strict), facts)
    _install(inner, state, inner.get_submodule(facts.decoder) if verify else decoder_of(inner))
    try:
        if verify:
            state.facts = _probe_calls(inner, state)
    except BaseException:
        disable(inner)
        raise
    for owner in {id(m): m for m in (model, inner)}.values():
        owner.__dict__[_STATS] = state.stats
    state.stats.reset()
    return model


def disable(model: Any) -> Any:
    """Undo `enable`: the model exactly as it was. Returns `model`."""
    if not isinstance(model, nn.Module):
        return model
    for module in model.modules():
        module.__dict__.pop(_STATS, None)
        for name, value in list(vars(module).items()):
            if isinstance(value, Interception):
                _remove(module, name, value)
    inner = unwrapped(model)
    forget(inner)
    return model


def settings_of(model: Any) -> Settings:
    """What `enable` set for `model`, or the defaults."""
    for module in unwrapped(model).modules():
        for value in vars(module).values():
            if isinstance(value, Interception):
                return value.state.settings
    return Settings()


def _install(model: Any, state: DropIn, decoder: nn.Module) -> None:
    head = head_module(model)
    _put(decoder, DecoderInterception, state)
    if decoder is not model:
        _put(model, ModelInterception, state)
    if head is not None:
        _put(head, HeadInterception, state)


def _put(module: nn.Module, kind: type[Interception], state: DropIn) -> None:
    interception = kind(module, state, vars(module).get("forward"))
    module.__dict__["forward"] = interception
    # Data parallelism copies attributes as they are: a replica's `forward` would run the original's weights.
    module.__dict__[_REPLICATE] = interception.replicate


def _remove(module: nn.Module, name: str, interception: Interception) -> None:
    """Take an interception out, also from under a later wrapper that kept it (accelerate's `_old_forward`)."""
    interception.state.active = False
    module.__dict__.pop(_REPLICATE, None)
    if name == "forward" and interception.previous is None:
        del module.__dict__["forward"]
    else:
        module.__dict__[name] = interception.original


def _probe_calls(model: Any, state: DropIn) -> Facts:
    """Run padded calls as a user would, and compare them with the model's own.

    Raises:
        UnsupportedModelError: a call that should have been compacted was not, or its result differs.
    """
    ids, mask = _padded_probe(model)
    token = probing.set(Settings(state.settings.attention, 1.0, strict=True))
    backbone, real = backbone_of(model), mask.bool()
    try:
        with evaluating(model):
            named = {} if getattr(model.config, "return_dict", True) else {"return_dict": True}
            call = partial(backbone, input_ids=ids, attention_mask=mask, use_cache=False, **named)
            _compare_calls(model, state, call, real)
            state.facts = probe_cache(backbone, state, ids, mask)
            if head_of(model) is not Head.LANGUAGE:
                return state.facts
            call = partial(model, input_ids=ids, attention_mask=mask, use_cache=False)
            _compare_calls(model, state, call, real)
            return replace(state.facts, keeps_last_columns=_keeps_last_columns(model, state, ids, mask))
    except (UnsupportedModelError, UnsupportedAttentionError):
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__}: a padded probe call failed ({type(error).__name__}: {error})"
        ) from error
    finally:
        probing.reset(token)


def _padded_probe(model: Any) -> tuple[Tensor, Tensor]:
    """[B, L] token ids and mask of the probe, padded right."""
    sequences = probe_sequences(model)
    length = max(map(len, sequences)) + 1
    ids = torch.zeros(len(sequences), length, dtype=torch.int64, device=embedding_of(model).device)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
    return ids, mask


def _compare_calls(
    model: Any, state: DropIn, call: Callable[[], Any], real: Tensor, columns: int = 0
) -> None:
    name = type(model).__name__
    before = state.stats.compacted
    ours = call()
    if state.stats.compacted == before:
        raise UnsupportedModelError(f"{name} does not call its decoder with the token ids it is given")
    state.active = False
    try:
        own = call()
    finally:
        state.active = True
    if type(ours) is not type(own) or list(ours.keys()) != list(own.keys()):
        raise UnsupportedModelError(
            f"{name}: a compact call returns a {type(ours).__name__} of {list(ours.keys())}, its own a "
            f"{type(own).__name__} of {list(own.keys())}"
        )
    real = real[:, -columns:]
    for field, expected in own.items():
        pairs = (
            zip(ours[field], expected, strict=True)
            if isinstance(expected, tuple)
            else [(ours[field], expected)]
        )
        for got, wanted in pairs:
            if isinstance(wanted, Tensor) and wanted.shape[:2] == real.shape:
                if not bool(torch.isfinite(got).all()):
                    raise UnsupportedModelError(f"{name}: {field} of a compact call is not finite")
                compare(name, f"{field} of a padded call", got[real], wanted[real], state.facts.tolerance)


def _keeps_last_columns(model: Any, state: DropIn, ids: Tensor, mask: Tensor) -> bool:
    """Whether `logits_to_keep` reads the last columns of the hidden states and nothing else."""
    if "logits_to_keep" not in signature_of(type(model).forward).parameters:
        return False
    before, state.facts = state.facts, replace(state.facts, keeps_last_columns=True)
    call = partial(model, input_ids=ids, attention_mask=mask, logits_to_keep=2, use_cache=False)
    try:
        _compare_calls(model, state, call, mask.bool(), columns=2)
        return True
    except (UnsupportedModelError, RuntimeError, IndexError):
        return False
    finally:
        state.facts = before
