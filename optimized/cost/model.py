"""`CostModel`: what each way to run a batch would take, and which is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from radixmlp.optimized.cost.fit import interpolate
from radixmlp.optimized.cost.work import (
    DENSE,
    SCATTER,
    TRIE,
    TRITON,
    copied_rows,
    engine_of,
    work_of,
)
from radixmlp.reference import TriePlan

OWN = "model"  # the model's own untouched forward, in the drop-in
# The trie's rows must save this share of the dense time: a prediction is not more exact, and a loss weighs more
# than a gain forgone.
LEAST_GAIN = 0.015
# Another attention on the trie's rows must be faster by this share than the trie's, which needs less memory.
LEAST_LEAD = 0.01


@dataclass(frozen=True)
class Choice:
    """What runs a batch, and why.

    Args:
        attention: a backend's name; "model": the model's own forward.
        predicted: seconds in the decoder's layers, by candidate; empty where nothing was predicted.
        reason: in words.
    """

    attention: str
    predicted: dict[str, float]
    reason: str

    @property
    def shares(self) -> bool:
        """Whether the trie's rows are computed."""
        return self.attention not in (DENSE, OWN)


@dataclass(frozen=True)
class CostModel:
    """Seconds of one decoder layer on a device, measured once (`calibration.py`).

    Args:
        key: what the calibration holds for: device, threads, dtype, shape and versions.
        layers: attention layers of the model.
        query_heads, kv_heads: heads of a layer's queries, and of its keys and values.
        device_type: "cpu" or "cuda".
        candidates: the backends that serve the model's layers, as far as the calibration saw.
        row_seconds: (rows, seconds) of everything but attention in one layer, rows ascending.
        attention: by engine ("parts": ours, in matrix products; "fused": PyTorch's; "trie-triton"), the seconds a
            round, a score and a moved head row (see `Work`).
        copy_seconds: a head row copied by index, for `scatter-sdpa`.
        seconds: what the calibration took.
        calm: whether its repetitions agreed: where not, something else kept the machine busy.
        failure: why there is none.
    """

    key: dict[str, str]
    layers: int = 0
    query_heads: int = 0
    kv_heads: int = 0
    device_type: str = "cpu"
    candidates: tuple[str, ...] = ()
    row_seconds: tuple[tuple[int, float], ...] = ()
    attention: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    copy_seconds: float = 0.0
    seconds: float = 0.0
    calm: bool = True
    failure: str | None = None

    @property
    def unusable(self) -> str | None:
        """Why nothing is predicted with it, or None: choices are then made by the threshold alone."""
        if self.failure is not None:
            return f"the calibration failed ({self.failure})"
        return None if self.calm else "the calibration was disturbed: the machine is busy"

    @classmethod
    def for_model(cls, model: Any, refresh: bool = False) -> CostModel:
        """The calibration for `model` where it is: from this process, from the disk, or made now.

        Args:
            model: a transformers model on the CPU or a CUDA device.
            refresh: make it anew, and keep that one.

        Returns:
            A cost model; where none could be made, one whose `failure` says why.
        """
        from radixmlp.optimized.cost.known import cost_model_of  # calibrating needs this class

        return cost_model_of(model, refresh)

    def predict(self, plan: TriePlan, slots: int | None = None) -> dict[str, float]:
        """Seconds in the decoder's layers for each candidate: the embedding and the head are left out.

        Args:
            plan: the batch's, in depth-first order.
            slots: batch x length of a padded batch; then dense is the model's own forward on so many rows ("model"),
                whose attention is taken to cost what `dense-sdpa`'s would on them.
        """
        rows, nodes = plan.num_tokens, plan.num_nodes
        predicted: dict[str, float] = {}
        for name in (TRIE, TRITON):
            if name in self.candidates:
                predicted[name] = self.layers * (self._rows(nodes) + self._attention(name, plan))
        if DENSE in self.candidates:
            attention = self._attention(DENSE, plan)
            if SCATTER in self.candidates:
                copies = self.copy_seconds * copied_rows(plan, self.query_heads, self.kv_heads)
                predicted[SCATTER] = self.layers * (self._rows(nodes) + attention + copies)
            if slots is None:
                predicted[DENSE] = self.layers * (self._rows(rows) + attention)
            else:
                padding = slots / max(rows, 1)
                predicted[OWN] = self.layers * (self._rows(slots) + attention * padding)
        return predicted

    def choose(self, plan: TriePlan, slots: int | None = None) -> Choice:
        """The candidate for one batch; the same for the same calibration and plan.

        Args:
            plan, slots: as for `predict`.
        """
        if self.unusable is not None:
            return Choice(TRIE, {}, f"gamma is {plan.gamma:.3g}, within the threshold; {self.unusable}")
        predicted = self.predict(plan, slots)
        compact = {name: predicted[name] for name in (TRIE, TRITON, SCATTER) if name in predicted}
        dense = DENSE if slots is None else OWN
        if not compact or dense not in predicted:
            return Choice(TRIE, predicted, "no backend to choose from was calibrated")
        best = min(compact, key=compact.__getitem__)
        if TRIE in compact and compact[best] > (1 - LEAST_LEAD) * compact[TRIE]:
            best = TRIE
        ahead = 1 - compact[best] / predicted[dense]
        numbers = f"{best} {_milliseconds(compact[best])}, {dense} {_milliseconds(predicted[dense])}"
        if ahead < LEAST_GAIN:
            return Choice(dense, predicted, f"predicted to gain less than {LEAST_GAIN:.1%}: {numbers}")
        return Choice(best, predicted, f"predicted: {numbers}")

    def _rows(self, rows: int) -> float:
        return interpolate(self.row_seconds, rows)

    def _attention(self, name: str, plan: TriePlan) -> float:
        work = work_of(name, plan, self.query_heads, self.kv_heads, self.device_type)
        costs = self.attention[engine_of(name, self.device_type)]
        return sum(count * cost for count, cost in zip(work.features, costs, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CostModel:
        """The other way round.

        Raises:
            ValueError: a field is missing, unknown, or not what a calibration writes.
        """
        try:
            return cls._read(values)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"not a cost model: {type(error).__name__}: {error}") from error

    @classmethod
    def _read(cls, values: Mapping[str, Any]) -> CostModel:
        attention = {str(engine): _costs(seconds, 3) for engine, seconds in dict(values["attention"]).items()}
        points = tuple((int(rows), *_costs([seconds], 1)) for rows, seconds in values["row_seconds"])
        candidates = tuple(str(name) for name in values["candidates"])
        made = cls(**{**values, "attention": attention, "row_seconds": points, "candidates": candidates})
        sizes = (made.layers, made.query_heads, made.kv_heads)
        if made.unusable is not None or not (points and candidates and all(int(n) > 0 for n in sizes)):
            raise ValueError("it holds no calibration that may be used")
        if not {engine_of(name, made.device_type) for name in candidates} <= attention.keys():
            raise ValueError("a candidate was not timed")
        if any(low >= high for (low, _), (high, _) in pairwise(points)):
            raise ValueError("row_seconds is not ascending")
        if made.query_heads % made.kv_heads:
            raise ValueError("query_heads is no multiple of kv_heads")
        _costs([made.copy_seconds], 1)
        return made


def _costs(values: Any, count: int) -> Any:
    """`count` finite costs, none negative."""
    costs = tuple(float(value) for value in values)
    if len(costs) != count or not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError(f"expected {count} costs that are not negative, got {values!r}")
    return costs


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
