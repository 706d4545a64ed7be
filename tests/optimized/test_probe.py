"""The probe at `enable` catches what would be silently wrong, in every dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import radixmlp
from radixmlp.optimized.integration.models import decoder_of, embedding_of
from radixmlp.optimized.integration.probe import ensure_verified
from radixmlp.verify.families import small_model
from radixmlp.verify.models import cast_parameters

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Mixing(nn.Module):
    """A layer norm that also looks at other rows."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.kind == "mean of all rows":
            return y + 0.1 * y.mean(1, keepdim=True)
        if self.kind == "row before":
            return y + 0.1 * y.roll(1, 1)
        if self.kind == "running sum":
            return y + 0.05 * y.cumsum(1)
        if self.kind == "number of the row":
            return y * (1 + 0.05 * torch.arange(y.shape[1])[:, None]).to(y.dtype)
        if self.kind == "number of rows":
            return y * (1 + 0.02 * y.shape[1])
        raise ValueError(self.kind)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["mean of all rows", "row before", "running sum", "number of the row", "number of rows"]
)
def test_mixing_outside_attention_is_refused(kind: str, dtype: torch.dtype) -> None:
    model = cast_parameters(small_model("qwen3"), dtype)
    radixmlp.disable(radixmlp.enable(model))
    model.model.layers[1].post_attention_layernorm = Mixing(
        model.model.layers[1].post_attention_layernorm, kind
    )
    with pytest.raises(radixmlp.UnsupportedModelError):
        radixmlp.enable(model)


def wrong_mask(kind: str, real: Any) -> Any:
    """`TrieSdpa` with a mistake."""

    def attend(self: Any, q: Tensor, k: Tensor, v: Tensor, plan: Any, spec: Any) -> Tensor:
        from dataclasses import replace

        if kind == "scale":
            spec = replace(spec, softmax_scale=spec.softmax_scale * 1.05)
        elif kind == "sees the next branch":
            plan = replace(plan, subtree_end=(plan.subtree_end + 1).clamp_max(plan.num_nodes), memo={})
        elif kind == "window one too wide":
            spec = replace(spec, sliding_window=spec.sliding_window and spec.sliding_window + 1)
        return real(self, q, k, v, plan, spec)

    return attend


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["scale", "sees the next branch", "window one too wide"])
def test_a_wrong_backend_is_noticed(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from radixmlp.optimized.attention.trie_sdpa import TrieSdpa

    model = cast_parameters(small_model("mistral", sliding_window=3), dtype)
    monkeypatch.setattr(TrieSdpa, "__call__", wrong_mask(kind, TrieSdpa.__call__))
    with pytest.raises(radixmlp.UnsupportedModelError, match="differs from its own implementation"):
        radixmlp.enable(model)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("qwen3", "recounted"), ("gpt2", "columns"), ("opt", "tokens"), ("llama4_text", "columns")],
)
def test_what_a_model_does_with_positions(family: str, expected: str) -> None:
    assert ensure_verified(small_model(family)).default_positions == expected


def test_position_scaled_attention_is_not_taken_for_rotary_alone() -> None:
    """Llama 4 scales queries by a step function of the position, far beyond any probe's length."""
    config = {"attn_temperature_tuning": True, "floor_scale": 64, "max_position_embeddings": 4096}
    assert ensure_verified(small_model("llama4_text", **config)).default_positions == "columns"


def test_a_model_that_counts_rows_runs_on_as_many_as_are_right() -> None:
    model = small_model("llama4_text", floor_scale=40)
    assert ensure_verified(model).max_rows == 39
    assert ensure_verified(small_model("qwen3")).max_rows is None
    radixmlp.enable(model, threshold=1.0)
    small, large = (torch.arange(4 * n).view(4, n) + 5 for n in (9, 10))
    for ids in (small, large):
        own = torch.cat([model(row[None]).logits for row in ids])
        got = model(ids).logits
        assert (got - own).abs().max() <= 2e-5 * own.abs().max()
    assert model.radixmlp_stats.compacted == 1
    assert any("counts rows" in reason for reason in model.radixmlp_stats.dense)
    with pytest.raises(radixmlp.UnsupportedModelError, match="counts rows"):
        radixmlp.forward(model, radixmlp.RaggedBatch.from_padded(large), attention="trie-sdpa")


def test_verified_once_an_object_and_dtype() -> None:
    model = small_model("qwen3")
    seen: list[int] = []
    model.model.register_forward_pre_hook(lambda *_: seen.append(1))
    first = ensure_verified(model)
    runs = len(seen)
    assert ensure_verified(model) is first
    assert len(seen) == runs
    cast_parameters(model, torch.bfloat16)
    ensure_verified(model)
    assert len(seen) > runs


def test_the_probe_leaves_the_model_alone() -> None:
    model = small_model("qwen3").train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.random.get_rng_state()
    ensure_verified(model)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_decoder_every_caller_ends_up_calling() -> None:
    opt = small_model("opt")
    assert decoder_of(opt) is opt.model.decoder
    qwen = small_model("qwen3")
    assert decoder_of(qwen) is qwen.model
    assert decoder_of(qwen.model) is qwen.model
    assert embedding_of(qwen).shape[0] == 512


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named_as_the_reason(value: float) -> None:
    model = small_model("qwen3")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] = value
    with pytest.raises(radixmlp.UnsupportedModelError, match="not finite"):
        radixmlp.enable(model)
