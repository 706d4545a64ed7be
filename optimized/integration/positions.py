"""How a model uses positions: what it takes where none are given, and whether shifting them changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from radixmlp.optimized.integration.facts import DefaultPositions
from radixmlp.optimized.integration.models import backbone_of, embedding_of
from radixmlp.optimized.integration.switch import CompactCall, compact_call
from radixmlp.reference import TriePlan

_ULPS = 8


def find_default_positions(
    model: Any, sequences: list[list[int]], plan: TriePlan, compact: Tensor
) -> DefaultPositions:
    """See `Facts.default_positions`. Shifting is tried by as much as the model allows, so that scales that set in
    at some length show; it counts as harmless only where rotary modules alone saw the shift and their tables turn
    by a constant angle a position.
    """
    own = _padded(model, sequences, None)
    tokens = _padded(model, sequences, "tokens")
    columns = _padded(model, sequences, "columns")
    counts_tokens, counts_columns = _equal(own, tokens), _equal(own, columns)
    if counts_columns and _rotary_alone(model, plan, compact):
        return "recounted"
    if counts_tokens and not counts_columns:
        return "tokens"
    return "columns" if counts_columns else "unknown"


def _padded(model: Any, sequences: list[list[int]], positions: str | None) -> Tensor:
    """Hidden states [M, d] of the real tokens of a left-padded batch."""
    device = embedding_of(model).device
    length = max(map(len, sequences)) + 1
    ids = torch.zeros(len(sequences), length, dtype=torch.int64, device=device)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, length - len(sequence) :] = torch.tensor(sequence)
        mask[row, length - len(sequence) :] = 1
    given: dict[str, Tensor] = {}
    if positions == "columns":
        given["position_ids"] = torch.arange(length, device=device).expand_as(ids)
    elif positions == "tokens":
        given["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
    hidden: Tensor = backbone_of(model)(input_ids=ids, attention_mask=mask, use_cache=False, **given)[0]
    return hidden[mask.bool()]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether both were computed from the same positions."""
    scale = b.abs().max().float().clamp_min(1e-30)
    return float((a.float() - b.float()).abs().max() / scale) <= _ULPS * torch.finfo(a.dtype).eps


def _rotary_alone(model: Any, plan: TriePlan, compact: Tensor) -> bool:
    """Whether positions reach the result through rotary tables alone, which turn by a constant angle a position."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    shift = int(limit) - int(plan.position_ids.max()) - 1
    if shift <= 0:
        return False
    positions = plan.position_ids.long()[None]
    call = CompactCall.on(model, plan, "auto")
    try:
        with _unshifted_rotary(model, positions) as tables, compact_call(model, call):
            shifted = backbone_of(model)(
                input_ids=plan.input_ids.long()[None],
                position_ids=positions + shift,
                attention_mask=torch.ones_like(positions),
                use_cache=False,
            )[0][0]
    except (RuntimeError, IndexError, ValueError):  # positions beyond a learned table, or of another form
        return False
    return (
        bool(tables)
        and _equal(shifted, compact)
        and all(_turns_evenly(table, positions[0]) for table in tables)
    )


@contextmanager
def _unshifted_rotary(model: Any, positions: Tensor) -> Iterator[list[Tensor]]:
    """Give rotary modules `positions` whatever the model passes; collects their tables [N', D] as complex numbers."""
    tables: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        swap = [positions if _same_kind(value, positions) else value for value in args]
        return tuple(swap), {
            name: positions if _same_kind(value, positions) else value for name, value in kwargs.items()
        }

    def after(_: nn.Module, _args: Any, output: Any) -> None:
        cos, sin = output
        tables.append(torch.complex(cos.double(), sin.double()).reshape(-1, cos.shape[-1]))

    handles = []
    for module in backbone_of(model).modules():
        if "rotary" in type(module).__name__.lower() and not list(module.children()):
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after))
    try:
        yield tables
    finally:
        for handle in handles:
            handle.remove()


def _same_kind(value: Any, positions: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and not value.is_floating_point()
        and value.shape[-1:] == positions.shape[-1:]
    )


def _turns_evenly(table: Tensor, positions: Tensor) -> bool:
    """Whether row p of a rotary table is a constant times exp(i p angle), angle by angle."""
    if table.shape[0] != positions.shape[0]:
        return False
    by_position = {int(position): table[row] for row, position in enumerate(positions.tolist())}
    steps = [by_position[p + 1] / by_position[p] for p in by_position if p + 1 in by_position]
    if len(steps) < 2:
        return False
    turn = torch.stack(steps)
    return bool((turn - turn[0]).abs().max() < 1e-2 and (turn.abs() - 1).abs().max() < 1e-2)
