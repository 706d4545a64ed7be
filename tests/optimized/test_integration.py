"""`radixmlp.forward` on unmodified transformers models: equal to their own forward, or refused with the reason."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import radixmlp
from radixmlp import RaggedBatch, TriePlan
from radixmlp.optimized.attention.trie_sdpa import TrieSdpa

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VERIFIED = [
    "qwen3",
    "llama",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "phi3",
    "olmo2",
    "cohere2",
    "gpt2",
    "granite",
]
SEQUENCES = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 10],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18],
    [5, 6, 7, 8, 9],
    [20],
    [5, 6],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 19, 21],
]  # fmt: skip


def tiny(
    family: str, auto: Any = AutoModelForCausalLM, dtype: torch.dtype = torch.float32, **changes: Any
) -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "sliding_window": 4, **changes}
    config = AutoConfig.for_model(family, **{name: size for name, size in sizes.items() if size is not ...})
    model = auto.from_config(config).to(dtype).eval()
    with torch.no_grad():  # fresh weights hardly attend: scaled up, a wrong mask shows
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def own_logits(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        ids = [torch.tensor([s]) for s in sequences]
        outs = [model(input_ids=i, attention_mask=torch.ones_like(i), use_cache=False) for i in ids]
    return torch.cat([out.logits[0] for out in outs])


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("family", VERIFIED)
@pytest.mark.parametrize("attention", ["auto", "dense-sdpa", "scatter-sdpa", "trie-sdpa"])
def test_equals_the_own_forward(family: str, attention: str) -> None:
    model = tiny(family, attn_implementation="eager" if family in ("gpt_oss", "gemma2") else "sdpa")
    batch = RaggedBatch.from_sequences(SEQUENCES)
    expected = own_logits(model, SEQUENCES)
    with torch.no_grad():
        out = radixmlp.forward(model, batch, attention=attention)
        last = radixmlp.forward(model, batch, attention=attention, logits_to_keep=1).logits
    assert out.logits is not None
    assert last is not None
    assert_close(out.logits, expected)
    assert_close(last, expected[batch.cu_seqlens[1:].long() - 1])
    assert out.last_hidden_state.shape == (batch.num_tokens, 32)
    assert out.plan.num_nodes == (batch.num_tokens if attention == "dense-sdpa" else 17)


@pytest.mark.parametrize("keep", [1, 2, 3, 50])
def test_logits_to_keep_gives_the_last_tokens_of_each_sequence(keep: int) -> None:
    model, batch = tiny("qwen3"), RaggedBatch.from_sequences(SEQUENCES)
    own = own_logits(model, SEQUENCES).split(batch.lengths.tolist())
    with torch.no_grad():
        got = radixmlp.forward(model, batch, logits_to_keep=keep).logits
    assert got is not None
    assert_close(got, torch.cat([logits[-keep:] for logits in own]))


def test_a_count_of_last_tokens_for_each_sequence() -> None:
    model, batch = tiny("qwen3"), RaggedBatch.from_sequences(SEQUENCES)
    own = own_logits(model, SEQUENCES).split(batch.lengths.tolist())
    keep = torch.tensor([2, 0, 3, 50, 1, 0, 1])
    with torch.no_grad():
        got = radixmlp.forward(model, batch, logits_to_keep=keep).logits
    assert got is not None
    assert_close(got, torch.cat([x[max(len(x) - int(k), 0) :] for x, k in zip(own, keep, strict=True)]))
    for wrong in (keep[:-1], keep.float(), -keep):
        with pytest.raises(ValueError, match="logits_to_keep"):
            radixmlp.forward(model, batch, logits_to_keep=wrong)


def test_the_head_runs_on_distinct_rows_only() -> None:
    model, batch = tiny("qwen3"), RaggedBatch.from_sequences([[1, 2, 3]] * 8)
    out = radixmlp.forward(model, batch, logits_to_keep=1)
    assert out.compact_logits is not None
    assert out.logits is not None
    assert out.compact_logits.shape[0] == 1
    assert out.logits.shape[0] == 8


def test_custom_positions_reach_the_model() -> None:
    model = tiny("qwen3")
    positions = [[0, 1, 9], [0, 1, 2], [0, 1, 9]]
    batch = RaggedBatch.from_sequences([[5, 6, 7]] * 3, position_ids=positions)
    out = radixmlp.forward(model, batch, attention="trie-sdpa")
    assert out.plan.num_nodes == 4
    assert out.logits is not None
    for row, position in enumerate(positions):
        ids, mask = torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64)
        own = model(
            input_ids=ids, attention_mask=mask, position_ids=torch.tensor([position]), use_cache=False
        ).logits
        assert_close(out.logits[3 * row : 3 * row + 3], own[0])


def test_backbone_and_classifier() -> None:
    batch = RaggedBatch.from_sequences(SEQUENCES)
    base = tiny("qwen3", AutoModel)
    out = radixmlp.forward(base, batch)
    assert out.logits is None
    own = torch.cat([base(input_ids=torch.tensor([s])).last_hidden_state[0] for s in SEQUENCES])
    assert_close(out.last_hidden_state, own)
    classifier = tiny("qwen3", AutoModelForSequenceClassification, num_labels=3)
    logits = radixmlp.forward(classifier, batch).logits
    assert logits is not None
    assert_close(logits, torch.cat([classifier(input_ids=torch.tensor([s])).logits for s in SEQUENCES]))


def test_gradients_equal_the_unshared_ones() -> None:
    model, batch = tiny("qwen3", dtype=torch.float64), RaggedBatch.from_sequences(SEQUENCES)
    weights = torch.randn(batch.num_tokens, 97, dtype=torch.float64)
    grads = []
    for attention in ("trie-sdpa", "scatter-sdpa", "own"):
        model.zero_grad()
        if attention == "own":
            logits = torch.cat(
                [model(input_ids=torch.tensor([s]), use_cache=False).logits[0] for s in SEQUENCES]
            )
        else:
            logits = radixmlp.forward(model, batch, attention=attention).logits
        (logits * weights).sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, expected in grads[2].items():
        for got in grads[:2]:
            assert (got[name] - expected).abs().max() <= 1e-6 * expected.abs().max(), name


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("bloom", {}),
        ("falcon", {"alibi": True, "head_dim": ...}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
        ("mamba", {}),
        ("rwkv", {"attention_hidden_size": 32}),
        ("bert", {}),
        ("openai-gpt", {"n_embd": 32, "n_head": 4, "n_layer": 2}),
        ("recurrent_gemma", {"lru_width": 32}),
        ("jamba", {"num_experts": 2, "use_mamba_kernels": False}),
    ],
)
def test_models_that_mix_rows_otherwise_are_refused(family: str, changes: dict[str, Any]) -> None:
    model = tiny(family, **changes)
    before = own_logits(model, [[5, 6, 7]])
    with pytest.raises(radixmlp.UnsupportedModelError):
        radixmlp.enable(model)
    assert torch.equal(own_logits(model, [[5, 6, 7]]), before)


def test_chunked_attention_is_refused_where_a_chunk_fills() -> None:
    model = tiny("llama4_text", attention_chunk_size=8, intermediate_size_mlp=64, num_local_experts=2)
    with pytest.raises(radixmlp.UnsupportedModelError):
        radixmlp.forward(model, RaggedBatch.from_sequences([list(range(5, 25))] * 2), attention="trie-sdpa")


def test_length_dependent_rope_is_refused_beyond_its_limit() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=32)
    radixmlp.forward(model, RaggedBatch.from_sequences([list(range(5, 25))] * 2))
    with pytest.raises(radixmlp.UnsupportedModelError, match="position 32"):
        radixmlp.forward(model, RaggedBatch.from_sequences([list(range(5, 45))] * 2))


def test_dropout_in_training_is_refused() -> None:
    model = tiny("qwen3", attention_dropout=0.1)
    radixmlp.enable(model)
    model.train()
    with pytest.raises(radixmlp.UnsupportedAttentionError, match="dropout"):
        radixmlp.forward(model, RaggedBatch.from_sequences(SEQUENCES))


def test_not_a_transformers_model() -> None:
    with pytest.raises(radixmlp.UnsupportedModelError, match="holds 0 transformers models"):
        radixmlp.enable(torch.nn.Linear(2, 2))


def test_unknown_names_and_values_are_refused() -> None:
    model, batch = tiny("qwen3"), RaggedBatch.from_sequences(SEQUENCES)
    with pytest.raises(radixmlp.UnsupportedAttentionError, match="trie-sdpa"):
        radixmlp.forward(model, batch, attention="tri-sdpa")
    with pytest.raises(radixmlp.UnsupportedAttentionError, match="there are"):
        radixmlp.enable(model, attention="flash")
    with pytest.raises(ValueError, match="between 0 and 1"):
        radixmlp.enable(model, threshold=1.5)
    with pytest.raises(ValueError, match="row 1, offset 2 is 97"):
        radixmlp.forward(model, RaggedBatch.from_sequences([[1, 2], [3, 4, 97]]))
    with pytest.raises(ValueError, match="sequence 1 is empty"):
        radixmlp.forward(model, RaggedBatch.from_sequences([[1, 2], []]), logits_to_keep=1)
    with pytest.raises(ValueError, match="another batch"):
        radixmlp.forward(model, batch, plan=radixmlp.build_plan(RaggedBatch.from_sequences([[1]])))
    other = RaggedBatch.from_sequences([[t + 1 for t in s] for s in SEQUENCES])
    with pytest.raises(ValueError, match="another batch"):
        radixmlp.forward(model, batch, plan=radixmlp.build_plan(other))
    with pytest.raises(ValueError, match="depth-first"):
        radixmlp.forward(model, batch, plan=radixmlp.build_plan(batch, order="input"))


@pytest.mark.parametrize("attention", ["auto", "dense-sdpa", "trie-sdpa"])
def test_empty_batches(attention: str) -> None:
    model = tiny("qwen3")
    for sequences in ([], [[]], [[], []]):
        out = radixmlp.forward(model, RaggedBatch.from_sequences(sequences), attention=attention)
        assert out.last_hidden_state.shape == (0, 32)
        assert out.logits is not None
        assert out.logits.shape == (0, 97)


def test_empty_sequences_keep_their_place() -> None:
    model = tiny("qwen3")
    out = radixmlp.forward(
        model, RaggedBatch.from_sequences([[], [5, 6], [], [5, 7], []]), attention="trie-sdpa"
    )
    assert out.logits is not None
    assert_close(out.logits, own_logits(model, [[5, 6], [5, 7]]))


def test_auto_runs_densely_above_the_threshold() -> None:
    model, batch = tiny("qwen3"), RaggedBatch.from_sequences(SEQUENCES)
    gamma = radixmlp.build_plan(batch).gamma
    assert radixmlp.forward(model, batch, threshold=gamma).attention == "auto"
    assert radixmlp.forward(model, batch, threshold=gamma - 1e-6).attention == "dense-sdpa"
    radixmlp.enable(model, threshold=0.0)
    assert radixmlp.forward(model, batch).attention == "dense-sdpa"
    radixmlp.disable(model)
    assert radixmlp.forward(model, batch).attention == "auto"


def test_forward_does_not_change_the_model_object() -> None:
    model = tiny("qwen3")
    before = {name: id(value) for name, value in vars(model).items()}
    config = copy.deepcopy(model.config.to_dict())
    radixmlp.forward(model, RaggedBatch.from_sequences(SEQUENCES))
    assert {name: id(value) for name, value in vars(model).items()} == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"


def test_an_error_inside_leaves_the_model_usable() -> None:
    class Failing:
        name = "failing"

        def unsupported(self, *_: Any) -> None:
            return None

        def __call__(self, *_: Any) -> torch.Tensor:
            raise RuntimeError("on purpose")

    model = tiny("qwen3")
    expected = own_logits(model, SEQUENCES)
    radixmlp.register_attention(Failing())
    try:
        with pytest.raises(RuntimeError, match="on purpose"):
            radixmlp.forward(model, RaggedBatch.from_sequences(SEQUENCES), attention="failing")
    finally:
        radixmlp.unregister_attention("failing")
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(own_logits(model, SEQUENCES), expected)


def test_threads_share_one_model_and_one_config() -> None:
    """A compact forward in one thread does not divert dense calls in another, of this model or of a twin."""
    model = tiny("qwen3")
    twin = AutoModelForCausalLM.from_config(model.config).eval()
    twin.config = model.config
    expected = {id(m): own_logits(m, SEQUENCES) for m in (model, twin)}
    batch = RaggedBatch.from_sequences(SEQUENCES)
    radixmlp.enable(model)
    failures: list[str] = []

    def run(what: str, call: Any, wanted: torch.Tensor) -> None:
        for _ in range(15):
            with torch.no_grad():
                got = call()
            if (got - wanted).abs().max() > 1e-5 * wanted.abs().max():
                failures.append(what)

    jobs = [
        (
            "compact",
            lambda: radixmlp.forward(model, batch, attention="trie-sdpa").logits,
            expected[id(model)],
        ),
        ("dense", lambda: own_logits(model, SEQUENCES), expected[id(model)]),
        ("twin", lambda: own_logits(twin, SEQUENCES), expected[id(twin)]),
    ]
    threads = [threading.Thread(target=run, args=job) for job in jobs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layers", [2, 24])
def test_rounding_noise_is_no_reason_to_refuse(dtype: torch.dtype, layers: int) -> None:
    """A deep model amplifies half-precision rounding; its own two implementations tell by how much."""
    for family in ("qwen3", "llama", "gemma2"):
        radixmlp.enable(tiny(family, dtype=dtype, num_hidden_layers=layers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", ["own value only", "one key too many", "everything"])
def test_a_wrong_backend_does_not_pass_the_probe(
    dtype: torch.dtype, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: Any, q: Any, k: Any, v: Any, plan: TriePlan, spec: Any) -> torch.Tensor:
        rows = torch.arange(plan.num_nodes)
        seen = (rows <= rows[:, None]) & (rows[:, None] < plan.subtree_end)
        if fault == "own value only":
            seen = torch.eye(plan.num_nodes, dtype=torch.bool)
        elif fault == "one key too many":
            seen |= rows == rows[:, None] + 1
        else:
            seen[:] = True
        group = q.shape[1] // k.shape[1]
        panels = [
            x.transpose(0, 1).float()
            for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        ]
        out = torch.nn.functional.scaled_dot_product_attention(
            *panels, attn_mask=seen, scale=spec.softmax_scale
        )
        return out.transpose(0, 1).to(q.dtype)

    monkeypatch.setattr(TrieSdpa, "__call__", attend)
    with pytest.raises(radixmlp.UnsupportedModelError, match="differs from its own implementation"):
        radixmlp.enable(tiny("qwen3", dtype=dtype))


def test_dtypes() -> None:
    batch = RaggedBatch.from_sequences(SEQUENCES)
    for dtype in (torch.float64, torch.float16, torch.bfloat16):
        model = tiny("qwen3", dtype=dtype)
        logits = radixmlp.forward(model, batch, attention="trie-sdpa").logits
        assert logits is not None
        assert logits.dtype == dtype


def test_a_prebuilt_plan_is_used() -> None:
    model, batch = tiny("qwen3"), RaggedBatch.from_sequences(SEQUENCES)
    plan = radixmlp.build_plan(batch)
    assert radixmlp.forward(model, batch, plan=plan).plan is plan
    assert isinstance(plan, TriePlan)
