"""`torch.compile` of an enabled model: the decoder's layers stay one graph, whatever the size of the batch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

import radixmlp


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    ids = torch.randint(1, 128, (3 + size, 10 + 3 * size), generator=generator)
    ids[:, :6] = ids[0, :6]
    return ids, torch.ones_like(ids)


@pytest.mark.parametrize(("layers", "batches"), [(9, 3), pytest.param(30, 10, marks=pytest.mark.slow)])
def test_batches_of_any_size_compile_twice_and_break_nowhere_in_the_decoder(
    layers: int, batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine layers are more than the compiler's limit of eight variants of one layer's code."""
    model = model_of(layers)
    dense = copy.deepcopy(model)
    radixmlp.enable(model, threshold=1.0)
    attention_calls: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Any:
        targets = [str(node.target) for node in graph.graph.nodes]
        found = sum("radixmlp" in target for target in targets)
        if found:
            attention_calls.append(found)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for size in range(batches):
            ids, mask = batch(size)
            got = compiled(ids, attention_mask=mask).logits
            own = dense(ids, attention_mask=mask).logits
            assert (got - own).abs().max() <= 1e-5 * own.abs().max()
    assert model.radixmlp_stats.compacted == batches
    assert attention_calls == [layers] * len(attention_calls), "the decoder is one graph"
    assert len(attention_calls) <= 2, "once for the first size, once for all others"
    assert "recompile" not in caplog.text.lower()


def test_gradients_under_compile_are_refused_not_wrong() -> None:
    model = model_of(1)
    radixmlp.enable(model, threshold=1.0)
    compiled = torch.compile(model, backend="aot_eager")
    ids, mask = batch(1)
    with pytest.raises(Exception, match=r"torch\.compile with gradients"):
        compiled(ids, attention_mask=mask).logits.sum().backward()
