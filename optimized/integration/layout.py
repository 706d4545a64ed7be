"""A padded call as a ragged batch, and the way back: which row each slot of [batch, length] shows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch


class NotCompactableError(Exception):
    """A call that runs the model's own forward; `reason` is what the statistics count."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class PaddedLayout:
    """Where the tokens of a [B, L] call stand.

    Args:
        batch: the real tokens, row by row.
        shape: (B, L).
        slots: [B*L] int64, the ragged row each slot shows (padding shows the nearest token of its row); None
            where there is no padding.
        recounted: positions are counted from each row's first token although the dense model would not.
    """

    batch: RaggedBatch
    shape: tuple[int, int]
    slots: Tensor | None
    recounted: bool = False

    def nodes(self, scatter: Tensor) -> Tensor:
        """[B, L] int64: the compact row of each slot, by a plan's `scatter`."""
        rows = scatter.long()
        if self.slots is not None:
            rows = rows[self.slots.to(rows.device)]
        return rows.view(self.shape)


def lay_out(
    tokens: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    sharing_keys: Sequence[Hashable] | Tensor | None,
    default_positions: str,
) -> PaddedLayout:
    """Read a padded call.

    Args:
        tokens: [B, L] token ids, or whatever identifies a token.
        attention_mask: [B, L], non-zero for a token, or None: every column is a token.
        position_ids: [B, L] or [1, L], or None.
        sharing_keys: B keys, or None.
        default_positions: what stands for omitted positions: "tokens" counts from each row's first token,
            "columns" from the first column, "recounted" as "tokens" in place of the model's own "columns".

    Raises:
        NotCompactableError: a mask with holes, packed rows, no token at all, values that are no ids or positions.
    """
    B, L = tokens.shape
    if position_ids is not None:
        position_ids = position_ids.expand(B, L)
        if attention_mask is None and bool((position_ids.diff(dim=1) != 1).any()):
            raise NotCompactableError("packed rows")
    mask = None if attention_mask is None else attention_mask != 0
    if mask is None or bool(mask.all()):
        positions = _columns(tokens) if position_ids is None else position_ids
        return PaddedLayout(_ragged(tokens, positions, None, sharing_keys), (B, L), None)
    starts, lengths = _runs(mask)
    if int(lengths.sum()) == 0:
        raise NotCompactableError("no tokens")
    recounted = False
    if position_ids is None:
        columns = _columns(tokens)
        leading = bool((starts * (lengths > 0)).any())
        if leading and default_positions == "unknown":
            raise NotCompactableError("left padding without position_ids")
        position_ids = columns if default_positions == "columns" else columns - starts[:, None]
        recounted = leading and default_positions == "recounted"
    batch = _ragged(tokens, position_ids, mask, sharing_keys)
    within = (_columns(tokens) - starts[:, None]).clamp_min(0).minimum(lengths[:, None] - 1).clamp_min(0)
    first = batch.cu_seqlens[:-1].long().clamp_max(batch.num_tokens - 1)
    return PaddedLayout(batch, (B, L), (first[:, None] + within).flatten(), recounted)


def _columns(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)


def _runs(mask: Tensor) -> tuple[Tensor, Tensor]:
    """([B] first token, [B] number of tokens) of rows with one run of tokens each."""
    rises = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(1)
    if bool((rises > 1).any()):
        raise NotCompactableError("mask with holes")
    return mask.long().argmax(1), mask.sum(1)


def _ragged(
    tokens: Tensor, positions: Tensor, mask: Tensor | None, keys: Sequence[Hashable] | Tensor | None
) -> RaggedBatch:
    try:
        return RaggedBatch.from_padded(tokens, None if mask is None else mask.long(), positions, keys)
    except ValueError as error:
        if keys is not None and "sharing_keys" in str(error):
            raise
        raise NotCompactableError("values that are no token ids or positions") from error
