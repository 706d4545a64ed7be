"""The ragged batch: sequences laid end to end, with `cu_seqlens` for their bounds and no padding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from radixmlp.reference.validation import (
    MAX_ID,
    as_row,
    check_cu_seqlens,
    check_integer_dtype,
    check_padded_values,
    check_position_count,
    check_same_lengths,
    check_values,
    token_mask,
)


@dataclass(frozen=True, eq=False)
class RaggedBatch:
    """B sequences of token ids, concatenated.

    Args:
        input_ids: [N] integer token ids, 0 <= id <= 2^31 - 1.
        position_ids: [N] integer positions, same range; what the model's position encoding is given.
        cu_seqlens: [B+1] int32; sequence b owns rows cu_seqlens[b] .. cu_seqlens[b+1]-1. Empty sequences
            keep their place.
        sharing_keys: [B] int64 or None; sequences with different keys (LoRA adapter, tenant, image) never
            share a trie node.

    Raises:
        ValueError: names the row and the offset of the first value that breaks a rule above.
    """

    input_ids: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    sharing_keys: Tensor | None = None

    def __post_init__(self) -> None:
        check_cu_seqlens(self.cu_seqlens, self.input_ids)
        object.__setattr__(self, "cu_seqlens", self.cu_seqlens.to(torch.int32))
        check_values("input_ids", self.input_ids, self.cu_seqlens)
        check_position_count(self.position_ids, self.cu_seqlens)
        check_values("position_ids", self.position_ids, self.cu_seqlens)
        if self.sharing_keys is not None:
            check_integer_dtype("sharing_keys", self.sharing_keys)
            if self.sharing_keys.shape != (self.num_sequences,):
                raise ValueError(
                    f"sharing_keys has shape {tuple(self.sharing_keys.shape)}, but the batch has "
                    f"{self.num_sequences} sequences: give one key per sequence"
                )

    @classmethod
    def from_sequences(
        cls,
        sequences: Iterable[Sequence[int] | Tensor],
        position_ids: Iterable[Sequence[int] | Tensor] | None = None,
        sharing_keys: Iterable[Hashable] | None = None,
    ) -> RaggedBatch:
        """Lay sequences end to end.

        Args:
            sequences: B token-id sequences (lists, tuples, arrays or 1-D integer tensors); may be empty.
            position_ids: B position sequences of the same lengths; 0, 1, 2, ... in each where omitted.
            sharing_keys: B hashable keys; sequences with unequal keys never share.
        """
        rows = [as_row("sequence", b, s) for b, s in enumerate(sequences)]
        lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int64)
        input_ids = _concatenate(rows)
        if position_ids is None:
            positions = _count_from_zero(lengths)
        else:
            position_rows = [as_row("position_ids of sequence", b, p) for b, p in enumerate(position_ids)]
            check_same_lengths(rows, position_rows)
            positions = _concatenate(position_rows)
        device = input_ids.device
        return cls(
            input_ids,
            positions.to(device),
            _lengths_to_cu_seqlens(lengths).to(device),
            _encode_keys(sharing_keys, len(rows), device),
        )

    @classmethod
    def from_padded(
        cls,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        sharing_keys: Iterable[Hashable] | None = None,
    ) -> RaggedBatch:
        """Take the real tokens out of a padded batch.

        Args:
            input_ids: [B, L] integer token ids.
            attention_mask: [B, L], 1 for a token and 0 for padding, left, right or both: one contiguous run
                of ones a row (or none: an empty sequence). Omitted: every column is a token.
            position_ids: [B, L] or [1, L]; omitted: 0, 1, 2, ... from each row's first token.
            sharing_keys: B hashable keys.
        """
        input_ids = torch.as_tensor(input_ids)
        if input_ids.dim() != 2:
            raise ValueError(
                f"input_ids must be [batch, length], got shape {tuple(input_ids.shape)}: "
                f"row 0, offset 0 is not one token id"
            )
        B, L = input_ids.shape
        check_integer_dtype("input_ids", input_ids)
        mask = token_mask(attention_mask, input_ids)
        check_padded_values("input_ids", input_ids, mask)
        lengths = mask.sum(1)
        if position_ids is None:
            positions = _count_from_zero(lengths)
        else:
            position_ids = torch.as_tensor(position_ids, device=input_ids.device)
            if position_ids.dim() != 2 or position_ids.shape[1] != L or position_ids.shape[0] not in (1, B):
                raise ValueError(
                    f"position_ids has shape {tuple(position_ids.shape)}, expected {(B, L)} or {(1, L)}"
                )
            check_integer_dtype("position_ids", position_ids)
            check_padded_values("position_ids", position_ids.expand(B, L), mask)
            positions = position_ids.expand(B, L)[mask]
        keys = _encode_keys(sharing_keys, B, input_ids.device)
        return cls(input_ids[mask], positions, _lengths_to_cu_seqlens(lengths), keys)

    @property
    def num_tokens(self) -> int:
        """N, the rows of the ragged layout."""
        return self.input_ids.shape[0]

    @property
    def num_sequences(self) -> int:
        """B, empty sequences included."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def lengths(self) -> Tensor:
        """[B] int32 tokens per sequence."""
        return self.cu_seqlens.diff()

    def sequences(self) -> list[list[int]]:
        """The token ids of each sequence as plain lists."""
        bounds = self.cu_seqlens.tolist()
        ids = self.input_ids.tolist()
        return [ids[a:b] for a, b in pairwise(bounds)]

    def to(self, device: torch.device | str) -> RaggedBatch:
        """The same batch with its tensors on `device`."""
        keys = None if self.sharing_keys is None else self.sharing_keys.to(device)
        return RaggedBatch(
            self.input_ids.to(device), self.position_ids.to(device), self.cu_seqlens.to(device), keys
        )


def _concatenate(rows: list[Tensor]) -> Tensor:
    if not rows:
        return torch.zeros(0, dtype=torch.int64)
    dtype = torch.int32 if all(row.dtype == torch.int32 for row in rows) else torch.int64
    return torch.cat([row.to(dtype) for row in rows])


def _count_from_zero(lengths: Tensor) -> Tensor:
    """[B] lengths -> [N] positions 0 .. length-1 within each sequence."""
    starts = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths)


def _lengths_to_cu_seqlens(lengths: Tensor) -> Tensor:
    total = int(lengths.sum()) if lengths.numel() else 0
    if total > MAX_ID:
        raise ValueError(f"the batch has {total} tokens, more than 2^31 - 1: split it")
    zero = torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return torch.cat([zero, lengths.cumsum(0)]).to(torch.int32)


def _encode_keys(keys: Iterable[Hashable] | None, num_sequences: int, device: torch.device) -> Tensor | None:
    """Number arbitrary hashable keys in order of first occurrence."""
    if keys is None:
        return None
    keys = keys.tolist() if isinstance(keys, Tensor) else list(keys)
    if len(keys) != num_sequences:
        raise ValueError(f"{len(keys)} sharing_keys for {num_sequences} sequences: give one key each")
    numbers: dict[Hashable, int] = {}
    encoded = [numbers.setdefault(key, len(numbers)) for key in keys]
    return torch.tensor(encoded, dtype=torch.int64, device=device)
