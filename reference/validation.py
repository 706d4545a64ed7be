"""What a ragged batch refuses, with messages that name the row, the offset and the value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MAX_ID = 2**31 - 1
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_WIDENED_DTYPES = (torch.uint16, torch.uint32, torch.uint64)  # as token files on disk hold them


def as_row(what: str, row: int, values: Any) -> Tensor:
    """One sequence as a 1-D integer tensor; floats and nesting are refused, naming row and offset."""
    try:
        tensor = values if isinstance(values, Tensor) else torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        _refuse_first_non_integer(what, row, values)
        raise ValueError(f"{what} {row} is not a flat list of integers: {error}") from None
    if tensor.dim() != 1:
        raise ValueError(f"{what} {row} has shape {tuple(tensor.shape)}: offset 0 is not one integer")
    if tensor.numel() == 0:
        return tensor if tensor.dtype in _INTEGER_DTYPES else tensor.to(torch.int64)
    if tensor.dtype in _WIDENED_DTYPES:
        return tensor.to(torch.int64)
    if tensor.dtype not in _INTEGER_DTYPES:
        if not isinstance(values, Tensor):
            _refuse_first_non_integer(what, row, values)
        raise ValueError(
            f"{what} {row}, offset 0: value {tensor[0].item()!r} has dtype {tensor.dtype}: expected integers"
        )
    return tensor


def _refuse_first_non_integer(what: str, row: int, values: Any) -> None:
    """Raise for the first element that is no integer of the allowed range, where there is one."""
    for offset, value in enumerate(values if isinstance(values, Iterable) else ()):
        if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) <= MAX_ID:
            raise ValueError(
                f"{what} {row}, offset {offset} is {value!r}: expected an integer from 0 to {MAX_ID}"
            )


def token_mask(attention_mask: Tensor | None, input_ids: Tensor) -> Tensor:
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
        raise ValueError(
            f"attention_mask row {row}, offset {offset} is {given[row, offset].item()!r}: expected 0 or 1"
        )
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


def check_same_lengths(rows: list[Tensor], position_rows: list[Tensor]) -> None:
    if len(rows) != len(position_rows):
        raise ValueError(f"{len(position_rows)} position_ids rows for {len(rows)} sequences")
    for b, (row, positions) in enumerate(zip(rows, position_rows, strict=True)):
        if row.numel() != positions.numel():
            raise ValueError(
                f"sequence {b} has {row.numel()} tokens but {positions.numel()} position_ids: "
                f"they part at offset {min(row.numel(), positions.numel())}"
            )


def check_integer_dtype(name: str, values: Tensor) -> None:
    if values.dtype not in _INTEGER_DTYPES:
        first = f", row 0, offset 0 is {values.flatten()[0].item()!r}" if values.numel() else ""
        raise ValueError(f"{name} has dtype {values.dtype}{first}: expected an integer dtype")


def check_values(name: str, values: Tensor, cu_seqlens: Tensor) -> None:
    """Integer dtype and 0 <= value <= 2^31 - 1, naming the row and offset of the first offender."""
    if values.dim() != 1:
        raise ValueError(f"{name} must be [num_tokens], got shape {tuple(values.shape)}")
    check_integer_dtype(name, values)
    if values.numel() == 0:
        return
    smallest, largest = values.aminmax()
    if int(smallest) >= 0 and int(largest) <= MAX_ID:
        return
    index = int(_out_of_range(values).nonzero()[0])
    row, offset = _row_and_offset(index, cu_seqlens)
    raise ValueError(
        f"{name} row {row}, offset {offset} is {int(values[index])}: expected 0 <= value <= {MAX_ID}"
    )


def check_padded_values(name: str, values: Tensor, mask: Tensor) -> None:
    """As `check_values`, but with offsets that are columns of the padded batch."""
    wrong = _out_of_range(values) & mask
    if wrong.any():
        row, offset = wrong.nonzero()[0].tolist()
        value = int(values[row, offset])
        raise ValueError(f"{name} row {row}, offset {offset} is {value}: expected 0 <= value <= {MAX_ID}")


def _out_of_range(values: Tensor) -> Tensor:
    wide = values.long()  # narrow dtypes cannot be compared with MAX_ID
    return (wide < 0) | (wide > MAX_ID)


def _row_and_offset(index: int, cu_seqlens: Tensor) -> tuple[int, int]:
    """The sequence that holds the ragged row `index` (past the end: the last one) and the place within it."""
    row = int(torch.searchsorted(cu_seqlens[1:-1].contiguous(), index, right=True))
    return row, index - int(cu_seqlens[row])


def check_position_count(position_ids: Tensor, cu_seqlens: Tensor) -> None:
    num_tokens = int(cu_seqlens[-1])
    if position_ids.shape == (num_tokens,):
        return
    where = ""
    if position_ids.dim() == 1:
        row, offset = _row_and_offset(position_ids.shape[0], cu_seqlens)
        where = f" (they part at row {row}, offset {offset})"
    raise ValueError(
        f"position_ids has shape {tuple(position_ids.shape)}, but input_ids has ({num_tokens},){where}: "
        f"give one position per token"
    )


def check_cu_seqlens(cu_seqlens: Tensor, input_ids: Tensor) -> None:
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens must be [batch + 1], got shape {tuple(cu_seqlens.shape)}")
    check_integer_dtype("cu_seqlens", cu_seqlens)
    if int(cu_seqlens[0]) != 0:
        raise ValueError(f"cu_seqlens row 0, offset 0 is {int(cu_seqlens[0])}: it must start at 0")
    falls = cu_seqlens[1:] < cu_seqlens[:-1]
    if falls.any():
        row = int(falls.nonzero()[0])
        raise ValueError(
            f"cu_seqlens falls from {int(cu_seqlens[row])} to {int(cu_seqlens[row + 1])} at row {row} "
            f"(offset {row + 1}): it must not fall"
        )
    if input_ids.dim() != 1:
        raise ValueError(
            f"input_ids must be [num_tokens], got shape {tuple(input_ids.shape)}: row 0, offset 0 is not one "
            f"token id (use RaggedBatch.from_padded for [batch, length])"
        )
    if int(cu_seqlens[-1]) != input_ids.shape[0]:
        raise ValueError(
            f"cu_seqlens ends at {int(cu_seqlens[-1])} (row {max(cu_seqlens.numel() - 2, 0)}, offset "
            f"{cu_seqlens.numel() - 1}), but the batch has {input_ids.shape[0]} tokens"
        )
