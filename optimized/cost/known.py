"""Calibrations of this process: one a model, taken from the disk or made once."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from radixmlp.optimized.cost import store
from radixmlp.optimized.cost.calibration import calibrate
from radixmlp.optimized.cost.model import CostModel
from radixmlp.optimized.integration.models import backbone_of, unwrapped

ATTEMPTS = 3  # to calibrate on a machine that is busy
PAUSE = 60.0  # seconds between them

_Place = tuple[torch.device, torch.dtype, int]


@dataclass(frozen=True)
class _Known:
    place: _Place
    cost: CostModel
    attempts: int
    made_at: float

    def holds(self, place: _Place) -> bool:
        """Whether it serves a model that is there now; a disturbed calibration is tried again after a while."""
        if self.place != place:
            return False
        if self.cost.calm or self.attempts >= ATTEMPTS:
            return True
        return time.monotonic() - self.made_at < PAUSE


_lock = threading.RLock()  # one calibration at a time: two would disturb each other
_of_models: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
_of_keys: dict[str, CostModel] = {}


def cost_model_of(model: Any, refresh: bool = False) -> CostModel:
    """See `CostModel.for_model`."""
    model = unwrapped(model)
    backbone = backbone_of(model)
    weight = next(backbone.parameters())
    place = (weight.device, weight.dtype, torch.get_num_threads())
    known = _of_models.get(backbone)
    if known is not None and known.holds(place) and not refresh:
        return known.cost
    with _lock:
        known = _of_models.get(backbone)
        if known is not None and known.holds(place) and not refresh:
            return known.cost
        attempts = known.attempts if known is not None and known.place == place else 0
        cost = _find(model, backbone, refresh)
        _of_models[backbone] = _Known(place, cost, attempts + 1, time.monotonic())
        return cost


def forget() -> None:
    """Drop what this process knows; files stay."""
    with _lock:
        _of_models.clear()
        _of_keys.clear()


def _find(model: Any, backbone: nn.Module, refresh: bool) -> CostModel:
    try:
        key = store.key_of(model, backbone)
    except Exception as error:
        return _failed({}, error)
    name = json.dumps(key, sort_keys=True)
    cost = None if refresh else _of_keys.get(name) or store.load(key)
    if cost is None:
        try:
            cost = calibrate(model, key)
        except Exception as error:  # whatever it is, the batch at hand still has to run
            return _failed(key, error)
        if cost.calm:
            store.save(cost)
    if cost.calm:
        _of_keys[name] = cost
    return cost


def _failed(key: dict[str, str], error: Exception) -> CostModel:
    return CostModel(key, failure=f"{type(error).__name__}: {error}")
