"""Faults planted into one backend: parity must turn red over each, or its green says nothing about this backend.

A fault in the mask is added to the backend's own result, as the difference that one key more or less makes in plain
attention. So what is judged stays the backend's numbers, and no fault needs to know how it computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.optimized.attention import AttentionBackend, shares_prefixes
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.verify.planted import Fault, WideMask
from radixmlp.verify.subject import Subject

WINDOW, POSITIONS, GRADIENT = "a window one key too long", "positions ignored", "half a gradient"
FAULTS = {
    "a mask one key too wide": "every row also sees the next one",
    "a mask one branch too wide": "the first row after a subtree also sees that subtree's last path",
    "a mask one key too narrow": "no row sees its parent",
    WINDOW: "sliding windows reach one token further",
    "rows moved by one": "each row is given its neighbour's result",
    "zeros": "nothing is computed",
    "an input overwritten": "k is changed in place after use",
    POSITIONS: "every token is at position 0",
    GRADIENT: "k is given half of its gradient",
}
_WIDE: dict[str, Fault] = {
    "a mask one key too wide": "future",
    "a mask one branch too wide": "branch",
    WINDOW: "window",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one planted fault.

    Args:
        attention: the backend it was planted in.
        fault: a key of `FAULTS`.
        where: model, workload, dtype.
        caught_by: the metric that turned red, "" where none did.
        over_limit: how many times its limit that metric was; None where the limit is zero.
        remark: why it was not planted, where it was not.
    """

    attention: str
    fault: str
    where: str
    caught_by: str
    over_limit: float | None = None
    remark: str = ""

    @property
    def caught(self) -> bool:
        """Whether the harness saw it, or it does not apply here."""
        return bool(self.caught_by) or bool(self.remark)


class Guarded:
    """A backend under watch: what it must not change and what it must return is checked around every call.

    Raises ValueError from a call that writes into q, k, v or the plan, or returns another shape or dtype than asked.
    """

    def __init__(self, backend: AttentionBackend, name: str = "") -> None:
        self.backend = backend
        self.name = name or backend.name
        self.shares_prefixes = shares_prefixes(backend)

    def unsupported(self, *layer: Any) -> str | None:
        """As the backend says."""
        return self.backend.unsupported(*layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        inputs = {"q": q, "k": k, "v": v, **_tensors_of(plan)}
        before = {name: x.detach().clone() for name, x in inputs.items()}
        out = self.attend(q, k, v, plan, spec)
        for name, x in inputs.items():
            if not torch.equal(x.detach(), before[name]):
                raise ValueError(f"the backend wrote into its input {name}: make a copy of what you change")
        expected = (*q.shape[:2], v.shape[2])
        if out.shape != expected or out.dtype != q.dtype:
            raise ValueError(
                f"the backend returned {tuple(out.shape)} {out.dtype}: expected {tuple(expected)} {q.dtype}"
            )
        return out

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """The backend's own call."""
        return self.backend(q, k, v, plan, spec)


class Faulty(Guarded):
    """The backend with one of `FAULTS` planted into its calls."""

    def __init__(self, backend: AttentionBackend, fault: str) -> None:
        super().__init__(backend, faulty_name(backend, fault))
        self.fault = fault
        self.planted = fault == POSITIONS  # whether the fault changed anything yet

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """The backend's result with the fault in it."""
        if self.fault == GRADIENT:
            self.planted = True
            return self.backend(q, (k + k.detach()) / 2, v, plan, spec)
        out = self.backend(q, k, v, plan, spec)
        if self.fault in _WIDE:
            return self._changed(out, _difference(WideMask("", _WIDE[self.fault]), q, k, v, plan, spec))
        if self.fault == "a mask one key too narrow":
            return self._changed(out, _difference(_NarrowMask(""), q, k, v, plan, spec))
        if self.fault == "rows moved by one":
            return self._changed(out, out.roll(1, 0) - out)
        if self.fault == "zeros":
            return self._changed(out, -out)
        if self.fault == "an input overwritten":
            self.planted = True
            with torch.no_grad():
                k.mul_(1.25)
        return out

    def _changed(self, out: Tensor, difference: Tensor) -> Tensor:
        self.planted |= bool((difference != 0).any())
        return out + difference.to(out.dtype)


class _NarrowMask(WideMask):
    """Every row but a root misses its parent."""

    def _seen(self, plan: TriePlan, window: int | None) -> Tensor:
        rows = torch.arange(plan.num_nodes, device=plan.gather.device)
        return super()._seen(plan, window) & (rows != plan.parent[:, None])


def _difference(
    wrong: WideMask, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec
) -> Tensor:
    """[N', Hq, Dv] float64: wrong attention less right attention."""
    wide = [x.detach().double() for x in (q, k, v)]
    right = WideMask("")
    return wrong(wide[0], wide[1], wide[2], plan, spec) - right(wide[0], wide[1], wide[2], plan, spec)


def faulty_name(backend: AttentionBackend, fault: str) -> str:
    """The name a faulty stand-in is registered under."""
    return f"{backend.name} with {fault}"


def subject_with_faults() -> Subject:
    """What users call, but for backends whose name says that positions are ignored."""

    def forward(model: Any, batch: RaggedBatch, attention: str, **options: Any) -> Any:
        if attention.endswith(POSITIONS):
            batch = replace(batch, position_ids=torch.zeros_like(batch.position_ids))
        return radixmlp.forward(model, batch, attention=attention, **options)

    return Subject(forward, radixmlp.build_plan)


def outcome_of(
    backend: Faulty,
    where: str,
    records: Sequence[Any],
    counts: Callable[[str], bool] = lambda metric: metric.endswith("_error"),
) -> Outcome:
    """Whether one of a faulty backend's parity records is red for the reason that was planted."""
    attention = backend.backend.name
    red = [record for record in records if record.attention == backend.name and not record.passed]
    raised = next((record.details.get("error", "") for record in red if record.metric == "error"), "")
    if backend.fault == "an input overwritten":
        caught = "input check" if "wrote into its input" in raised else ""
        return Outcome(attention, backend.fault, where, caught, remark="")
    if raised:
        return Outcome(attention, backend.fault, f"{where}: {raised}"[:300], "")
    if not backend.planted:
        return Outcome(attention, backend.fault, f"{where}: the fault changed nothing", "")
    seen = [record for record in red if counts(record.metric)]
    if not seen:
        return Outcome(attention, backend.fault, where, "")
    worst = max(seen, key=lambda record: record.value / record.limit if record.limit else float("inf"))
    return Outcome(
        attention, backend.fault, where, worst.metric, worst.value / worst.limit if worst.limit else None
    )


def _tensors_of(plan: TriePlan) -> dict[str, Tensor]:
    names = ("gather", "scatter", "parent", "subtree_end", "input_ids", "position_ids", "cu_seqlens")
    return {f"plan.{name}": getattr(plan, name) for name in names}
