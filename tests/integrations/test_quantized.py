"""Quantised linears: where a row's result depends on its batch, dense's own movement is the measure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import radixmlp

SEQUENCES = [
    [20, 21, 22, 23, 24, 25, 26, 27],
    [20, 21, 22, 23, 24, 30],
    [20, 21, 22, 23, 24, 25, 40, 41, 42, 43],
    [20, 21, 22, 23, 24, 25, 26, 27],
]


def quantized(model: Any, dtype: torch.dtype) -> Any:
    """A copy with its `nn.Linear` quantised; activations, for 8 bits, at run time by the range of the whole batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=dtype)


def padded() -> tuple[Tensor, Tensor]:
    length = max(map(len, SEQUENCES))
    ids = torch.tensor([[*sequence, *[0] * (length - len(sequence))] for sequence in SEQUENCES])
    return ids, (ids != 0).long()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """[N, V] of the real tokens."""
    ids, mask = padded()
    found: Tensor = model(ids, attention_mask=mask).logits[mask.bool()]
    return found


@torch.no_grad()
def alone(model: Any) -> Tensor:
    """[N, V], each sequence in a call of its own."""
    return torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])


@pytest.fixture
def model(build: Callable[..., Any]) -> Any:
    return build(AutoModelForCausalLM)


def test_8_bit_dynamic_is_refused_where_it_can_be_probed(model: Any) -> None:
    """The scale of the activations comes from all rows of a call: with attention cut out, rows still mix."""
    int8 = quantized(model, torch.qint8)
    own = logits(int8)
    with pytest.raises(radixmlp.UnsupportedModelError, match="mixes rows"):
        radixmlp.enable(int8)
    assert not hasattr(int8, "radixmlp_stats")
    assert not any("forward" in vars(module) for module in int8.modules())
    assert torch.equal(logits(int8), own)


def test_8_bit_dynamic_made_of_an_enabled_model_moves_no_more_than_dense_itself(model: Any) -> None:
    dense = quantized(model, torch.qint8)
    own, exact = logits(dense), logits(model)
    movement = (alone(dense) - own).abs().max()
    assert movement > 1e-3 * own.abs().max()
    radixmlp.enable(model)
    int8 = quantized(model, torch.qint8)
    got = logits(int8)
    assert int8.radixmlp_stats.compacted == 1
    assert model.radixmlp_stats.compacted == 0
    assert (got - own).abs().max() <= movement
    assert (got - exact).norm() <= 1.2 * (own - exact).norm()


@pytest.mark.parametrize("first", ["quantise", "enable"])
def test_weights_in_16_bits_are_row_wise(model: Any, close: Any, first: str) -> None:
    dense = quantized(model, torch.float16)
    own = logits(dense)
    assert (own - logits(model)).abs().max() > 1e-5 * own.abs().max()
    fp16 = radixmlp.enable(dense) if first == "quantise" else quantized(radixmlp.enable(model), torch.float16)
    close(logits(fp16), own)
    assert fp16.radixmlp_stats.compacted == 1
    assert fp16.radixmlp_stats.rows < 0.6 * fp16.radixmlp_stats.tokens
