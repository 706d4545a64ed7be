"""Losses on the trie equal those of the un-shared batch: values, and every parameter's gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

import radixmlp
from radixmlp import RaggedBatch
from radixmlp.optimized.training import chunked, head, rows
from radixmlp.training import causal_lm_loss, sequence_logprobs
from radixmlp.verify import oracle
from radixmlp.verify.families import small_model

FAMILIES = ["qwen3", "llama", "gpt2", "gemma2", "cohere", "granite", "opt", "gpt_oss"]
SEQUENCES = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 10],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18],
    [5, 6, 7, 8, 9],
    [20],
    [5, 6],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 19, 21],
]


CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_implementation": "eager"},
    "gpt_oss": {"attn_implementation": "eager"},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
    "granite": {"logits_scaling": 2.0},
}


def model_of(family: str = "qwen3", dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    model = small_model(family, dtype, **(CHANGES.get(family, {}) | changes))
    if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products take no fp64
    return model


def own_logprobs(
    model: Any, sequences: list[list[int]], labels: list[list[int]] | None = None
) -> list[Tensor]:
    """Each sequence alone through the model's own forward: [n-1] log-probabilities, -inf-free, masked ones 0."""
    out = []
    for row, sequence in enumerate(sequences):
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
        targets = torch.tensor((labels or sequences)[row][1:], dtype=torch.int64)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        out.append(-cross_entropy(wide, targets, reduction="none", ignore_index=-100))
    return out


def gradients(model: Any, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    value = loss()
    value.backward()
    return value.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same(model: Any, ours: Callable[[], Tensor], own: Callable[[], Tensor], tolerance: float = 1e-6) -> None:
    (value, got), (expected, truth) = gradients(model, ours), gradients(model, own)
    assert abs(value - expected) <= tolerance * max(abs(expected), 1e-3)
    assert got.keys() == truth.keys()
    # Some gradients are zero but for rounding: a key's bias, a query that sees one key.
    rounding = 1e-14 * max(float(grad.abs().max()) for grad in truth.values())
    for name, grad in truth.items():
        assert (got[name] - grad).abs().max() <= tolerance * grad.abs().max() + rounding, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["auto", "scatter-sdpa", "dense-sdpa"])
def test_loss_and_gradients(family: str, attention: str) -> None:
    model, batch = model_of(family), RaggedBatch.from_sequences(SEQUENCES)
    model.train()
    same(
        model,
        lambda: causal_lm_loss(model, batch, attention=attention),
        lambda: -torch.cat(own_logprobs(model, SEQUENCES)).mean(),
    )


def test_lifted_gradients_agree_to_1e_10() -> None:
    model, batch = model_of("llama"), RaggedBatch.from_sequences(SEQUENCES)
    with oracle.lifted(model):
        same(
            model,
            lambda: causal_lm_loss(model, batch),
            lambda: -torch.cat(own_logprobs(model, SEQUENCES)).mean(),
            1e-10,
        )


def test_fp32_gradients() -> None:
    model, batch = model_of("qwen3", torch.float32), RaggedBatch.from_sequences(SEQUENCES)
    truth = copy.deepcopy(model).double()
    _, got = gradients(model, lambda: causal_lm_loss(model, batch))
    _, expected = gradients(truth, lambda: -torch.cat(own_logprobs(truth, SEQUENCES)).mean())
    for name, grad in expected.items():
        assert (got[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_a_thousand_sequences_share_one_token() -> None:
    """The duplicates' gradients are summed in fp32: in bf16 a thousand small terms would be lost."""
    sequences = [[5, 6 + i % 400, 7 + i % 350] for i in range(1000)]
    model, batch = model_of("qwen3", torch.float32), RaggedBatch.from_sequences(sequences)
    truth = copy.deepcopy(model).double()
    _, got = gradients(model, lambda: causal_lm_loss(model, batch))
    ids = torch.tensor(sequences)
    _, expected = gradients(truth, lambda: truth(ids, labels=ids, use_cache=False).loss)
    for name, grad in expected.items():
        assert (got[name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


def test_masked_labels_and_weights() -> None:
    model, batch = model_of(), RaggedBatch.from_sequences(SEQUENCES)
    labels = [[-100] * (len(s) // 2) + s[len(s) // 2 :] for s in SEQUENCES]
    flat = torch.tensor([label for row in labels for label in row])
    kept = [torch.tensor(row[1:]) != -100 for row in labels]
    count = sum(int(k.sum()) for k in kept)
    per_sequence = torch.linspace(-2, 3, len(SEQUENCES), dtype=torch.float64)
    per_token = torch.linspace(-1, 2, batch.num_tokens, dtype=torch.float64)

    def own(weights: list[Tensor] | None) -> Tensor:
        values = own_logprobs(model, SEQUENCES, labels)
        return -sum(
            ((v if weights is None else v * w).sum() for v, w in zip(values, weights or values, strict=True))
        )

    same(model, lambda: causal_lm_loss(model, batch, flat, reduction="sum"), lambda: own(None))
    same(model, lambda: causal_lm_loss(model, batch, flat), lambda: own(None) / count)
    same(
        model,
        lambda: causal_lm_loss(model, batch, flat, per_sequence),
        lambda: own(list(per_sequence)) / count,
    )
    token_weights = [w[1:] for w in per_token.split(batch.lengths.tolist())]
    same(
        model,
        lambda: causal_lm_loss(model, batch, flat, per_token, reduction="sum"),
        lambda: own(token_weights),
    )
    single = causal_lm_loss(model, batch, flat, per_token, reduction="none")
    expected = [
        (-v * w)[k]
        for v, w, k in zip(own_logprobs(model, SEQUENCES, labels), token_weights, kept, strict=True)
    ]
    torch.testing.assert_close(single, torch.cat(expected), rtol=1e-6, atol=1e-8)


def test_labels_other_than_the_tokens() -> None:
    model, batch = model_of(), RaggedBatch.from_sequences([[5, 6, 7]] * 3)
    labels = [[0, 1, 2], [0, 3, 4], [-100, 1, -100]]
    same(
        model,
        lambda: causal_lm_loss(model, batch, torch.tensor(labels).flatten(), reduction="sum"),
        lambda: -torch.cat(own_logprobs(model, [[5, 6, 7]] * 3, labels)).sum(),
    )


def test_sequence_logprobs_are_one_a_real_next_token() -> None:
    sequences = [*SEQUENCES, [], [7]]
    model, batch = model_of(), RaggedBatch.from_sequences(sequences)
    got = sequence_logprobs(model, batch)
    assert [len(part) for part in got.split()] == [max(len(s) - 1, 0) for s in sequences]
    expected = torch.cat(own_logprobs(model, SEQUENCES))
    torch.testing.assert_close(got.values, expected, rtol=1e-6, atol=1e-8)
    weights = torch.randn_like(expected)
    same(
        model,
        lambda: (sequence_logprobs(model, batch).values.exp() * weights).sum(),
        lambda: (torch.cat(own_logprobs(model, SEQUENCES)).exp() * weights).sum(),
    )


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_small_chunks_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of(family), RaggedBatch.from_sequences(SEQUENCES)
    whole = gradients(model, lambda: causal_lm_loss(model, batch))
    monkeypatch.setattr(head, "_CHUNK_BYTES", 4 * 512 * 3)
    value, got = gradients(model, lambda: causal_lm_loss(model, batch))
    assert abs(value - whole[0]) <= 1e-12 * abs(value)
    for name, grad in whole[1].items():
        assert (got[name] - grad).abs().max() <= 1e-10 * grad.abs().max(), name


def test_a_linear_head_and_its_replay_agree() -> None:
    model, batch = model_of("qwen3"), RaggedBatch.from_sequences(SEQUENCES)
    compact = rows.run_decoder(model, batch)
    assert isinstance(head.head_for(compact), head.LinearHead)
    sample = compact.hidden[:5].detach()
    grad = torch.randn(5, 512, dtype=torch.float64)
    results = []
    for kind in (head.LinearHead(model.lm_head), head.ReplayedHead(compact)):
        buffers = kind.gradients()
        logits, pull = kind.with_pull(sample, buffers)
        results.append((logits, pull(grad), *buffers))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite"])
def test_heads_with_scales_and_caps_are_replayed(family: str) -> None:
    compact = rows.run_decoder(model_of(family), RaggedBatch.from_sequences(SEQUENCES))
    assert isinstance(head.head_for(compact), head.ReplayedHead)


def test_logits_of_all_rows_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = model_of(), RaggedBatch.from_sequences(SEQUENCES)
    monkeypatch.setattr(head, "_CHUNK_BYTES", 4 * 512 * 4)
    seen: list[int] = []
    real = chunked._picked_with_gradient
    monkeypatch.setattr(
        chunked,
        "_picked_with_gradient",
        lambda logits, *rest: (seen.append(logits.shape[0]), real(logits, *rest))[1],
    )
    causal_lm_loss(model, batch).backward()
    assert max(seen) == 4
    assert sum(seen) == 12  # nodes with a next token: 17 less 5 leaves


def test_gradients_are_bitwise_equal_over_five_runs() -> None:
    model, batch = model_of("qwen3", torch.float32), RaggedBatch.from_sequences(SEQUENCES * 5)
    runs = [gradients(model, lambda: causal_lm_loss(model, batch)) for _ in range(5)]
    for value, grads in runs[1:]:
        assert torch.equal(value, runs[0][0])
        assert all(torch.equal(grad, runs[0][1][name]) for name, grad in grads.items())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_with_two_losses_in_flight(reentrant: bool) -> None:
    model = model_of()
    first, second = SEQUENCES, [s[::-1] for s in SEQUENCES]
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()

    def both() -> Tensor:
        a, b = (
            causal_lm_loss(model, RaggedBatch.from_sequences(s), reduction="sum") for s in (first, second)
        )
        return a + b

    same(model, both, lambda: -torch.cat(own_logprobs(model, [*first, *second])).sum())


def test_accumulation_and_mixed_precision() -> None:
    model, batch = model_of("qwen3", torch.float32), RaggedBatch.from_sequences(SEQUENCES)
    _, once = gradients(model, lambda: causal_lm_loss(model, batch))
    model.zero_grad()
    for _ in range(2):
        causal_lm_loss(model, batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-5, atol=1e-7)
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(model, lambda: causal_lm_loss(model, batch))
        own = gradients(model, lambda: -torch.cat(own_logprobs(model, SEQUENCES)).mean())
    truth = once
    for name in truth:
        errors = [(g[1][name] - truth[name]).norm() for g in (ours, own)]
        assert errors[0] <= 1.5 * errors[1] + 1e-3 * truth[name].norm(), name


def test_lora_trains_its_own_weights() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of(), LoraConfig(r=4, target_modules=["q_proj", "down_proj", "lm_head"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    batch = RaggedBatch.from_sequences(SEQUENCES)
    same(
        model,
        lambda: causal_lm_loss(model, batch),
        lambda: -torch.cat(own_logprobs(model, SEQUENCES)).mean(),
    )
    assert sum(p.grad is not None for p in model.parameters()) == sum(
        p.requires_grad for p in model.parameters()
    )


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"resid_pdrop": 0.1}])
def test_dropout_in_training_is_refused(changes: dict[str, float]) -> None:
    model = model_of("gpt2" if "resid_pdrop" in changes else "qwen3", torch.float32, **changes)
    batch = RaggedBatch.from_sequences(SEQUENCES)
    causal_lm_loss(model, batch)
    model.train()
    with pytest.raises(ValueError, match="dropout"):
        causal_lm_loss(model, batch)


def test_a_router_loss_is_refused() -> None:
    model = model_of("mixtral", torch.float32, output_router_logits=True, router_aux_loss_coef=0.02)
    with pytest.raises(radixmlp.UnsupportedModelError, match="router loss"):
        causal_lm_loss(model, RaggedBatch.from_sequences(SEQUENCES))


def test_wrong_input_names_the_row_and_the_remedy() -> None:
    model, batch = model_of(dtype=torch.float32), RaggedBatch.from_sequences([[5, 6, 7], [5, 8]])
    with pytest.raises(ValueError, match="row 1, offset 1 is -7"):
        causal_lm_loss(model, batch, torch.tensor([5, 6, 7, 5, -7]))
    with pytest.raises(ValueError, match="one integer per token"):
        causal_lm_loss(model, batch, torch.tensor([5, 6]))
    with pytest.raises(ValueError, match="one per sequence"):
        causal_lm_loss(model, batch, weights=torch.ones(3))
    with pytest.raises(ValueError, match="reduction"):
        causal_lm_loss(model, batch, reduction="average")
    with pytest.raises(ValueError, match="no tokens"):
        causal_lm_loss(model, RaggedBatch.from_sequences([[]]))
    with pytest.raises(ValueError, match="512"):
        causal_lm_loss(model, batch, torch.tensor([5, 6, 512, 5, 8]))
    assert float(causal_lm_loss(model, batch, torch.full((5,), -100))) == 0.0
    assert sequence_logprobs(model, RaggedBatch.from_sequences([[5], [6]])).values.shape == (0,)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 3), min_size=0, max_size=7), min_size=1, max_size=6).filter(
        lambda rows: any(rows)
    ),
    st.randoms(use_true_random=False),
)
def test_any_batch(sequences: list[list[int]], random: Any) -> None:
    model = _shared()
    labels = [[-100 if random.random() < 0.3 else random.randrange(512) for _ in s] for s in sequences]
    batch = RaggedBatch.from_sequences(sequences)
    flat = torch.tensor([label for row in labels for label in row], dtype=torch.int64)
    real = [(s, label) for s, label in zip(sequences, labels, strict=True) if len(s) > 1]
    if not real:
        return
    same(
        model,
        lambda: causal_lm_loss(model, batch, flat, reduction="sum"),
        lambda: -torch.cat(own_logprobs(model, *map(list, zip(*real, strict=True)))).sum(),
    )


_models: dict[str, Any] = {}


def _shared() -> Any:
    if not _models:
        _models["qwen3"] = model_of()
    return _models["qwen3"]
