"""What stands in for `forward` on the modules of an enabled model: the model itself and its head; see `decoder.py`.

It is an attribute of the module, bound to it: a deep copy's belongs to the copy, a pickle's to what is loaded, and
hooks and wrappers that come later stay outside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from radixmlp.optimized.integration.arguments import signature_of
from radixmlp.optimized.integration.head import distinct_rows
from radixmlp.optimized.integration.models import Head, head_of
from radixmlp.optimized.integration.settings import DropIn
from radixmlp.optimized.integration.switch import running_in


@dataclass(frozen=True, eq=False)
class Hints:
    """What the call of a whole model says about the call of its decoder.

    Args:
        state: the model's; another model's decoder may be called meanwhile.
        sharing_keys: as the caller gave them.
        last_columns: the only columns of the last hidden state that are read (0: all).
        dense_reason: why the decoder has to run as ever.
    """

    state: DropIn
    sharing_keys: Any = None
    last_columns: int = 0
    dense_reason: str | None = None


# Held by the step of the call it belongs to: an interrupted call leaves none behind.
_hints: ContextVar[ReferenceType[Hints] | None] = ContextVar("radixmlp_hints", default=None)


def hints_of(state: DropIn) -> Hints | None:
    """The hints of the call of `state`'s model that runs in this thread or task."""
    reference = _hints.get()
    hints = None if reference is None else reference()
    return hints if hints is not None and hints.state is state else None


@dataclass(eq=False)
class Step:
    """One call of an original forward, and what is done before control goes back to the caller.

    Args:
        function: the original.
        args, kwargs: what it is called with.
        finish: makes the result from the original's, or says what to do instead.
        failed: given the exception that the original raised, returns the step to take instead or raises it.
        hints: kept alive as long as the step is.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] | None = None
    failed: Callable[[BaseException], Step] | None = None
    hints: Hints | None = None


class Interception:
    """A callable in the place of `module.forward`.

    `torch.compile` sees the original's frames alone: `__call__` is skipped and what it calls is disabled.

    Args:
        module: the module it is an attribute of.
        state: the enabled model's.
        previous: an instance attribute `forward` that was there before, or None for the class's method.
    """

    def __init__(self, module: nn.Module, state: DropIn, previous: Callable[..., Any] | None) -> None:
        self.module, self.state, self.previous = module, state, previous

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the forward it stands for: `Trainer` picks data columns by it."""
        return inspect.signature(self.original)

    @property
    def __name__(self) -> str:
        """As of the method."""
        return "forward"

    @property
    def __code__(self) -> Any:
        """Tracers name what they trace by it."""
        return getattr(self.original, "__func__", self.original).__code__

    @property
    def original(self) -> Callable[..., Any]:
        """The forward it stands for."""
        return type(self.module).forward.__get__(self.module) if self.previous is None else self.previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`."""
        if torch.compiler.is_exporting():
            return self.original(*args, **kwargs)
        return self._run(args, kwargs)

    @torch.compiler.disable(recursive=False)
    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        step = self.first(args, kwargs)
        while True:
            try:
                output = step.function(*step.args, **step.kwargs)
            except BaseException as error:
                if step.failed is None:
                    raise
                step = step.failed(error)
                continue
            if step.finish is None:
                return output
            result = step.finish(output)
            if not isinstance(result, Step):
                return result
            step = result

    def replicate(self) -> nn.Module:
        """`module._replicate_for_data_parallel()`, with a `forward` of the replica's own."""
        replica: nn.Module = type(self.module)._replicate_for_data_parallel(self.module)
        twin = type(self)(replica, self.state, self.previous)
        replica.__dict__["forward"] = twin
        replica.__dict__["_replicate_for_data_parallel"] = twin.replicate
        return replica

    @torch.compiler.disable
    def first(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """What to do first; never more than the original where we are not to interfere."""
        if not self.state.active or running_in(self.module) or _is_traced():
            return Step(self.original, args, kwargs)
        return self.plan(args, kwargs)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """What is done in the place of the original."""
        return Step(self.original, args, kwargs)


class ModelInterception(Interception):
    """On the whole model: takes the arguments a decoder does not see, and leaves the rest as it is."""

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """The model's own forward, with hints for its decoder."""
        keys = kwargs.pop("sharing_keys", None)
        hints = self._hints_of(keys, args, kwargs)
        token = _hints.set(ref(hints))

        @torch.compiler.disable
        def finish(output: Any) -> Any:
            _hints.reset(token)
            return output

        @torch.compiler.disable
        def failed(error: BaseException) -> Step:
            _hints.reset(token)
            raise error

        return Step(self.original, args, kwargs, finish, failed, hints)

    def _hints_of(self, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hints:
        try:
            bound = signature_of(type(self.module).forward).bind(self.module, *args, **kwargs).arguments
        except TypeError:  # the original says what is wrong
            return Hints(self.state, keys)
        if head_of(self.module) is Head.SEQUENCE and _scores_padding(self.module, bound):
            return Hints(self.state, keys, dense_reason="a sequence score read off padding")
        labels, keep = bound.get("labels"), bound.get("logits_to_keep", 0)
        if labels is None and isinstance(keep, int) and keep > 0 and self.state.facts.keeps_last_columns:
            return Hints(self.state, keys, last_columns=keep)
        if _labels_padding(labels, bound.get("attention_mask")):
            return Hints(self.state, keys, dense_reason="labels on padding")
        return Hints(self.state, keys)


def _scores_padding(model: Any, bound: dict[str, Any]) -> bool:
    """Whether a sequence classifier, which finds the last token by its id, lands on a padding slot."""
    mask, ids = bound.get("attention_mask"), bound.get("input_ids")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool((mask != 0).all()):
        return False
    pad = model.config.get_text_config().pad_token_id
    if pad is None or not isinstance(ids, Tensor) or ids.shape != mask.shape:
        return bool((mask[:, -1] == 0).any())
    columns = torch.arange(ids.shape[1], device=ids.device)
    last = (columns * (ids != pad)).argmax(1)
    return bool((mask.to(ids.device).gather(1, last[:, None]) == 0).any())


def _labels_padding(labels: Any, mask: Any) -> bool:
    """Whether a token loss would read a padding slot's logits: for its own label or for the next slot's."""
    if not (isinstance(labels, Tensor) and isinstance(mask, Tensor)):
        return False
    if labels.dim() != 2 or labels.shape != mask.shape:
        return False
    counted, padding = labels.to(mask.device) != -100, mask == 0
    return bool((padding & counted).any() or (padding[:, :-1] & counted[:, 1:]).any())


class HeadInterception(Interception):
    """On the head: one row per distinct hidden state."""

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """The head on distinct rows, spread over all."""
        alone = len(args) == 1 and not kwargs and self._may_share(args[0])
        distinct = distinct_rows(args[0]) if alone else None
        if distinct is None:
            return Step(self.original, args, kwargs)
        return Step(self.original, (distinct.hidden,), {}, torch.compiler.disable(distinct.spread))

    def _may_share(self, hidden: Any) -> bool:
        """Not where a draw per row (an adapter's dropout) or somebody's gradient of `hidden` would be shared too."""
        drawing = type(self.module) is not nn.Linear and any(part.training for part in self.module.modules())
        if drawing or not isinstance(hidden, Tensor):
            return False
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return True
        watched = hidden.is_leaf or hidden.retains_grad or bool(hidden._backward_hooks)
        watched |= bool(self.module._backward_hooks or self.module._backward_pre_hooks)
        return hints_of(self.state) is not None and not watched  # called by the model itself


def _is_traced() -> bool:
    """Whether a `torch.func` transform is running: what it wraps has no memory and no values to look at."""
    level = getattr(torch._C._functorch, "maybe_current_level", lambda: None)
    return level() is not None
