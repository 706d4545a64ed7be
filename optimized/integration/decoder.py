"""The decoder of an enabled model: padded batch in, compact forward, padded output."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from radixmlp.optimized.attention import get_attention, shares_prefixes
from radixmlp.optimized.cost.choice import choose_attention
from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.index import build_plan
from radixmlp.optimized.integration.arguments import Call, read_call, signature_of, slots_of
from radixmlp.optimized.integration.cache import CACHE_ARGUMENTS, CacheRecorder, LazyCache
from radixmlp.optimized.integration.checks import check_call
from radixmlp.optimized.integration.expand import Expander
from radixmlp.optimized.integration.head import remember
from radixmlp.optimized.integration.interception import Hints, Interception, Step, hints_of
from radixmlp.optimized.integration.layout import NotCompactableError, PaddedLayout, lay_out
from radixmlp.optimized.integration.own_cache import OwnCache
from radixmlp.optimized.integration.randomness import RefuseRandomness
from radixmlp.optimized.integration.settings import probing
from radixmlp.optimized.integration.switch import CompactCall, compact_call, original_implementation
from radixmlp.reference import TriePlan

# Reasons that are no inability: there was nothing to gain, or nothing at all.
_NOT_WORTH_IT = ("one sequence", "no tokens", "no input", "little to share", "predicted to be no faster")

# transformers' own implementations of one and the same attention.
_SAME_MATHEMATICS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


class DecoderInterception(Interception):
    """On the decoder: padded batch in, compact forward, padded output."""

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        """A compact forward where one is possible and worth it, the original where not."""
        hints = hints_of(self.state) or Hints(self.state)
        try:
            if hints.dense_reason is not None:
                raise NotCompactableError(hints.dense_reason)
            call = read_call(self.module, args, kwargs, hints.sharing_keys)
            _refuse_watched(self.module, call)
            self._refuse_other_implementation()
            layout, plan = self._plan(call)
            chosen = self._choose(call, plan)
            return self._compact(call, layout, plan, chosen, hints, args, kwargs)
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
        if self.state.current.strict and reason not in _NOT_WORTH_IT:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} cannot be compacted: {reason}"
            ) from error
        self.state.stats.count_dense(reason, slots_of(args, kwargs))
        return Step(self.original, args, {k: v for k, v in kwargs.items() if k != "sharing_keys"})

    def _refuse_other_implementation(self) -> None:
        implementation = original_implementation(self.module)
        known = (self.state.facts.implementation, *_SAME_MATHEMATICS)
        if implementation not in known and self.state.facts.implementation is not None:
            raise NotCompactableError(f"attention implementation {implementation}, chosen since enable")

    def _plan(self, call: Call) -> tuple[PaddedLayout, TriePlan]:
        started = time.perf_counter()
        tokens = call.input_ids if call.input_ids is not None else torch.as_tensor(call.sharing_keys)
        keys = call.sharing_keys if call.input_ids is not None else None
        facts, settings = self.state.facts, self.state.current
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

    def _choose(self, call: Call, plan: TriePlan) -> str | None:
        """What "auto" tries first; None for a named backend and for the probe, which is to run on the trie."""
        if self.state.current.attention != "auto" or probing.get() is not None:
            return None
        tokens = call.input_ids if call.input_ids is not None else call.inputs_embeds
        assert tokens is not None
        choice = choose_attention(self.module, plan, slots=tokens.shape[0] * tokens.shape[1])
        self.state.stats.count_choice(choice.attention)
        if not choice.shares:
            raise NotCompactableError("predicted to be no faster")
        return choice.attention

    def _compact(
        self,
        call: Call,
        layout: PaddedLayout,
        plan: TriePlan,
        chosen: str | None,
        hints: Hints,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Step:
        check_call(self.module, plan, self.state.facts.max_rows, _last_position(call))
        tokens = call.input_ids if call.input_ids is not None else call.inputs_embeds
        assert tokens is not None
        plan = plan.to(tokens.device)
        inputs = self._inputs(call, layout, plan)
        contexts = ExitStack()
        attention = self.state.current.attention
        contexts.enter_context(
            compact_call(self.module, CompactCall.on(self.module, plan, attention, chosen))
        )
        if any(part.training for part in self.module.modules()):
            contexts.enter_context(RefuseRandomness())

        @torch.compiler.disable
        def finish(output: Any) -> Any:
            contexts.close()
            try:
                return self._spread(output, call, layout, plan, inputs, hints.last_columns)
            except UnsupportedModelError as refused:
                return self._as_ever(str(refused), refused, args, kwargs)

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
        make_cache = partial(self._cache, call, layout, recorder, nodes, output[0])
        # A hook on the decoder is to see all of its output.
        shown = 0 if self.module._forward_hooks else last_columns
        expander = Expander(nodes, plan.num_nodes, make_cache, shown)
        expanded = expander(output)
        if call.cache is not None and recorder is not None:
            recorder.fill(call.cache, nodes)
        if isinstance(expanded[0], Tensor):
            remember(expanded[0], expander.shown)
        self.state.stats.count_compact(nodes.numel(), plan.num_tokens, plan.num_nodes)
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
        facts = self.state.facts
        wanted = call.cache is not None or (
            bool(use_cache)
            and not _checkpoints(self.module)
            and (facts.caches_in_training or not self.module.training)
        )
        if wanted:
            if not facts.caches or cache_argument is None:
                raise NotCompactableError("a cache that is not one key and value a token and layer")
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
