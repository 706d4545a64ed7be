"""What is refused without running anything: by the model's structure, or by one call of it."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from radixmlp.optimized.errors import UnsupportedModelError
from radixmlp.optimized.integration.models import backbone_of, embedding_of
from radixmlp.reference import TriePlan


def check_structure(model: Any) -> None:
    """Refuse what no probe is needed for.

    Raises:
        UnsupportedModelError: with the reason.
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "_attn_implementation"):
        raise UnsupportedModelError(
            f"{name} is not a transformers model: it has no config with an attention choice"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder: only causal decoders share prefixes")
    accepted = inspect.signature(type(backbone_of(model)).forward).parameters
    missing = [p for p in ("input_ids", "position_ids", "attention_mask") if p not in accepted]
    if missing:
        raise UnsupportedModelError(
            f"{name} takes no {' and no '.join(missing)}: the positions of shared rows could not be given"
        )
    if embedding_of(model).is_meta:
        raise UnsupportedModelError(
            f"{name} keeps its weights elsewhere between calls (offloaded): enable it first"
        )


def check_call(model: Any, plan: TriePlan, max_rows: int | None, last_position: int = 0) -> None:
    """Refuse what depends on the call: its rows, its length (RoPE whose frequencies change), its adapters.

    Args:
        last_position: the largest position of the call, where padding goes beyond the plan's.

    Raises:
        UnsupportedModelError: with the reason and the remedy.
    """
    if max_rows is not None and plan.num_nodes > max_rows:
        raise UnsupportedModelError(
            f"{type(model).__name__} counts rows instead of positions from {max_rows + 1} rows on: smaller batches"
        )
    _check_length(model, max(int(plan.position_ids.max()), last_position))
    _check_adapters(model)


def _check_length(model: Any, plan_max_position: int) -> None:
    limit = _length_dependent_rope_limit(model.config)
    if limit is not None and plan_max_position >= limit:
        raise UnsupportedModelError(
            f"{type(model).__name__} changes its RoPE frequencies from position {limit} on (position "
            f"{plan_max_position} given): sequences on either side of it do not share prefixes; keep the batch "
            "below it"
        )


def _length_dependent_rope_limit(config: Any) -> int | None:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(parameters, dict):
        return None
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    for rope in nested or [parameters]:
        if rope.get("rope_type", rope.get("type")) in ("dynamic", "longrope"):
            original = rope.get("original_max_position_embeddings")
            return int(
                original
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
    return None


def _check_adapters(module: torch.nn.Module) -> None:
    """Refuse a forward whose rows use different LoRA adapters, or adapters from different places on.

    PEFT tells its layers so (`adapter_names`, `alora_offsets`) through hooks that it adds for one call.
    """
    for part in module.modules():
        for hook in part._forward_pre_hooks.values():
            given = getattr(hook, "keywords", {})
            if given and getattr(getattr(hook, "func", None), "__module__", "").startswith("peft"):
                raise UnsupportedModelError(
                    f"{type(module).__name__} is asked for an adapter per row ({', '.join(given)}): rows of "
                    "different adapters do not share; call it once per adapter"
                )
