"""What the tests of the drop-in share, as fixtures that are functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import radixmlp
from radixmlp.verify.families import small_config, strengthen


def _padded(sequences: list[list[int]], side: str, extra: int = 0) -> tuple[Tensor, Tensor]:
    """[B, L] ids and mask; `side` is left, right or both; padding holds ids that would show if they were read."""
    length = max(map(len, sequences)) + extra
    ids = torch.full((len(sequences), length), 77)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        free = length - len(sequence)
        start = {"left": free, "right": 0, "both": free // 2}[side]
        ids[row, start : start + len(sequence)] = torch.tensor(sequence)
        mask[row, start : start + len(sequence)] = 1
    return ids, mask


def _close(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def _dense(model: Any, call: Callable[[], Any]) -> Any:
    """The result of `call` with the model as it was."""
    radixmlp.disable(model)
    with torch.no_grad():
        result = call()
    radixmlp.enable(model, threshold=1.0)
    return result


def _other_head(auto: Any, family: str = "qwen3", **changes: Any) -> Any:
    torch.manual_seed(0)
    config = small_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model = auto.from_config(config).eval()
    strengthen(model)
    return model


@pytest.fixture(scope="session")
def padded() -> Callable[..., Any]:
    """`_padded`."""
    return _padded


@pytest.fixture(scope="session")
def close() -> Callable[..., Any]:
    """`_close`."""
    return _close


@pytest.fixture(scope="session")
def dense() -> Callable[..., Any]:
    """`_dense`."""
    return _dense


@pytest.fixture(scope="session")
def other_head() -> Callable[..., Any]:
    """`_other_head`."""
    return _other_head
