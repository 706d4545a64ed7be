"""The parts of a Hugging Face model: the model inside its wrappers, its decoder, its head."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from radixmlp.optimized.errors import UnsupportedModelError


@torch.no_grad()
def decoder_of(model: Any) -> nn.Module:
    """The innermost module that is given the token ids when `model` runs: what every caller ends up calling.

    Usually the backbone; OPT's causal LM passes it by and calls the decoder inside it.
    """
    found = [backbone_of(model)]
    ids = torch.full((1, 2), embedding_of(model).shape[0] // 3, device=embedding_of(model).device)

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is ids for value in (*args, *kwargs.values())):
            found.append(module)

    inner = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]
    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in inner]
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on token ids alone ({type(error).__name__}: {error})"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return found[-1]


def name_of(model: nn.Module, part: nn.Module) -> str:
    """The name of a submodule, as `get_submodule` takes it."""
    return next(name for name, module in model.named_modules() if module is part)


class Head(Enum):
    """What a model puts on its decoder."""

    NONE = "none"
    LANGUAGE = "language"
    SEQUENCE = "sequence"
    TOKEN = "token"
    OTHER = "other"


def unwrapped(model: Any) -> Any:
    """The transformers model inside adapters, pipelines and compiled modules; `model` itself where it is one.

    Raises:
        UnsupportedModelError: there is none, or more than one side by side.
    """
    if isinstance(model, PreTrainedModel) or not isinstance(model, nn.Module):
        return model
    found: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and not any(module in outer.modules() for outer in found):
            found.append(module)
    if len(found) != 1:
        names = ", ".join(type(module).__name__ for module in found) or "none"
        raise UnsupportedModelError(
            f"{type(model).__name__} holds {len(found)} transformers models ({names}): give the one that is meant"
        )
    return found[0]


def refuse_virtual_tokens(model: Any) -> None:
    """Refuse a prompt-learning adapter: the model inside it does not see the tokens the adapter adds.

    Raises:
        UnsupportedModelError: with the remedy.
    """
    adapter = None if isinstance(model, PreTrainedModel) else getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} adds virtual tokens to each sequence ({type(adapter).__name__}), which a ragged "
            "batch does not hold: call the model itself"
        )


def backbone_of(model: Any) -> nn.Module:
    """The decoder without its head (`model` itself where it has none)."""
    return getattr(model, "base_model", model)


def head_of(model: Any) -> Head:
    """The kind of head: `OTHER` for one that only the model itself can apply."""
    if backbone_of(model) is model:
        return Head.NONE
    if hasattr(model, "score") and type(model).__name__.endswith("ForSequenceClassification"):
        return Head.SEQUENCE
    if type(model).__name__.endswith("ForTokenClassification"):
        return Head.TOKEN
    if model.get_output_embeddings() is not None:
        return Head.LANGUAGE
    return Head.OTHER


def head_module(model: Any) -> nn.Module | None:
    """The module that turns hidden states into logits, row by row."""
    kind = head_of(model)
    if kind is Head.LANGUAGE:
        head = model.get_output_embeddings()
        return head if isinstance(head, nn.Module) else None
    if kind is Head.NONE:
        return None
    score = getattr(model, "score", None)
    return score if isinstance(score, nn.Module) else None


def embedding_of(model: Any) -> Any:
    """[V, d] the token embeddings."""
    return model.get_input_embeddings().weight
