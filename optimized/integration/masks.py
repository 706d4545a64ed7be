"""What mask a model asks for, read off its mask function instead of off a list of model families."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class MaskKind(Enum):
    """Masks that depend on the path alone (causal, window), and all others."""

    CAUSAL = "causal"
    WINDOW = "window"
    OTHER = "other"


def classify_mask(
    mask_function: MaskFunction, local_size: int | None, deepest: int, custom: bool | None = False
) -> tuple[MaskKind, int | None]:
    """Compare `mask_function(batch, head, q, k)` with a causal and a sliding-window mask, by index in a sequence.

    It is evaluated for a few queries, first and last among them, against every key up to `deepest`: over that
    range a chunked mask whose chunk is not filled is causal, and a window that reaches back to the start as well.

    Args:
        local_size: window or chunk size as transformers passes it; None for a plain mask.
        deepest: the largest index within a sequence.
        custom: the function may not be evaluated by broadcasting (transformers' `use_vmap`): `OTHER`.

    Returns:
        The kind, and the window (queries see the last `window` indices, their own included) for `WINDOW`.
    """
    if custom:
        return MaskKind.OTHER, None
    zero = torch.zeros((), dtype=torch.int64)
    middle = {deepest // 2, deepest // 3, 1, local_size or 0, (local_size or 0) - 1}
    queries = torch.tensor(sorted({0, deepest} | {q for q in middle if 0 <= q <= deepest}))[:, None]
    keys = torch.arange(deepest + 1)[None]
    visible = mask_function(zero, zero, queries, keys).expand(queries.shape[0], keys.shape[1])
    causal = keys <= queries
    if torch.equal(visible, causal):
        return MaskKind.CAUSAL, None
    if local_size is not None and torch.equal(visible, causal & (keys > queries - local_size)):
        return MaskKind.WINDOW, local_size
    return MaskKind.OTHER, None
