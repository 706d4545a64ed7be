"""A model and its tokenizer by name, folder or GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import torch

Kind = Literal["auto", "causal-lm", "sequence-classification", "base"]


def load(
    name_or_path: str | Path,
    gguf_file: str | None,
    dtype: torch.dtype | str | None,
    device: torch.device | str | None,
    kind: Kind,
) -> tuple[Any, Any]:
    """(model in eval mode, tokenizer); see `Engine.from_pretrained`."""
    from transformers import (
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    if kind not in get_args(Kind):
        raise ValueError(f"kind is {kind!r}: expected one of {', '.join(get_args(Kind))}")
    device = _device(device)
    options = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        if kind == "auto":
            kind = "causal-lm" if gguf_file is not None else _kind_of(name_or_path)
        classes = {
            "causal-lm": AutoModelForCausalLM,
            "sequence-classification": AutoModelForSequenceClassification,
            "base": AutoModel,
        }
        model = classes[kind].from_pretrained(name_or_path, dtype=_dtype(dtype, gguf_file), **options)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    except (OSError, ValueError) as error:
        where = "folder" if Path(name_or_path).is_dir() else "Hugging Face name (is there a network?)"
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"cannot load {str(name_or_path)!r} as a {where}: {reason}") from error
    return model.to(device).eval(), tokenizer


def _kind_of(name_or_path: str | Path) -> Kind:
    from transformers import AutoConfig

    architectures = AutoConfig.from_pretrained(name_or_path).architectures or []
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        return "sequence-classification"
    if architectures and not any("CausalLM" in name or "LMHead" in name for name in architectures):
        return "base"
    return "causal-lm"


def _device(device: torch.device | str | None) -> torch.device:
    """The one asked for, where there is one; a GPU before the CPU where none is."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device is {str(device)!r}: {str(error).strip().splitlines()[0]}") from None
    return found


def _dtype(dtype: torch.dtype | str | None, gguf_file: str | None) -> torch.dtype | str:
    """The checkpoint's own where none is asked for (fp32 for a GGUF file)."""
    if dtype is None:
        return "auto" if gguf_file is None else torch.float32
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}: expected a floating point dtype such as 'bfloat16'")
    return found
