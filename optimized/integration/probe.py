"""A small batch through a model, compact and as ever: whether they agree, and why they may be trusted to.

Four findings, each of which can refuse a model:

1. With attention cut out (each row attends to itself) a row's result depends on its token and position alone, not on
   other rows and not on where it stands: everything but attention is position-wise. This is exact in any dtype.
2. What each attention layer computes, from the model's own queries, keys and values taken to fp32, is what our
   backend computes from them: the mask, the scale, soft-capping and sinks are understood.
3. The compact forward equals the model's own in the model's dtype.
4. Padded calls through the drop-in path equal the model's own (`enable` only).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError
from radixmlp.optimized.index import build_plan
from radixmlp.optimized.integration.checks import check_structure
from radixmlp.optimized.integration.facts import Facts
from radixmlp.optimized.integration.hooks import attention_hook, pass_on
from radixmlp.optimized.integration.models import backbone_of, decoder_of, embedding_of, name_of
from radixmlp.optimized.integration.positions import find_default_positions
from radixmlp.optimized.integration.row_numbers import find_max_rows
from radixmlp.optimized.integration.switch import (
    AttentionCall,
    CompactCall,
    compact_call,
    named_attention,
    original_implementation,
    recorded_attention,
)
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

# Branches at two depths, duplicates, a sequence that ends inside another, and a lone one.
_PROBE = (
    (5, 6, 7, 8, 9, 10),
    (5, 6, 7, 11, 12),
    (5, 6, 7, 8, 13, 14, 15),
    (5, 6, 7, 8, 9, 10),
    (5, 6, 7),
    (5, 16, 17, 18),
    (19, 6, 7, 8),
)
# Largest difference allowed, as a share of the norm. Below fp32 a deep model amplifies rounding by as much as
# it likes, so there it may also be `_NOISE_FACTOR` times what its own two attention implementations differ by.
_TOLERANCE = {torch.float64: 2e-6, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
_NOISE_FACTOR = 2.0
# Attention in fp32 from equal inputs: rounding alone.
_ATTENTION_TOLERANCE = 2e-5
# Equal inputs give equal rows, bit by bit, but for experts: they see other groups of rows when one row changes, and
# may round another way.
_LEAST_LEAK = 1e-6

_facts: WeakKeyDictionary[nn.Module, tuple[torch.dtype, Facts]] = WeakKeyDictionary()


class _OwnRow:
    """Attention cut out: every row sees itself alone."""

    name = "own-row"

    def unsupported(self, *_: Any) -> str | None:
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def ensure_verified(model: Any) -> Facts:
    """Check the structure and run the probe, once a model object and dtype.

    Raises:
        UnsupportedModelError: the compact forward would not equal the model's own, and why.
    """
    check_structure(model)
    dtype = embedding_of(model).dtype
    known = _facts.get(model)
    if known is None or known[0] != dtype:
        known = _facts[model] = (dtype, _probe(model))
    return known[1]


def forget(model: nn.Module) -> None:
    """Have the next use check `model` again."""
    _facts.pop(model, None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model` in eval mode and without gradients for the time of the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def probe_sequences(model: Any) -> list[list[int]]:
    """The probe in ids from all over the vocabulary: the lowest are often special tokens, hardly trained."""
    vocabulary = embedding_of(model).shape[0]
    return [[(vocabulary // 3 + 1499 * token) % vocabulary for token in sequence] for sequence in _PROBE]


def _probe(model: Any) -> Facts:
    name, sequences = type(model).__name__, probe_sequences(model)
    plan = build_plan(RaggedBatch.from_sequences(sequences)).to(embedding_of(model).device)
    with evaluating(model):
        try:
            return _findings(model, sequences, plan)
        except (UnsupportedModelError, UnsupportedAttentionError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{name} does not attend through transformers' attention and mask interfaces alone: a probe batch "
                f"fails ({type(error).__name__}: {error})"
            ) from error


def _findings(model: Any, sequences: list[list[int]], plan: TriePlan) -> Facts:
    own, recorded = _own_hidden(model, sequences)
    if not bool(torch.isfinite(own).all()):
        raise UnsupportedModelError(
            f"{type(model).__name__}: its own results on a probe batch are not finite in {own.dtype}: weights "
            "that are not, or a dtype that overflows (try float32)"
        )
    _check_positions(model, sequences, own)
    compact, seen = compact_hidden(model, plan, "auto")
    noise = _own_noise(model, sequences, own)
    _check_isolation(model, plan, max(noise, torch.finfo(own.dtype).eps, _LEAST_LEAK))
    _check_attention(model, plan, recorded, seen, len(sequences))
    tolerance = max(_TOLERANCE.get(own.dtype, _TOLERANCE[torch.float32]), _NOISE_FACTOR * noise)
    compare(type(model).__name__, "a probe batch", compact[plan.scatter.long()], own, tolerance)
    return Facts(
        tolerance,
        name_of(model, decoder_of(model)),
        find_default_positions(model, sequences, plan, compact),
        find_max_rows(model, plan, compact),
        model.config._attn_implementation,
    )


def compact_hidden(
    model: Any, plan: TriePlan, attention: Any, **changes: Tensor
) -> tuple[Tensor, list[tuple[nn.Module, Tensor | None, dict[str, Any]]]]:
    """[N', d] of the compact forward, and (module, mask, arguments) of each attention call in it."""
    inputs = {
        "input_ids": plan.input_ids.long()[None],
        "position_ids": plan.position_ids.long()[None],
        "attention_mask": torch.ones(1, plan.num_nodes, dtype=torch.int64, device=plan.gather.device),
        **changes,
    }
    call = CompactCall.on(model, plan, attention)
    with compact_call(model, call):
        hidden = backbone_of(model)(**inputs, use_cache=False)[0][0]
    return hidden, call.seen


def _own_hidden(
    model: Any, sequences: list[list[int]], counted: bool = False
) -> tuple[Tensor, list[list[AttentionCall]]]:
    """[N, d] of the model's own forward, each sequence alone, and its attention calls, sequence by sequence.

    `counted`: the positions 0, 1, 2, ... are given.
    """
    backbone, device = backbone_of(model), embedding_of(model).device
    rows, recorded = [], []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        if counted:
            inputs["position_ids"] = torch.arange(len(sequence), device=device)[None]
        with recorded_attention(model) as calls:
            rows.append(backbone(**inputs)[0][0])
        recorded.append(calls)
    return torch.cat(rows), recorded


def _check_positions(model: Any, sequences: list[list[int]], own: Tensor) -> None:
    """Refuse a model that counts positions otherwise: given 0, 1, 2, ... it would answer something else."""
    difference = _difference(_own_hidden(model, sequences, counted=True)[0], own)
    if not difference <= _TOLERANCE.get(own.dtype, _TOLERANCE[torch.float32]):
        raise UnsupportedModelError(
            f"{type(model).__name__}: where no positions are given it does not count 0, 1, 2, ... "
            f"(its result differs by {difference:.1e} when they are given)"
        )


def _check_isolation(model: Any, plan: TriePlan, limit: float) -> None:
    """With attention cut out, a row depends on its token and position alone: not on other rows, not on its place."""
    name = type(model).__name__
    base, seen = compact_hidden(model, plan, _OwnRow())
    if not seen:
        raise UnsupportedModelError(
            f"{name}: none of its layers attended through transformers' attention interface"
        )
    rows = torch.arange(plan.num_nodes, device=base.device)
    ids, positions = plan.input_ids.long(), plan.position_ids.long()
    for changed in (rows % 2 == 0, rows % 2 == 1):
        others = torch.where(changed, (ids + 7 * rows + 3) % embedding_of(model).shape[0], ids)
        moved, _ = compact_hidden(model, plan, _OwnRow(), input_ids=others[None])
        if torch.equal(moved[changed], base[changed]):
            raise UnsupportedModelError(f"{name}: its result does not depend on its input")
        _refuse_leak(name, moved[~changed], base[~changed], limit, "other tokens change")
    turned = {"input_ids": ids.flip(0)[None], "position_ids": positions.flip(0)[None]}
    flipped, _ = compact_hidden(model, plan, _OwnRow(), **turned)
    _refuse_leak(name, flipped.flip(0), base, limit, "it stands in another row with the same position")


def _refuse_leak(name: str, got: Tensor, expected: Tensor, limit: float, when: str) -> None:
    leak = _difference(got, expected)
    if not leak <= limit:
        raise UnsupportedModelError(
            f"{name}: with attention cut out, a token's result still moves by {leak:.1e} when {when}: something "
            "besides transformers' attention interface mixes rows (a convolution, a state, statistics or scales "
            "of the whole batch, as quantised layers have)"
        )


def _check_attention(
    model: Any,
    plan: TriePlan,
    recorded: list[list[AttentionCall]],
    seen: list[tuple[nn.Module, Tensor | None, dict[str, Any]]],
    num_sequences: int,
) -> None:
    """Each layer's own attention, from its own inputs in fp32, against our backend's from the same inputs."""
    name = type(model).__name__
    counts = {len(calls) for calls in recorded} | {len(seen)}
    if len(counts) != 1 or len(recorded) != num_sequences:
        raise UnsupportedModelError(
            f"{name}: its layers attend {sorted(counts)} times, depending on the input or on the length"
        )
    gather = plan.gather.long()
    for place, (module, marker, kwargs) in enumerate(seen):
        calls = [calls[place] for calls in recorded]
        if any(call.module is not module for call in calls):
            raise UnsupportedModelError(f"{name}: its layers attend in an order that depends on the input")
        truth = torch.cat([_in_float32(call) for call in calls], 1)
        q, k, v = (
            torch.cat([getattr(call, which) for call in calls], 2).float().index_select(2, gather)
            for which in ("query", "key", "value")
        )
        call = CompactCall.on(model, plan, "auto")
        if marker is not None:
            call.markers[id(marker)] = (marker, int(marker))
        with compact_call(model, call):
            ours, _ = attention_hook(module, q, k, v, marker, **_float32(kwargs))
        difference = _difference(ours[:, plan.scatter.long()], truth)
        if not difference <= _ATTENTION_TOLERANCE:
            raise UnsupportedModelError(
                f"{name}: attention call {place} ({type(module).__name__}) differs from its own implementation "
                f"({original_implementation(module)}) by {difference:.1e} in fp32: it is not causal attention over "
                "the path of a token, or that implementation leaves out a part of it (softcap, sinks), which "
                "attn_implementation='eager' would not"
            )


def _in_float32(call: AttentionCall) -> Tensor:
    """[1, l, Hq, Dv]: the module's own implementation on its inputs taken to fp32."""
    mask = call.attention_mask
    if mask is not None and mask.is_floating_point():
        # The lowest number of a shorter dtype is as good as minus infinity, and stays a number.
        mask = mask.float()
    q, k, v = call.query.float(), call.key.float(), call.value.float()
    return pass_on(call.module, q, k, v, mask, _float32(call.kwargs))[0]


def _float32(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in kwargs.items()
    }


def _own_noise(model: Any, sequences: list[list[int]], own: Tensor) -> float:
    """How far the model's eager and fused attention differ, as a share of the norm; 0 where it has but one."""
    if own.dtype not in (torch.float16, torch.bfloat16):
        return 0.0
    other = "eager" if model.config._attn_implementation != "eager" else "sdpa"
    try:
        with named_attention(model, other):
            return _difference(_own_hidden(model, sequences)[0], own)
    except (ValueError, KeyError, RuntimeError):  # it has no other implementation
        return 0.0


def _difference(got: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    return float((got.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def compare(name: str, what: str, compact: Tensor, own: Tensor, tolerance: float) -> None:
    """Refuse a result that is not the model's own.

    Raises:
        UnsupportedModelError: another shape, or a difference beyond `tolerance`, as a share of the norm.
    """
    if compact.shape != own.shape or compact.dtype != own.dtype:
        raise UnsupportedModelError(
            f"{name}: {what} gives {tuple(compact.shape)} in {compact.dtype}, its own forward {tuple(own.shape)} in "
            f"{own.dtype}"
        )
    difference = _difference(compact, own)
    if not difference <= tolerance:
        raise UnsupportedModelError(
            f"{name}: {what} differs from the model's own forward by {difference:.2e} of its norm "
            f"(allowed: {tolerance:.0e}): something besides causal attention mixes rows, or a wrapper (autocast) "
            "changes the precision of its own calls only"
        )
