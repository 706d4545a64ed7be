"""A guard for training: what is drawn per row may not be drawn once for rows that are shared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from radixmlp.optimized.errors import UnsupportedModelError

_DROPOUTS = (
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
)
_DRAWS = (
    torch.rand,
    torch.rand_like,
    torch.randn,
    torch.randn_like,
    torch.bernoulli,
    torch.multinomial,
    torch.Tensor.uniform_,
    torch.Tensor.normal_,
    torch.Tensor.bernoulli_,
    torch.Tensor.exponential_,
)


class RefuseRandomness(TorchFunctionMode):
    """Within it, an active dropout or a random draw raises `UnsupportedModelError`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func`, unless it draws."""
        kwargs = kwargs or {}
        if (func in _DRAWS and _draws_many(args)) or (func in _DROPOUTS and _drops(args, kwargs)):
            raise UnsupportedModelError(
                f"{func.__name__} draws random numbers in training: sequences that share a row would share its draw, "
                "which changes the gradients' distribution; set the dropout to 0, or train without radixmlp"
            )
        return func(*args, **kwargs)


def _draws_many(args: tuple[Any, ...]) -> bool:
    """Whether more than one number is drawn: a single one (whether to skip a layer) is the whole batch's anyway."""
    first = args[0] if args else ()
    if isinstance(first, torch.Tensor):
        return first.numel() > 1
    sizes = first if isinstance(first, tuple | list) else args
    return math.prod(size for size in sizes if isinstance(size, int)) > 1


def _drops(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether dropout(input, p, training) changes anything."""
    given = {**dict(zip(("input", "p", "training"), args, strict=False)), **kwargs}
    p = given.get("p", given.get("dropout_p", 0.5))
    return bool(given.get("training", given.get("train", True))) and p > 0
