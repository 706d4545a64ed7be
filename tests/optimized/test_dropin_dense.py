"""Calls that an enabled model leaves to its own forward, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
)

import radixmlp
from radixmlp.verify.families import causal_types, small_model

Helper = Callable[..., Any]  # of conftest.py

SEQUENCES = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 10],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18],
    [5, 6, 7, 8, 9],
    [20],
    [5, 6],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 19, 21],
]


CANNOT = {
    "filled cache": lambda m, ids: m(ids, past_key_values=m(ids[:, :2], use_cache=True).past_key_values),
    "custom mask": lambda m, ids: m(ids, attention_mask=torch.ones(3, 1, 4, 4, dtype=torch.bool).tril()),
    "mask with holes": lambda m, ids: m(ids, attention_mask=torch.tensor([[1, 0, 1, 1]] * 3)),
    "inputs_embeds": lambda m, ids: m(inputs_embeds=m.get_input_embeddings()(ids)),
    "output_attentions": lambda m, ids: m(ids, output_attentions=True),
    "one sequence": lambda m, ids: m(ids[:1]),
    "argument token_type_ids": lambda m, ids: m(ids, token_type_ids=torch.zeros_like(ids)),
}


@pytest.mark.parametrize("reason", CANNOT)
def test_what_cannot_be_compacted_runs_as_ever_and_is_counted(
    reason: str, close: Helper, dense: Helper
) -> None:
    model = small_model("qwen3", attn_implementation="eager")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]])
    own = dense(model, lambda: CANNOT[reason](model, ids).logits)
    with torch.no_grad():
        got = CANNOT[reason](model, ids).logits
    assert torch.equal(got, own) or reason == "filled cache"
    close(got, own)
    assert model.radixmlp_stats.dense[reason] == 1
    radixmlp.enable(model, threshold=1.0, strict=True)
    if reason == "one sequence":
        CANNOT[reason](model, ids)
        return
    with pytest.raises(radixmlp.UnsupportedModelError, match=reason):
        CANNOT[reason](model, ids)


def test_little_to_share_runs_as_ever() -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 9]])
    own = model(ids).logits
    radixmlp.enable(model, threshold=0.9)
    assert torch.equal(model(ids).logits, own)
    stats = model.radixmlp_stats
    assert stats.dense == {"little to share": 1}
    assert stats.batches == 1
    assert stats.index_seconds > 0


def test_errors_of_a_call_are_those_of_the_model() -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8], [9, 6, 7, 9999]])

    def error(call: Callable[[], Any]) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
        return f"{type(caught.value).__name__}: {caught.value}"

    calls = [lambda: model(ids), lambda: model(), lambda: model(ids - 20), lambda: model(nonsense=ids)]
    own = [error(call) for call in calls[:3]]
    radixmlp.enable(model)
    assert [error(call) for call in calls[:3]] == own


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", {"attention_dropout": 0.1}), ("gpt2", {"resid_pdrop": 0.1})]
)
def test_dropout_in_training_runs_densely(family: str, changes: dict[str, Any]) -> None:
    model = small_model(family, **changes)
    radixmlp.enable(model)
    ids = torch.tensor([[5, 6, 7, 8]] * 4)
    model.train()
    model(ids)
    stats = model.radixmlp_stats
    assert stats.compacted == 0
    assert any("drop" in reason for reason in stats.dense)
    model.eval()
    model(ids)
    assert stats.compacted == 1


def test_rope_that_depends_on_the_length_sees_the_padded_length(
    padded: Helper, close: Helper, dense: Helper
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 10,
    }
    model = small_model(
        "phi3", rope_parameters=rope, original_max_position_embeddings=10, max_position_embeddings=64
    )
    ids, mask = padded([[5, 6, 7, 8, 9], [5, 6, 7, 8]], "right", extra=3)
    wide, wide_mask = padded([[5, 6, 7, 8, 9], [5, 6, 7, 8]], "right", extra=11)
    for tokens, real, compacted in ((ids, mask, 1), (wide, wide_mask, 0)):
        call = lambda: model(tokens, attention_mask=real).logits  # noqa: B023, E731
        own = dense(model, call)
        close(call()[real.bool()], own[real.bool()])
        assert model.radixmlp_stats.compacted == compacted


def test_a_classifier_that_reads_padding_runs_densely(
    padded: Helper,
    close: Helper,
    dense: Helper,
    other_head: Helper,
) -> None:
    """It finds the last token by its id, not by the mask."""
    model = other_head(AutoModelForSequenceClassification, pad_token_id=0)
    ids, mask = padded(SEQUENCES, "right")
    for tokens, compacted in ((ids, 0), (torch.where(mask.bool(), ids, 0), 1)):
        call = lambda: model(tokens, attention_mask=mask).logits  # noqa: B023, E731
        own = dense(model, call)
        close(call(), own)
        assert model.radixmlp_stats.compacted == compacted


def test_dropout_switched_on_by_hand_is_seen() -> None:
    model = small_model("gpt2", resid_pdrop=0.3, attn_pdrop=0.0, embd_pdrop=0.0)
    ids = torch.tensor([[5, 6, 7, 8]] * 8)
    radixmlp.enable(model)
    for module in model.modules():
        module.training = isinstance(module, torch.nn.Dropout)
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.std(0).max() > 0.1
    assert model.radixmlp_stats.compacted == 0


def test_a_users_hook_inside_sees_the_batch_as_it_is() -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]])
    steer = lambda _module, _args, out: torch.cat([out[:, :-1], out[:, -1:] + 1], 1)  # noqa: E731
    handle = model.model.layers[0].register_forward_hook(steer)
    own = model(ids).logits
    handle.remove()
    radixmlp.enable(model, threshold=1.0)
    handle = model.model.layers[0].register_forward_hook(steer)
    assert torch.equal(model(ids).logits, own)
    assert model.radixmlp_stats.dense == {"hooks on the modules inside": 1}
    handle.remove()
    shapes: list[Any] = []
    model.model.register_forward_hook(lambda _module, _args, out: shapes.append(out[0].shape))
    model(ids, logits_to_keep=1)
    assert shapes == [(3, 4, 64)]
    assert model.radixmlp_stats.compacted == 1


def test_adapters_from_a_place_on_run_densely() -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM")
    model = get_peft_model(small_model("qwen3"), config).eval()
    ids = torch.tensor([[5, 6, 7, 8], [7, 8, 7, 9], [5, 6, 7, 8]])
    own = model(input_ids=ids).logits
    radixmlp.enable(model, threshold=1.0)
    assert torch.equal(model(input_ids=ids).logits, own)
    assert any("alora_offsets" in reason for reason in model.radixmlp_stats.dense)


def test_second_derivatives_are_refused_not_wrong() -> None:
    model = small_model("qwen3", torch.float64, attn_implementation="eager")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    radixmlp.enable(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    loss = model(ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="second derivatives"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.parametrize("family", [name for name in ("dory", "roc_bert") if name in causal_types()])
def test_a_cache_of_another_kind_is_the_models_own(family: str, padded: Helper, dense: Helper) -> None:
    model = small_model(family)
    ids, mask = padded(SEQUENCES, "right")
    own = dense(model, lambda: model(ids, attention_mask=mask, use_cache=True).past_key_values)
    got = model(ids, attention_mask=mask, use_cache=True).past_key_values
    assert type(got) is type(own)
    assert len(got) == len(own)
    assert model.radixmlp_stats.compacted == 0
    model(ids, attention_mask=mask, use_cache=False)
    assert model.radixmlp_stats.compacted == 1


def test_an_output_that_cannot_be_spread_runs_as_ever(dense: Helper) -> None:
    model = small_model("gemma3n_text")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    own = dense(model, lambda: model(ids, output_hidden_states=True))
    with torch.no_grad():
        got = model(ids, output_hidden_states=True)
    assert [h.shape for h in got.hidden_states] == [h.shape for h in own.hidden_states]
    assert torch.equal(got.logits, own.logits)
    assert any("no row per token" in reason for reason in model.radixmlp_stats.dense)


def test_function_transforms_and_exports_see_the_model_itself(close: Helper) -> None:
    model = small_model("qwen3", attn_implementation="eager")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    names = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (ids,), {"labels": ids}).loss

    own = torch.func.grad(loss)(names)
    radixmlp.enable(model)
    for name, gradient in torch.func.grad(loss)(names).items():
        close(gradient, own[name])
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
    close(exported.module()(input_ids=ids, use_cache=False).logits, model(ids).logits)
