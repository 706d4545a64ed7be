"""True float64 out of models that cast to float32 inside.

`transformers` computes norms, rotation angles and the eager softmax in float32 whatever the model's dtype, so
its float64 result is 2-4e-7 away from true float64. Inside `lift_float32` those casts keep float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


@contextmanager
def lift_float32() -> Iterator[None]:
    """Inside, whatever asks PyTorch for float32 gets float64, forward and backward; a context manager.

    Covers `.float()`, `.to`, `.type`, `.type_as`, every `dtype=` argument (softmax, sums, new tensors) and
    new tensors without a dtype. Meant for a model that was built and converted to float64 before: its rotary
    frequencies then are the float32 numbers computed at construction, cast up. They belong to the model, as
    its weights do, and are the same on both sides of a comparison; a model built inside would get others.

    The default dtype is a setting of the whole process: do not run models in other threads meanwhile.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64ForFloat32():
            yield
    finally:
        torch.set_default_dtype(default)


class _Float64ForFloat32(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.view:  # view(dtype) reads the same bytes as another type: no cast
            return func(*args, **kwargs)
        if func is Tensor.float:
            return Tensor.double(*args, **kwargs)
        if func in (Tensor.to, Tensor.type_as):
            func, args = Tensor.to, _name_target(args, kwargs)
        return func(*map(_lift, args), **{name: _lift(value) for name, value in kwargs.items()})


def _name_target(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`x.to(tensor)` and `x.type_as(other)` as `x.to(device, dtype)`, whose dtype can be lifted."""
    named = {"tensor", "other"} & kwargs.keys()
    if named:
        args = (args[0], kwargs.pop(named.pop()), *args[1:])
    if len(args) > 1 and isinstance(args[1], Tensor):
        args = (args[0], args[1].device, args[1].dtype, *args[2:])
    return args


def _lift(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    if value is torch.FloatTensor or (isinstance(value, str) and value == "torch.FloatTensor"):
        return torch.DoubleTensor
    return value
