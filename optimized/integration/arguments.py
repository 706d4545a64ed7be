"""Reading a call of a decoder: a padded batch that may be compacted, or the reason why not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.integration.cache import CACHE_ARGUMENTS, is_plain, length_of
from radixmlp.optimized.integration.layout import NotCompactableError

_READ = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "sharing_keys", *CACHE_ARGUMENTS)


@dataclass(frozen=True, eq=False)
class Call:
    """What a decoder was called with.

    Args:
        input_ids: [B, L], or None where `inputs_embeds` [B, L, d] is given.
        attention_mask: [B, L] or None.
        position_ids: [B, L], [1, L] or None.
        sharing_keys: as the caller gave them.
        cache: an empty cache to fill, or None.
        use_cache: True, False, or None for the config's choice.
        rest: all other arguments, by name.
    """

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    attention_mask: Tensor | None
    position_ids: Tensor | None
    sharing_keys: Any
    cache: Any
    use_cache: bool | None
    rest: dict[str, Any]


def slots_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """B x L of a call, whatever its arguments; 0 where there is nothing to count."""
    for value in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args):
        if isinstance(value, Tensor) and value.dim() >= 2:
            return value.shape[0] * value.shape[1]
    return 0


@lru_cache(maxsize=256)
def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a class's `forward`."""
    return inspect.signature(function)


def read_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], sharing_keys: Any = None) -> Call:
    """The arguments of `module.forward(*args, **kwargs)`; `sharing_keys` where they hold none.

    Raises:
        NotCompactableError: they describe something else than a fresh padded batch.
        TypeError: they do not fit the signature.
    """
    signature = signature_of(type(module).forward)
    bound = signature.bind(module, *args, **kwargs)
    given = dict(list(bound.arguments.items())[1:])
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    cache = next((given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None), None)
    _check_cache(cache)
    rest = {name: value for name, value in given.items() if name not in _READ}
    use_cache = rest.pop("use_cache", None)
    _check_rest(module, rest)
    call = Call(
        input_ids=given.get("input_ids"),
        inputs_embeds=given.get("inputs_embeds"),
        attention_mask=given.get("attention_mask"),
        position_ids=given.get("position_ids"),
        sharing_keys=sharing_keys if given.get("sharing_keys") is None else given["sharing_keys"],
        cache=cache,
        use_cache=use_cache,
        rest=rest,
    )
    _check_shapes(call)
    return call


def _check_cache(cache: Any) -> None:
    if cache is None:
        return
    length = length_of(cache)
    if length:
        raise NotCompactableError("filled cache")
    if length is None or not is_plain(cache):
        raise NotCompactableError(f"a {type(cache).__name__} as cache")


def _check_rest(module: Any, rest: dict[str, Any]) -> None:
    config = module.config
    if rest.get("output_attentions") or (
        rest.get("output_attentions") is None and getattr(config, "output_attentions", False)
    ):
        raise NotCompactableError("output_attentions")
    for name, value in rest.items():
        plain = value is None or isinstance(value, bool | int | float | str)
        hidden_states = name == "output_hidden_states" and isinstance(value, list)
        if not (plain or hidden_states or (isinstance(value, Tensor) and value.numel() == 1)):
            raise NotCompactableError(f"argument {name}")


def _check_shapes(call: Call) -> None:
    tokens = call.input_ids
    if tokens is None:
        if call.inputs_embeds is None:
            raise NotCompactableError("no input")
        if call.inputs_embeds is None or call.sharing_keys is None:
            raise NotCompactableError("inputs_embeds")
        tokens = torch.as_tensor(call.sharing_keys)
        if tokens.shape != call.inputs_embeds.shape[:2]:
            raise ValueError(
                f"sharing_keys of inputs_embeds must name each token: expected shape "
                f"{tuple(call.inputs_embeds.shape[:2])}, got {tuple(tokens.shape)}"
            )
    elif call.inputs_embeds is not None:
        raise NotCompactableError("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise NotCompactableError("input_ids that are no [batch, length]")
    B, L = tokens.shape
    mask, positions = call.attention_mask, call.position_ids
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (B, L)):
        raise NotCompactableError("custom mask")
    if positions is not None and (
        not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape not in ((B, L), (1, L))
    ):
        raise NotCompactableError("position_ids that are no [batch, length]")
    if B == 1 or tokens.numel() == 0:
        raise NotCompactableError("one sequence" if B == 1 and L else "no tokens")
