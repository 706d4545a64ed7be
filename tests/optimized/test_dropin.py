"""An enabled model answers its ordinary calls as before: same class, shapes, dtypes and values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    GenerationConfig,
)

import radixmlp
from radixmlp.verify.families import small_model

Helper = Callable[..., Any]  # of conftest.py

FAMILIES = ["qwen3", "llama", "gpt2", "gemma2", "gpt_oss", "mistral", "opt", "olmoe", "deepseek_v3"]


SEQUENCES = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 10],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18],
    [5, 6, 7, 8, 9],
    [20],
    [5, 6],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 19, 21],
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_calls_keep_their_values(
    family: str, side: str, padded: Helper, close: Helper, dense: Helper
) -> None:
    # Older fused implementations leave out soft-capping and sinks, and are refused.
    model = small_model(family, attn_implementation="eager" if family in ("gemma2", "gpt_oss") else "sdpa")
    ids, mask = padded(SEQUENCES, side, extra=2)
    call = lambda: model(input_ids=ids, attention_mask=mask, output_hidden_states=True)  # noqa: E731
    own = dense(model, call)
    with torch.no_grad():
        got = call()
    assert type(got) is type(own)
    assert list(got.keys()) == list(own.keys())
    real = mask.bool()
    close(got.logits[real], own.logits[real])
    assert torch.isfinite(got.logits).all()
    for ours, theirs in zip(got.hidden_states, own.hidden_states, strict=True):
        close(ours[real], theirs[real], 2e-5)
    assert model.radixmlp_stats.compacted == 1
    shares = family != "gpt2" or side == "right"  # its positions count columns, padding included
    assert model.radixmlp_stats.rows == 17 or not shares


@pytest.mark.parametrize("keep", [1, 3, 50])
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_to_keep(keep: int, side: str, padded: Helper, close: Helper, dense: Helper) -> None:
    model = small_model("qwen3")
    ids, mask = padded(SEQUENCES, side)
    call = lambda: model(input_ids=ids, attention_mask=mask, logits_to_keep=keep).logits  # noqa: E731
    own = dense(model, call)
    with torch.no_grad():
        got = call()
    real = mask.bool()[:, -keep:]
    close(got[real], own[real])
    rows = torch.tensor([0, 2, 5])
    call = lambda: model(input_ids=ids, attention_mask=mask, logits_to_keep=rows).logits  # noqa: E731
    own = dense(model, call)
    close(call()[mask.bool()[:, rows]], own[mask.bool()[:, rows]])


def test_no_mask_means_every_column_is_a_token(close: Helper, dense: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 0, 0]])
    own = dense(model, lambda: model(ids).logits)
    close(model(ids).logits, own)
    assert model.radixmlp_stats.rows == 4 + 1 + 2


def test_position_ids_are_used_and_packed_rows_run_densely(close: Helper, dense: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]] * 3)
    shifted = torch.arange(6)[None] + torch.tensor([[0], [3], [0]])
    own = dense(model, lambda: model(ids, position_ids=shifted).logits)
    close(model(ids, position_ids=shifted).logits, own)
    assert model.radixmlp_stats.rows == 12
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]] * 3)
    own = dense(model, lambda: model(ids, position_ids=packed).logits)
    close(model(ids, position_ids=packed).logits, own)
    assert model.radixmlp_stats.dense == {"packed rows": 1}


def test_left_padding_shares_for_rotary_models_whatever_the_offset(padded: Helper) -> None:
    model = small_model("llama")
    radixmlp.enable(model)
    ids, mask = padded([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11]], "left")
    model(ids, attention_mask=mask)
    assert model.radixmlp_stats.rows == 7


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mistral"])
@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_generate_equals_the_dense_one(
    family: str, kwargs: dict[str, Any], padded: Helper, dense: Helper
) -> None:
    model = small_model(family)
    ids, mask = padded(SEQUENCES, "left")
    config = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=511, **kwargs)
    call = lambda: model.generate(ids, attention_mask=mask, generation_config=config)  # noqa: E731
    own = dense(model, call)
    assert torch.equal(call(), own)
    stats = model.radixmlp_stats
    assert stats.compacted == 1
    assert stats.dense["filled cache"] >= 6
    assert stats.rows < mask.sum() or family == "gpt2"


def test_greedy_rows_that_arrive_expanded_are_shared() -> None:
    model = small_model("qwen3")
    radixmlp.enable(model)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    model.generate(ids, num_return_sequences=4, num_beams=4, max_new_tokens=2, do_sample=False)
    assert model.radixmlp_stats.tokens == 20
    assert model.radixmlp_stats.rows == 5


@pytest.mark.parametrize("family", ["qwen3", "mistral", "deepseek_v3"])
def test_the_cache_is_the_dense_one_and_made_when_read(
    family: str, padded: Helper, close: Helper, dense: Helper
) -> None:
    model = small_model(family)
    ids, mask = padded(SEQUENCES, "right")
    own = dense(model, lambda: model(ids, attention_mask=mask).past_key_values)
    got = model(ids, attention_mask=mask).past_key_values
    assert isinstance(got, DynamicCache)
    assert "layers" not in vars(got)
    assert got.get_seq_length() == own.get_seq_length()
    assert type(got) is DynamicCache
    real = mask.bool()
    for ours, theirs in zip(got.layers, own.layers, strict=True):
        seen = real[:, -theirs.keys.shape[2] :]
        close(ours.keys.transpose(1, 2)[seen], theirs.keys.transpose(1, 2)[seen])
        close(ours.values.transpose(1, 2)[seen], theirs.values.transpose(1, 2)[seen])
    given = DynamicCache(config=model.config)
    assert model(ids, attention_mask=mask, past_key_values=given).past_key_values is given
    assert given.get_seq_length() == own.get_seq_length()
    with torch.no_grad():
        copied = copy.deepcopy(model(ids, attention_mask=mask).past_key_values)
    assert copied.get_seq_length() == own.get_seq_length()


def test_the_cache_of_left_padded_rows_is_that_of_the_model_itself(
    padded: Helper, close: Helper, dense: Helper
) -> None:
    """Counted from the first token, keys are turned otherwise than the columns a later call would count from."""
    model = small_model("qwen3")
    ids, mask = padded(SEQUENCES, "left")
    more = torch.cat([mask, torch.ones(len(ids), 1, dtype=mask.dtype)], 1)
    follow = lambda cache: model(ids[:, :1], attention_mask=more, past_key_values=cache).logits  # noqa: E731
    own = dense(model, lambda: follow(model(ids, attention_mask=mask).past_key_values))
    out = model(ids, attention_mask=mask)
    assert model.radixmlp_stats.compacted == 1
    close(follow(out.past_key_values), own)
    reused, late = ids.clone(), model(ids, attention_mask=mask).past_key_values
    early = model(reused, attention_mask=mask).past_key_values
    reused.fill_(3)
    close(follow(early), own)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="model changed"):
            late.get_seq_length()


def test_labels_give_the_dense_loss(padded: Helper, close: Helper, dense: Helper) -> None:
    model = small_model("qwen3")
    for side in ("left", "right"):
        ids, mask = padded(SEQUENCES, side)
        labels = torch.where(mask.bool(), ids, -100)
        call = lambda: model(ids, attention_mask=mask, labels=labels).loss  # noqa: B023, E731
        own = dense(model, call)
        close(call(), own)
        reads_padding = side == "left"  # the padding before a row's first token predicts it
        assert model.radixmlp_stats.dense["labels on padding"] == reads_padding
        assert model.radixmlp_stats.compacted == (not reads_padding)
        labels = ids.clone()
        own = dense(model, call)
        close(call(), own)


def test_heads_other_than_a_language_model(
    padded: Helper,
    close: Helper,
    dense: Helper,
    other_head: Helper,
) -> None:
    ids, mask = padded(SEQUENCES, "right")
    ids = torch.where(mask.bool(), ids, 0)
    for auto in (AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification):
        model = other_head(auto, pad_token_id=0)
        own = dense(model, lambda: model(ids, attention_mask=mask)[0])  # noqa: B023
        with torch.no_grad():
            got = model(ids, attention_mask=mask)[0]
        if own.shape[:2] == mask.shape:
            got, own = got[mask.bool()], own[mask.bool()]
        close(got, own)
        assert model.radixmlp_stats.compacted == 1
        out = model(ids, attention_mask=mask, return_dict=False)
        assert isinstance(out, tuple)


def test_the_head_runs_on_distinct_rows() -> None:
    model = small_model("qwen3")
    radixmlp.enable(model)
    seen = []
    model.lm_head.register_forward_hook(lambda _m, args, _out: seen.append(args[0].shape))
    rows = []
    original = torch.nn.functional.linear

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is model.lm_head.weight:
            rows.append(x.numel() // x.shape[-1])
        return original(x, weight, bias)

    torch.nn.functional.linear = counting
    try:
        model(torch.tensor([[5, 6, 7, 8]] * 8))
    finally:
        torch.nn.functional.linear = original
    assert rows == [4]
    assert seen == [(8, 4, 64)]


def test_hidden_states_changed_before_the_head_are_used_as_they_are(close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 8)
    radixmlp.enable(model)
    with torch.inference_mode():
        hidden = model.model(ids).last_hidden_state
        hidden[3] += 1
        own = torch.nn.functional.linear(hidden, model.lm_head.weight)
        close(model.lm_head(hidden), own)
        close(model.lm_head(hidden[:, 1:]), own[:, 1:])


def test_sharing_keys_keep_rows_apart(close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 4)
    own = model(ids).logits
    radixmlp.enable(model, threshold=1.0)
    close(model(ids, sharing_keys=["a", "b", "a", "b"]).logits, own)
    assert model.radixmlp_stats.rows == 8
    with pytest.raises(ValueError, match="sharing_keys"):
        model(ids, sharing_keys=["a"])


def test_embeddings_with_a_key_per_token(close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 4)
    embeddings = model.get_input_embeddings()(ids).detach()
    own = model(inputs_embeds=embeddings).logits
    radixmlp.enable(model)
    close(model(inputs_embeds=embeddings, sharing_keys=ids).logits, own)
    assert model.radixmlp_stats.rows == 4
    with pytest.raises(ValueError, match="differ"):
        model(inputs_embeds=embeddings * torch.arange(1, 5)[:, None, None], sharing_keys=ids)
    with pytest.raises(ValueError, match="each token"):
        model(inputs_embeds=embeddings, sharing_keys=[1, 2, 3, 4])


def test_gradients_through_ordinary_calls(padded: Helper, close: Helper) -> None:
    model = small_model("qwen3", torch.float64)
    ids, mask = padded(SEQUENCES, "right")
    labels = torch.where(mask.bool(), ids, -100)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    model.train()
    own = gradients()
    radixmlp.enable(model)
    for got, expected in zip(gradients(), own, strict=True):
        close(got, expected, 1e-6)
    assert model.radixmlp_stats.compacted == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_with_two_forwards_in_flight(
    reentrant: bool, padded: Helper, close: Helper
) -> None:
    model = small_model("qwen3", torch.float64)
    first, second = padded(SEQUENCES, "right"), padded([s[::-1] for s in SEQUENCES], "right")
    model.train()

    def gradients() -> list[Tensor]:
        model.zero_grad()
        sums = [
            model(ids, attention_mask=mask).logits[mask.bool()].square().sum()
            for ids, mask in (first, second)
        ]
        for total in sums:
            total.backward()
        return [p.grad.clone() for p in model.parameters()]

    own = gradients()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    radixmlp.enable(model)
    before = [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
    for got, expected in zip(gradients(), own, strict=True):
        close(got, expected, 1e-6)
    assert model.radixmlp_stats.compacted == 2
    assert [vars(m).get("_gradient_checkpointing_func") for m in model.modules()] == before


def test_router_losses_count_every_token(padded: Helper, close: Helper, dense: Helper) -> None:
    model = small_model("mixtral")
    ids, mask = padded(SEQUENCES, "right")
    call = lambda: model(ids, attention_mask=mask, output_router_logits=True)  # noqa: E731
    own = dense(model, call)
    got = call()
    assert model.radixmlp_stats.compacted == 1
    close(got.aux_loss, own.aux_loss)
    for ours, theirs in zip(got.router_logits, own.router_logits, strict=True):
        close(ours[mask.flatten().bool()], theirs[mask.flatten().bool()])


def test_gradients_of_hidden_states_are_each_rows_own(close: Helper) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]])
    weights = torch.randn(3, 4, 512)

    def gradient(model: Any, how: str) -> Tensor:
        if how == "head called by the user":
            hidden = model.model(ids).last_hidden_state
            return torch.autograd.grad((model.lm_head(hidden) * weights).sum(), hidden)[0]
        if how == "hidden states asked for":
            out = model(ids, output_hidden_states=True)
            return torch.autograd.grad((out.logits * weights).sum(), out.hidden_states[1])[0]
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
        out = model(
            inputs_embeds=embeddings, **({"sharing_keys": ids} if hasattr(model, "radixmlp_stats") else {})
        )
        return torch.autograd.grad((out.logits * weights).sum(), embeddings)[0]

    for how in ("head called by the user", "hidden states asked for", "embeddings given"):
        model = small_model("qwen3")
        own = gradient(model, how)
        radixmlp.enable(model, threshold=1.0)
        close(gradient(model, how), own)


def test_a_given_cache_is_filled_even_where_none_is_asked_for() -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    radixmlp.enable(model)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 4
    assert model.radixmlp_stats.compacted == 1


def test_a_base_model_that_returns_tuples_keeps_its_lazy_cache(
    padded: Helper, close: Helper, dense: Helper
) -> None:
    model = small_model("qwen3").model
    model.config.return_dict = False
    ids, mask = padded(SEQUENCES, "left")
    own = dense(model, lambda: model(ids, attention_mask=mask)[0])
    out = model(ids, attention_mask=mask)
    assert isinstance(out, tuple)
    close(out[0][mask.bool()], own[mask.bool()])
    assert out[1].get_seq_length() == ids.shape[1]


def test_sharing_keys_as_a_tensor() -> None:
    model = small_model("qwen3")
    radixmlp.enable(model, threshold=1.0)
    model(torch.tensor([[5, 6, 7, 8]] * 4), sharing_keys=torch.tensor([1, 2, 1, 2]))
    assert model.radixmlp_stats.rows == 8


@settings(max_examples=25, deadline=None)
@given(
    sequences=st.lists(st.lists(st.integers(1, 3), min_size=0, max_size=9), min_size=2, max_size=6).filter(
        lambda rows: any(rows)
    ),
    side=st.sampled_from(["left", "right", "both"]),
    extra=st.integers(0, 2),
)
def test_any_padded_batch(
    sequences: list[list[int]], side: str, extra: int, padded: Helper, close: Helper
) -> None:
    model = _shared_model()
    ids, mask = padded(sequences, side, extra)
    real = mask.bool()
    with torch.no_grad():
        got = model(ids, attention_mask=mask).logits
        assert torch.isfinite(got).all()
        for row, sequence in enumerate(sequences):
            if sequence:
                close(got[row][real[row]], model(torch.tensor([sequence])).logits[0], 2e-5)


_models: dict[str, Any] = {}


def _shared_model() -> Any:
    if "model" not in _models:
        _models["model"] = radixmlp.enable(small_model("qwen3"), threshold=1.0)
    return _models["model"]
