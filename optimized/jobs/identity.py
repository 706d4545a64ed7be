"""What results depend on beside the options: the weights and the tokenizer, in one number each."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

import torch


def weights_digest(model: Any) -> str:
    """Of the names, shapes, dtypes and all values of a model's parameters and buffers."""
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, values in (*model.named_parameters(), *model.named_buffers()):
            raw = values.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
            digest.update(f"{name} {tuple(values.shape)} {values.dtype} {zlib.crc32(raw)}\n".encode())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """Of the rules of a fast tokenizer, or the vocabulary and special tokens of a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # Set anew by each call.
        text = json.dumps({key: rule for key, rule in rules.items() if key not in ("truncation", "padding")})
    else:
        text = json.dumps([sorted(tokenizer.get_vocab().items()), str(tokenizer.special_tokens_map)])
    return hashlib.sha256(f"{type(tokenizer).__name__} {text}".encode()).hexdigest()
