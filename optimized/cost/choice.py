"""`choose_attention`: what `"auto"` runs, by the cost model where it may be asked and by the rule where not.

The rule, alone, is: the trie's rows with attention inside the trie. It holds where the cost model is switched off,
for batches so small that no choice matters, and wherever a calibration would be wrong or in the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._device import DeviceContext

from radixmlp.optimized.cost.model import Choice, CostModel
from radixmlp.optimized.cost.work import DENSE, TRIE
from radixmlp.reference import TriePlan

# Position-wise FLOPs of a dense run below which the rule decides: some tens of milliseconds on a CPU core, much less
# on a GPU. Calibrating would cost more than many such batches.
LEAST_FLOPS = 4e9

_asked: ContextVar[CostModel | bool] = ContextVar("radixmlp_cost_model", default=True)
_row_flops: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


@contextmanager
def fixed_rule() -> Iterator[None]:
    """Within the block `"auto"` decides by the threshold alone, in this thread or task: no calibration, no timing."""
    token = _asked.set(False)
    try:
        yield
    finally:
        _asked.reset(token)


@contextmanager
def use_cost_model(cost: CostModel) -> Iterator[None]:
    """Within the block `"auto"` asks `cost`, whatever the model and the batch, in this thread or task."""
    token = _asked.set(cost)
    try:
        yield
    finally:
        _asked.reset(token)


def dense_choice(plan: TriePlan, threshold: float) -> Choice:
    """Why a batch with gamma above `threshold` runs densely."""
    return Choice(DENSE, {}, f"gamma is {plan.gamma:.3g}, above the threshold of {threshold:g}")


def choose_attention(model: Any, plan: TriePlan, slots: int | None = None) -> Choice:
    """What runs a batch whose gamma is within the threshold. Values do not depend on it, beyond rounding.

    Args:
        model: a transformers model, or its decoder.
        plan: the batch's, in depth-first order.
        slots: batch x length of a padded batch, where dense means the model's own forward.
    """
    asked = _asked.get()
    if isinstance(asked, CostModel):
        return asked.choose(plan, slots)
    why = _why_not(model, plan) if asked else "the cost model is switched off"
    if why is not None:
        return Choice(TRIE, {}, f"gamma is {plan.gamma:.3g}, within the threshold; {why}")
    return CostModel.for_model(model).choose(plan, slots)


def _why_not(model: Any, plan: TriePlan) -> str | None:
    """Why the cost model is not asked, or None."""
    if plan.num_tokens * _flops_a_row(model) < LEAST_FLOPS:
        return "so small a batch is not worth a prediction"
    device = next(model.parameters()).device
    if device.type not in ("cpu", "cuda"):
        return f"{device.type} is not calibrated"
    if torch.compiler.is_compiling():
        return "traced by torch.compile"
    if torch.is_autocast_enabled(device.type):
        return "under autocast"
    if any(not isinstance(mode, DeviceContext) for mode in _modes()):
        return "under a torch function or dispatch mode"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "in a distributed run every process must choose alike"
    return _why_not_in_modules(model)


def _why_not_in_modules(model: Any) -> str | None:
    for module in model.modules():
        state = vars(module)  # to look up what a module lacks is slow, and every call does this
        if module.training:
            return "in training"
        if "_hf_hook" in state:
            return "hooks place its weights"
        if state.get("_compiled_call_impl") is not None:
            return "compiled modules"
    return None


def _modes() -> list[Any]:
    """Modes that see every operation, and slow it down."""
    functions = getattr(torch.overrides, "_get_current_function_mode_stack", list)
    dispatches = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)
    return [*functions(), *dispatches()]


def _flops_a_row(model: Any) -> float:
    """Two for each weight of a matrix besides the embeddings (all experts of a mixture: an upper bound)."""
    known = _row_flops.get(model)
    if known is None:
        tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
        head = getattr(model, "lm_head", None)
        tables |= {id(getattr(head, "weight", None))}
        matrices = (p for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
        known = _row_flops[model] = 2.0 * sum(p.numel() for p in matrices)
    return known
