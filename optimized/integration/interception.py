"""What stands in for `forward` on the modules of an enabled model: its decoder, the model itself, its head.

It is an attribute of the module, bound to it: a deep copy's belongs to the copy, a pickle's to what is loaded, and
hooks and wrappers that come later stay outside it.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from radixmlp.optimized.attention import get_attention, shares_prefixes
from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.index import build_plan
from radixmlp.optimized.integration.arguments import Call, read_call, signature_of, slots_of
from radixmlp.optimized.integration.cache import CACHE_ARGUMENTS, CacheRecorder, LazyCache
from radixmlp.optimized.integration.checks import check_call
from radixmlp.optimized.integration.expand import Expander
from radixmlp.optimized.integration.head import distinct_rows, remember
from radixmlp.optimized.integration.hooks import CompactCall, compact_call, running_in
from radixmlp.optimized.integration.layout import NotCompactableError, PaddedLayout, lay_out
from radixmlp.optimized.integration.models import Head, head_of
from radixmlp.optimized.integration.own_cache import OwnCache
from radixmlp.optimized.integration.randomness import RefuseRandomness
from radixmlp.optimized.integration.settings import DropIn
from radixmlp.reference import TriePlan

# Reasons that are no inability: there was nothing to gain.
_NOT_WORTH_IT = ("one sequence", "no tokens", "little to share")


@dataclass(frozen=True, eq=False)
class _Hints:
    """What the call of the whole model says about the call of its decoder."""

    sharing_keys: Any = None
    last_columns: int = 0
    dense_reason: str | None = None


_hints: ContextVar[_Hints | None] = ContextVar("radixmlp_hints", default=None)


@dataclass(eq=False)
class Step:
    """One call of an original forward, and what is done before control goes back to the caller.

    Args:
        function: the original.
        args, kwargs: what it is called with.
        finish: makes the result from the original's.
        failed: given the exception that the original raised, returns the step to take instead or raises it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any] | None = None
    failed: Callable[[BaseException], Step] | None = None


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
    def original(self) -> Callable[..., Any]:
        """The forward it stands for."""
        return type(self.module).forward.__get__(self.module) if self.previous is None else self.previous

    @torch.compiler.disable(recursive=False)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward`."""
        step = self.first(args, kwargs)
        while True:
            try:
                output = step.function(*step.args, **step.kwargs)
            except BaseException as error:
                if step.failed is None:
                    raise
                step = step.failed(error)
            else:
                return output if step.finish is None else step.finish(output)

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
        if not self.state.active or running_in(self.module):
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
        token = _hints.set(self._hints_of(keys, args, kwargs))

        @torch.compiler.disable
        def finish(output: Any) -> Any:
            _hints.reset(token)
            return output

        @torch.compiler.disable
        def failed(error: BaseException) -> Step:
            _hints.reset(token)
            raise error

        return Step(self.original, args, kwargs, finish, failed)

    def _hints_of(self, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Hints:
        try:
            bound = signature_of(type(self.module).forward).bind(self.module, *args, **kwargs).arguments
        except TypeError:  # the original says what is wrong
            return _Hints(keys)
        if head_of(self.module) is Head.SEQUENCE and _scores_padding(self.module, bound):
            return _Hints(keys, dense_reason="a sequence score read off padding")
        labels, keep = bound.get("labels"), bound.get("logits_to_keep", 0)
        if labels is None and isinstance(keep, int) and keep > 0 and self.state.facts.keeps_last_columns:
            return _Hints(keys, last_columns=keep)
        if _labels_padding(labels, bound.get("attention_mask")):
            return _Hints(keys, dense_reason="labels on padding")
        return _Hints(keys)


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
        return _hints.get() is not None and not watched  # called by the model itself


class DecoderInterception(Interception):
    """On the decoder: padded batch in, compact forward, padded output."""

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """A compact forward where one is possible and worth it, the original where not."""
        hints = _hints.get() or _Hints()
        try:
            if hints.dense_reason is not None:
                raise NotCompactableError(hints.dense_reason)
            call = read_call(self.module, args, kwargs, hints.sharing_keys)
            _refuse_watched(self.module, call)
            layout, plan = self._plan(call)
            return self._compact(call, layout, plan, hints, args, kwargs)
        except NotCompactableError as left:
            return self._as_ever(left.reason, left, args, kwargs)
        except (UnsupportedModelError, UnsupportedAttentionError) as refused:
            return self._as_ever(str(refused), refused, args, kwargs)
        except TypeError as error:
            if _fits(self.module, args, kwargs):
                raise
            return self._as_ever("arguments that do not fit", error, args, kwargs)

    def _as_ever(self, reason: str, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """The original with the caller's arguments, counted."""
        if self.state.settings.strict and reason not in _NOT_WORTH_IT:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} cannot be compacted: {reason}"
            ) from error
        self.state.stats.count_dense(reason, slots_of(args, kwargs))
        return Step(self.original, args, {k: v for k, v in kwargs.items() if k != "sharing_keys"})

    def _plan(self, call: Call) -> tuple[PaddedLayout, TriePlan]:
        started = time.perf_counter()
        tokens = call.input_ids if call.input_ids is not None else torch.as_tensor(call.sharing_keys)
        keys = call.sharing_keys if call.input_ids is not None else None
        facts, settings = self.state.facts, self.state.settings
        layout = lay_out(tokens, call.attention_mask, call.position_ids, keys, facts.default_positions)
        if settings.attention == "auto" or shares_prefixes(get_attention(settings.attention)):
            plan = build_plan(layout.batch)
        else:
            plan = TriePlan.identity(layout.batch)
        self.state.stats.count_index(time.perf_counter() - started)
        if plan.gamma > settings.threshold:
            raise NotCompactableError("little to share")
        if layout.recounted and (call.cache is not None or call.use_cache):
            raise NotCompactableError("a cache of left-padded rows without position_ids")
        return layout, plan

    def _compact(
        self,
        call: Call,
        layout: PaddedLayout,
        plan: TriePlan,
        hints: _Hints,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Step:
        check_call(self.module, plan, self.state.facts.max_rows, _last_position(call))
        tokens = call.input_ids if call.input_ids is not None else call.inputs_embeds
        assert tokens is not None
        plan = plan.to(tokens.device)
        inputs = self._inputs(call, layout, plan)
        contexts = ExitStack()
        contexts.enter_context(
            compact_call(self.module, CompactCall.on(self.module, plan, self.state.settings.attention))
        )
        if any(part.training for part in self.module.modules()):
            contexts.enter_context(RefuseRandomness())

        @torch.compiler.disable
        def finish(output: Any) -> Any:
            contexts.close()
            return self._spread(output, call, layout, plan, inputs, hints.last_columns)

        @torch.compiler.disable
        def failed(error: BaseException) -> Step:
            contexts.close()
            if isinstance(error, UnsupportedModelError | UnsupportedAttentionError):
                return self._as_ever(str(error), error, args, kwargs)
            raise error

        return Step(self.original, (), inputs, finish, failed)

    def _spread(
        self,
        output: Any,
        call: Call,
        layout: PaddedLayout,
        plan: TriePlan,
        inputs: dict[str, Any],
        last_columns: int,
    ) -> Any:
        """The compact output in the caller's shapes."""
        recorder = next((v for v in inputs.values() if isinstance(v, CacheRecorder)), None)
        nodes = layout.nodes(plan.scatter)
        self.state.stats.count_compact(nodes.numel(), plan.num_tokens, plan.num_nodes)
        make_cache = partial(self._cache, call, layout, recorder, nodes, output[0])
        # A hook on the decoder is to see all of its output.
        shown = 0 if self.module._forward_hooks else last_columns
        expander = Expander(nodes, plan.num_nodes, make_cache, shown)
        expanded = expander(output)
        if call.cache is not None and recorder is not None:
            recorder.fill(call.cache, nodes)
        if isinstance(expanded[0], Tensor):
            remember(expanded[0], expander.shown)
        return expanded

    def _inputs(self, call: Call, layout: PaddedLayout, plan: TriePlan) -> dict[str, Any]:
        inputs = {
            **call.rest,
            "position_ids": plan.position_ids.long()[None],
            # Given, so that transformers does not take jumps in position_ids for packed sequences.
            "attention_mask": torch.ones(1, plan.num_nodes, dtype=torch.int64, device=plan.gather.device),
        }
        if call.input_ids is not None:
            inputs["input_ids"] = plan.input_ids.long()[None]
        else:
            inputs["inputs_embeds"] = _compact_embeddings(call, layout, plan)
        parameters = signature_of(type(self.module).forward).parameters
        use_cache = call.use_cache
        if use_cache is None:
            config: Any = self.module.config
            use_cache = call.cache is not None or bool(getattr(config.get_text_config(), "use_cache", False))
        if "use_cache" in parameters:
            inputs["use_cache"] = use_cache
        cache_argument = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
        wanted = use_cache or call.cache is not None
        if cache_argument is not None and wanted and not _checkpoints(self.module):
            inputs[cache_argument] = CacheRecorder()
        return inputs

    def _cache(
        self, call: Call, layout: PaddedLayout, recorder: CacheRecorder | None, nodes: Tensor, hidden: Tensor
    ) -> DynamicCache | None:
        """What the caller finds in the place of the recorder: its own cache, or one filled when read."""
        if call.cache is not None:
            return call.cache
        assert recorder is not None
        if layout.recounted:
            again = OwnCache.of(self.original, call, hidden[0].detach(), nodes, self.state.facts.tolerance)
            return LazyCache(again.fill)
        return LazyCache(partial(_filled, recorder, nodes, self.module.config))


def _compact_embeddings(call: Call, layout: PaddedLayout, plan: TriePlan) -> Tensor:
    """[1, N', d]: one row a node; every row it stands for must be the same embedding."""
    assert call.inputs_embeds is not None
    embeddings = call.inputs_embeds.flatten(0, 1)
    if layout.slots is None:
        ragged = embeddings
    else:
        assert call.attention_mask is not None
        ragged = embeddings[call.attention_mask.flatten() != 0]
    compact = ragged.index_select(0, plan.gather.long())
    differs = (compact.detach().index_select(0, plan.scatter.long()) != ragged.detach()).any(-1)
    if bool(differs.any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"inputs_embeds of token {row} (counted without padding) differ from those of an earlier token with the "
            "same sharing_keys: give different keys to different embeddings"
        )
    return compact[None]


def _checkpoints(module: nn.Module) -> bool:
    """Whether this forward is recomputed in the backward (then nothing is cached)."""
    training = module.training and torch.is_grad_enabled()
    return training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


def _filled(recorder: CacheRecorder, nodes: Tensor, config: Any) -> DynamicCache:
    cache = DynamicCache(config=config)
    recorder.fill(cache, nodes)
    return cache


def _last_position(call: Call) -> int:
    """The largest position the model's own forward would see, padding included."""
    if call.position_ids is not None:
        return int(call.position_ids.max())
    tokens = call.input_ids if call.input_ids is not None else call.inputs_embeds
    assert tokens is not None
    return tokens.shape[1] - 1


def _refuse_watched(module: nn.Module, call: Call) -> None:
    """Leave calls dense whose insides somebody looks at, row by row or by gradient."""
    if torch.is_grad_enabled():
        if call.inputs_embeds is not None and call.inputs_embeds.requires_grad:
            raise NotCompactableError("gradients of inputs_embeds")
        if call.rest.get("output_hidden_states"):
            raise NotCompactableError("output_hidden_states with gradients")
    for part in module.modules():
        hooks = [
            *part._forward_pre_hooks.values(),
            *part._forward_hooks.values(),
            *part._backward_hooks.values(),
        ]
        if part is not module and any(_is_foreign(hook) for hook in hooks):
            raise NotCompactableError("hooks on the modules inside")


def _is_foreign(hook: Any) -> bool:
    """Whether a module hook is the user's own, who expects [batch, length] inside as well."""
    function = getattr(hook, "func", hook)
    home = (getattr(function, "__module__", None) or "").split(".")[0]
    return home not in ("torch", "transformers", "peft", "accelerate", "radixmlp")


def _fits(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature_of(type(module).forward).bind(module, *args, **kwargs)
    except TypeError:
        return False
    return True
