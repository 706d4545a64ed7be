"""Every causal model type that transformers knows, built small from its own config."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from typing import Any

import torch
from torch import nn

from radixmlp.verify.family_sizes import HINTS, POSITION_SCALE, SMALL, WHERE_NONE

MAX_PARAMETERS = 5_000_000
_SCALE = 4.0
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


class CannotBuild(ValueError):  # noqa: N818 (a verdict on a type, as StopIteration is one on an iterator)
    """A type whose config gives no small model."""


def causal_types() -> list[str]:
    """The model types of transformers' causal mapping, sorted."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def small_config(model_type: str, **changes: Any) -> Any:
    """A config of `model_type` with every size it declares made small, keeping one layer of each kind it has.

    Args:
        changes: further arguments of the config; those of a sub-config as a dict.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    return cls(**_small_arguments(cls, {**HINTS.get(model_type, {}), **changes}))


def small_model(model_type: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """`AutoModelForCausalLM` of `model_type` from its small config: random weights, eval mode, matrices scaled up.

    Every expert is chosen by every token where the type allows it (as many per token as there are): otherwise
    two experts whose scores differ by less than rounding would be swapped, and a right result look wrong.

    Args:
        changes: as for `small_config`.

    Raises:
        CannotBuild: with the reason.
    """
    try:
        model = _build(model_type, changes)
    except Exception as error:
        raise CannotBuild(f"{model_type}: {_one_line(error)}") from error
    strengthen(model)
    return model.to(dtype).eval()


@torch.no_grad()
def strengthen(model: nn.Module, scale: float = _SCALE) -> None:
    """Scale the matrices up: freshly initialised attention is almost uniform, and a wrong mask would hide."""
    for parameter in model.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(scale)


def _build(model_type: str, changes: dict[str, Any]) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = small_config(model_type, **changes)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config = _config_for(cls, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
        if size > MAX_PARAMETERS:
            raise CannotBuild(f"its small config still has {size:,} parameters")
        return cls(config)


def _config_for(cls: Any, config: Any) -> Any:
    """The part of a composite config that the causal class of its type is made from (all of it, as a rule)."""
    parts = [config, *(getattr(config, name, None) for name in getattr(type(config), "sub_configs", {}))]
    return next((part for part in parts if isinstance(part, cls.config_class)), config)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, CannotBuild) else f"{type(error).__name__}: {text}"


def _small_arguments(cls: Any, hints: dict[str, Any]) -> dict[str, Any]:
    known = _known_values(cls)
    aliases = getattr(cls, "attribute_map", {})
    arguments = {
        name: value
        for name, value in SMALL.items()
        if name in known
        and aliases.get(name) not in known
        and (known[name] is not None or name in WHERE_NONE)
    }
    arguments |= _one_layer_of_each_kind(cls, known, arguments)
    _fit_latent_attention(known, arguments)
    _fit_images(known, arguments)
    _fit_rope(known, arguments)
    arguments |= _small_parts(cls, known, hints)
    return arguments | {
        name: value for name, value in hints.items() if name not in getattr(cls, "sub_configs", ())
    }


def _small_parts(cls: Any, known: dict[str, Any], hints: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the sub-configs that the config has, those of each by its name."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    parts = {}
    for name, sub in getattr(cls, "sub_configs", {}).items():
        below = hints.get(name, {})
        if "model_type" in below:
            kind = CONFIG_MAPPING[below["model_type"]]
        elif known.get(name) is None:
            continue
        else:
            kind = type(known[name]) if hasattr(known[name], "to_dict") else sub
        parts[name] = {"model_type": kind.model_type, **_small_arguments(kind, below)}
    return parts


def _known_values(cls: Any) -> dict[str, Any]:
    """What the config declares, by its name: its own defaults, as they are once the config is initialised.

    Names that `__post_init__` takes out of its keyword arguments count as declared, with a default of 0. What
    it computes (the `head_dim` of a latent attention) does not: passing that would overrule the computation.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    known = {name: None if f.default is dataclasses.MISSING else f.default for name, f in fields.items()}
    try:
        default = cls()
    except Exception:  # some defaults contradict each other; the declarations have to do
        default = None
    for name in fields:
        if default is not None:
            value = vars(default).get(name)
            known[name] = known[name] if value is None else value
    for base in cls.__mro__:
        code = getattr(vars(base).get("__post_init__"), "__code__", None)
        taken = code.co_consts if code else ()
        known |= {name: 0 for name in taken if isinstance(name, str) and name in SMALL and name not in known}
    return known


def _one_layer_of_each_kind(cls: Any, known: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The depth, and every per-layer list cut down to the first layer of each distinct kind, at least two."""
    depths = [name for name in _DEPTHS if name in arguments]
    deep = next((known[name] for name in depths if isinstance(known[name], int)), 0)
    lists = {k: list(v) for k, v in known.items() if k not in arguments and _is_per_layer(v, deep)}
    first: dict[str, int] = {}
    for layer, values in enumerate(zip(*lists.values(), strict=True)):
        first.setdefault(repr(values), layer)
    cut = {name: [values[layer] for layer in first.values()] for name, values in lists.items()}
    if "layer_types" in known and len(set(cut.get("layer_types", ()))) < 2:
        kinds = cut.get("layer_types", [])[:1]
        cut["layer_types"] = kinds + sorted(_named_layer_types(cls) - set(kinds))
    depth = max([2, *map(len, cut.values())])
    cut = {name: values + values[-1:] * (depth - len(values)) for name, values in cut.items() if values}
    return {**dict.fromkeys(depths, depth), **cut}


def _named_layer_types(cls: Any) -> set[str]:
    """The kinds of attention layer that the type's own code names, for the types that use but one by default."""
    from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES

    modules = [cls.__module__, cls.__module__.replace(".configuration_", ".modeling_")]
    source = "".join(inspect.getsource(importlib.import_module(name)) for name in modules)
    return {kind for kind in ALLOWED_ATTN_LAYER_TYPES if f'"{kind}"' in source}


def _is_per_layer(value: Any, depth: int) -> bool:
    """Whether `value` has one entry a layer (and is no list of the layers' numbers)."""
    return (
        isinstance(value, (list, tuple))
        and len(value) == depth > 1
        and not (isinstance(value[0], int) and len(set(value)) == depth)
    )


def _fit_latent_attention(known: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Latent attention (MLA) expands to one key per query head, and rotates `qk_rope_head_dim` of it."""
    if "qk_rope_head_dim" not in arguments:
        return
    if "num_key_value_heads" in arguments:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    if "head_dim" in arguments:
        arguments["head_dim"] = arguments["qk_rope_head_dim"]


def _fit_images(known: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Two patches a side."""
    patch = known.get("patch_size")
    if isinstance(patch, int) and isinstance(known.get("image_size"), int):
        arguments["image_size"] = 2 * patch


def _fit_rope(known: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Where RoPE or a scale beside it depends on the length of pretraining, let that be short too."""
    rope = copy.deepcopy(known.get("rope_parameters"))
    if not isinstance(rope, dict):
        return
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = POSITION_SCALE
            arguments["rope_parameters"] = rope
