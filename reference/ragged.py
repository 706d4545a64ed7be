"""The ragged batch: sequences laid end to end, with `cu_seqlens` for their bounds and no padding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_ID = 2**31 - 1
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
        _check_cu_seqlens(self.cu_seqlens, self.input_ids)
        object.__setattr__(self, "cu_seqlens", self.cu_seqlens.to(torch.int32))
        _check_values("input_ids", self.input_ids, self.cu_seqlens)
        if self.position_ids.shape != self.input_ids.shape:
            raise ValueError(
                f"position_ids has shape {tuple(self.position_ids.shape)}, but input_ids has "
                f"{tuple(self.input_ids.shape)}: give one position per token"
            )
        _check_values("position_ids", self.position_ids, self.cu_seqlens)
        if self.sharing_keys is not None and self.sharing_keys.shape != (self.num_sequences,):
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
        rows = [_as_row("sequence", b, s) for b, s in enumerate(sequences)]
        lengths = torch.tensor([row.numel() for row in rows], dtype=torch.int64)
        input_ids = _concatenate(rows)
        if position_ids is None:
            positions = _count_from_zero(lengths)
        else:
            position_rows = [_as_row("position_ids of sequence", b, p) for b, p in enumerate(position_ids)]
            _check_same_lengths(rows, position_rows)
            positions = _concatenate(position_rows)
        device = input_ids.device
        return cls(
            input_ids,
            positions.to(device),
            _lengths_to_cu_seqlens(lengths).to(device),
            _encode_keys(sharing_keys, len(rows)),
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
            raise ValueError(f"input_ids must be [batch, length], got shape {tuple(input_ids.shape)}")
        B, L = input_ids.shape
        _check_integer_dtype("input_ids", input_ids)
        mask = _token_mask(attention_mask, input_ids)
        lengths = mask.sum(1)
        if position_ids is None:
            positions = _count_from_zero(lengths)
        else:
            position_ids = torch.as_tensor(position_ids, device=input_ids.device)
            if position_ids.dim() != 2 or position_ids.shape[1] != L or position_ids.shape[0] not in (1, B):
                raise ValueError(
                    f"position_ids has shape {tuple(position_ids.shape)}, expected {(B, L)} or {(1, L)}"
                )
            positions = position_ids.expand(B, L)[mask]
        keys = _encode_keys(sharing_keys, B)
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
        return [ids[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]

    def to(self, device: torch.device | str) -> RaggedBatch:
        """The same batch with its tensors on `device`."""
        keys = None if self.sharing_keys is None else self.sharing_keys.to(device)
        return RaggedBatch(
            self.input_ids.to(device), self.position_ids.to(device), self.cu_seqlens.to(device), keys
        )


def _as_row(what: str, row: int, values: Any) -> Tensor:
    """One sequence as a 1-D integer tensor; floats and nesting are refused, naming the row."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{what} {row} is not a flat list of integers: {error}") from None
    if tensor.dim() != 1:
        raise ValueError(f"{what} {row} has shape {tuple(tensor.shape)}: expected one dimension")
    if tensor.numel() == 0:
        return tensor.to(torch.int64)
    if tensor.dtype not in _INTEGER_DTYPES:
        raise ValueError(
            f"{what} {row}, offset 0: value {tensor[0].item()!r} has dtype {tensor.dtype}: expected integers"
        )
    return tensor


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


def _encode_keys(keys: Iterable[Hashable] | None, num_sequences: int) -> Tensor | None:
    """Number arbitrary hashable keys in order of first occurrence."""
    if keys is None:
        return None
    keys = keys.tolist() if isinstance(keys, Tensor) else list(keys)
    if len(keys) != num_sequences:
        raise ValueError(f"{len(keys)} sharing_keys for {num_sequences} sequences: give one key each")
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def _token_mask(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
    """[B, L] bool from a 0/1 mask, refusing rows whose ones are not one contiguous run."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    given = torch.as_tensor(attention_mask, device=input_ids.device)
    if given.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(given.shape)}, but input_ids has {tuple(input_ids.shape)}"
        )
    wrong = (given != 0) & (given != 1)
    if wrong.any():
        row, offset = wrong.nonzero()[0].tolist()
        raise ValueError(f"attention_mask row {row}, offset {offset} is {given[row, offset].item()!r}: expected 0 or 1")
    mask = given.bool()
    if mask.shape[1] > 1:
        starts = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + mask[:, 0]
        if (starts > 1).any():
            row = int((starts > 1).nonzero()[0])
            token_columns = mask[row].nonzero().flatten()
            hole = int(token_columns[(token_columns.diff() > 1).nonzero()[0]]) + 1
            raise ValueError(
                f"attention_mask row {row} has a hole at offset {hole}: tokens must be one contiguous run"
            )
    return mask


def _check_same_lengths(rows: list[Tensor], position_rows: list[Tensor]) -> None:
    if len(rows) != len(position_rows):
        raise ValueError(f"{len(position_rows)} position_ids rows for {len(rows)} sequences")
    for b, (row, positions) in enumerate(zip(rows, position_rows, strict=True)):
        if row.numel() != positions.numel():
            raise ValueError(
                f"sequence {b} has {row.numel()} tokens but {positions.numel()} position_ids: "
                f"they part at offset {min(row.numel(), positions.numel())}"
            )


def _check_integer_dtype(name: str, values: Tensor) -> None:
    if values.dtype not in _INTEGER_DTYPES:
        first = f", row 0, offset 0 is {values.flatten()[0].item()!r}" if values.numel() else ""
        raise ValueError(f"{name} has dtype {values.dtype}{first}: expected an integer dtype")


def _check_values(name: str, values: Tensor, cu_seqlens: Tensor) -> None:
    """Integer dtype and 0 <= value <= 2^31 - 1, naming the row and offset of the first offender."""
    if values.dim() != 1:
        raise ValueError(f"{name} must be [num_tokens], got shape {tuple(values.shape)}")
    _check_integer_dtype(name, values)
    if values.numel() == 0:
        return
    smallest, largest = values.aminmax()
    if int(smallest) >= 0 and int(largest) <= MAX_ID:
        return
    index = int(((values < 0) | (values > MAX_ID)).nonzero()[0])
    row = int(torch.searchsorted(cu_seqlens[1:].contiguous(), index, right=True))
    offset = index - int(cu_seqlens[row])
    raise ValueError(
        f"{name} row {row}, offset {offset} is {int(values[index])}: expected 0 <= value <= {MAX_ID}"
    )


def _check_cu_seqlens(cu_seqlens: Tensor, input_ids: Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must be [batch + 1], got shape {tuple(cu_seqlens.shape)}")
    _check_integer_dtype("cu_seqlens", cu_seqlens)
    if int(cu_seqlens[0]) != 0:
        raise ValueError(f"cu_seqlens row 0, offset 0 is {int(cu_seqlens[0])}: it must start at 0")
    falls = cu_seqlens.diff() < 0
    if falls.any():
        row = int(falls.nonzero()[0])
        raise ValueError(
            f"cu_seqlens falls from {int(cu_seqlens[row])} to {int(cu_seqlens[row + 1])} at row {row} "
            f"(offset {row + 1}): it must not fall"
        )
    if input_ids.dim() != 1:
        raise ValueError(
            f"input_ids must be [num_tokens], got shape {tuple(input_ids.shape)}: use RaggedBatch.from_padded for [B, L]"
        )
    if int(cu_seqlens[-1]) != input_ids.shape[0]:
        raise ValueError(
            f"cu_seqlens ends at {int(cu_seqlens[-1])} (row {cu_seqlens.numel() - 2}, offset "
            f"{cu_seqlens.numel() - 1}), but the batch has {input_ids.shape[0]} tokens"
        )
