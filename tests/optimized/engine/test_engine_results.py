"""What an engine answers equals the model run on each request alone, whatever the batching did."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModelForCausalLM

import radixmlp
from radixmlp.optimized.engine import QWEN3_RERANKER, Engine, EngineConfig, RequestError, Template
from radixmlp.verify.families import strengthen

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
IMPLEMENTATIONS = ["radix", "dense"]
BUDGETS = [400, 65536]


def engine(model: Any, tokenizer: Any, **settings: Any) -> Engine:
    return Engine(model, tokenizer, EngineConfig(**settings))


@torch.no_grad()
def hidden_alone(model: Any, ids: list[int]) -> Tensor:
    return model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]


@torch.no_grad()
def logprobs_alone(model: Any, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True)])
def test_embeddings_are_those_of_each_text_alone(
    model: Any,
    make_tokenizer: Callable[..., Any],
    texts: list[str],
    impl: str,
    budget: int,
    pooling: Any,
    bos: bool,
    eos: bool,
) -> None:
    tokenizer, prompt = (
        make_tokenizer(bos, eos),
        "Find what answers a question about nature or about the home.\n",
    )
    ran = engine(model, tokenizer, model_impl=impl, max_batch_tokens=budget)
    found = ran.embed(texts, prompt, pooling, normalize=False)
    assert found.dtype == torch.float32
    for text, ours in zip(texts, found, strict=True):
        ids = tokenizer(prompt + text)["input_ids"]
        assert (ids[0] == 0, ids[-1] == 1) == (bos, eos)
        alone = hidden_alone(model, ids)
        torch.testing.assert_close(ours, alone[-1] if pooling == "last" else alone.mean(0), **CLOSE)
    torch.testing.assert_close(ran.embed(texts, prompt, pooling), normalize(found, dim=-1))
    assert (ran.stats.batches > 2) == (budget == 400)
    assert (ran.stats.gamma < 0.9) == (impl == "radix")


@pytest.mark.parametrize("kind", ["base", "classifier", "token classifier"])
def test_embeddings_of_models_without_a_language_model_head(
    make_model: Callable[..., Any], tokenizer: Any, texts: list[str], kind: str
) -> None:
    model = make_model(kind, num_labels=3)
    found = engine(model, tokenizer, max_batch_tokens=500).embed(texts, "One line of a long prompt: ")
    for text, ours in zip(texts, found, strict=True):
        ids = tokenizer("One line of a long prompt: " + text)["input_ids"]
        torch.testing.assert_close(ours, normalize(hidden_alone(model, ids)[-1], dim=-1), **CLOSE)


def as_the_model_card_does(model: Any, tokenizer: Any, query: str, document: str, instruction: str) -> float:
    """Qwen3-Reranker's own recipe: three parts tokenised apart, two logits of the last token."""
    form = QWEN3_RERANKER
    body = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ids = [
        token
        for part in (form.prefix, body, form.suffix)
        for token in tokenizer.encode(part, add_special_tokens=False)
    ]
    no, yes = (tokenizer.convert_tokens_to_ids(label) for label in ("no", "yes"))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
    return float(torch.stack([logits[no], logits[yes]]).log_softmax(0)[1].exp())


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("instruction", [None, "Rank { these } by taste"])
def test_yes_no_rerankers(
    model: Any, tokenizer: Any, texts: list[str], impl: str, budget: int, instruction: str | None
) -> None:
    queries = [f"what {{do}} {name} eat?" for name in ("bees", "whales")]
    pairs = [(query, text[:60]) for query in queries for text in texts]
    random.Random(0).shuffle(pairs)
    ran = engine(model, tokenizer, model_impl=impl, max_batch_tokens=budget)
    found = ran.rerank_pairs(*map(list, zip(*pairs, strict=True)), instruction)
    wanted = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    truth = [as_the_model_card_does(model, tokenizer, *pair, wanted) for pair in pairs]
    torch.testing.assert_close(found, torch.tensor(truth), **CLOSE)
    assert found.std() > 1e-3, "the scores tell documents apart"
    one = ran.rerank(queries[0], [document for query, document in pairs if query == queries[0]], instruction)
    torch.testing.assert_close(one, found[[query == queries[0] for query, _ in pairs]], **CLOSE)


def test_any_template_and_tokens(model: Any, make_tokenizer: Callable[..., Any], texts: list[str]) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    form = "<|im_start|>{document}\n{{}} {query}?<|im_end|>"
    documents = [text[:80] for text in texts]
    yes, no = tokenizer.convert_tokens_to_ids(["e", "a"])
    found = engine(model, tokenizer).rerank("which", documents, template=form, labels=("e", no))
    for document, ours in zip(documents, found, strict=True):
        text = f"<|im_start|>{document}\n{{}} which?<|im_end|>"
        ids = [0, *tokenizer.encode(text, add_special_tokens=False)]  # its BOS, and no EOS behind the prompt
        pair = logprobs_alone(model, ids)[-1][[yes, no]]
        torch.testing.assert_close(ours, pair.softmax(0)[0], **CLOSE)


def test_probabilities_tell_apart_what_bf16_logits_do_not(
    make_model: Callable[..., Any], tokenizer: Any, texts: list[str]
) -> None:
    model = make_model(dtype=torch.bfloat16)
    found = engine(model, tokenizer).rerank("bees", [text[:60] for text in texts])
    assert len(set(found.tolist())) == len(texts)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("template", [None, "{query} : {document} ."])
def test_classifiers_give_their_score(
    make_model: Callable[..., Any],
    make_tokenizer: Callable[..., Any],
    texts: list[str],
    impl: str,
    template: str | None,
) -> None:
    model, tokenizer = make_model("classifier", num_labels=1, pad_token_id=1), make_tokenizer(bos=True)
    query = "what is told here, and to whom?"
    ran = engine(model, tokenizer, model_impl=impl, max_batch_tokens=600)
    found = ran.rerank(query, texts, template=template)
    for text, ours in zip(texts, found, strict=True):
        if template is None:
            ids = tokenizer(query, text)["input_ids"]
        else:
            ids = [0, *tokenizer.encode(f"{query} : {text} .", add_special_tokens=False)]
        with torch.no_grad():
            torch.testing.assert_close(ours, model.score(hidden_alone(model, ids))[-1, 0], **CLOSE)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_labels_of_several_tokens(model: Any, tokenizer: Any, texts: list[str], impl: str) -> None:
    labels = ["river", "bread", "the river bank", "the river bend"]
    examples = [("The ferry is late.", "river"), ("Knead it twice.", "bread")]
    shots = "Sort.\n\nText: The ferry is late.\nLabel: river\n\nText: Knead it twice.\nLabel: bread\n\n"
    ran = engine(model, tokenizer, model_impl=impl, max_batch_tokens=700)
    found = ran.classify([text[:50] for text in texts], labels, examples, instruction="Sort.")
    counts = [len(tokenizer.encode(" " + label)) for label in labels]
    assert len(set(counts)) > 1, "labels of different lengths"
    for text, chosen, row in zip(texts, found.labels, found.logprobs, strict=True):
        prompt = f"{shots}Text: {text[:50]}\nLabel:"
        truth = torch.tensor([continuation_alone(model, tokenizer, prompt, " " + label) for label in labels])
        torch.testing.assert_close(row, truth, **CLOSE)
        assert chosen == labels[int(truth.argmax())]


def continuation_alone(
    model: Any, tokenizer: Any, prompt: str, continuation: str, lead: Sequence[int] = ()
) -> float:
    """The sum of next-token log-probabilities, each read off the model alone."""
    before = list(lead) + tokenizer.encode(prompt, add_special_tokens=False)
    whole = list(lead) + tokenizer.encode(prompt + continuation, add_special_tokens=False)
    assert whole[: len(before)] == before
    logprobs = logprobs_alone(model, whole)
    return sum(float(logprobs[i - 1, whole[i]]) for i in range(len(before), len(whole)))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("bos", [False, True])
def test_scores_of_continuations(
    model: Any, make_tokenizer: Callable[..., Any], texts: list[str], impl: str, bos: bool
) -> None:
    tokenizer = make_tokenizer(bos=bos)
    prompts = [text[:50].rsplit(" ", 1)[0] for text in texts for _ in range(2)]
    continuations = [" " + word for text in texts for word in (text[50:120], "river")]
    ran = engine(model, tokenizer, model_impl=impl, max_batch_tokens=300)
    found = ran.score(prompts, continuations)
    truth = [
        continuation_alone(model, tokenizer, prompt, continuation, [0] * bos)
        for prompt, continuation in zip(prompts, continuations, strict=True)
    ]
    torch.testing.assert_close(found.logprobs, torch.tensor(truth), **CLOSE)
    lengths = [len(tokenizer.encode(c, add_special_tokens=False)) for c in continuations]
    assert found.num_tokens.tolist() == lengths
    assert found.num_tokens.dtype == torch.int64


def test_whitespace_at_a_prompts_end_belongs_to_the_continuation(model: Any, tokenizer: Any) -> None:
    ran = engine(model, tokenizer)
    moved = ran.score(["Text: bread \n", "Text:"], ["river", " bread \nriver"])
    apart = ran.score(["Text: bread", "Text:"], [" \nriver", " bread \nriver"])
    assert torch.equal(moved.num_tokens, apart.num_tokens)
    torch.testing.assert_close(moved.logprobs, apart.logprobs)


@pytest.mark.parametrize("family", ["gemma2", "cohere2", "granite", "opt"])
def test_heads_that_are_more_than_a_matrix(family: str, tokenizer: Any, texts: list[str]) -> None:
    """Soft-capped, scaled, or read from another width: as the model itself applies them."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 480, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 400,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1, "final_logit_softcapping": 2.0,
        "logit_scale": 0.3, "logits_scaling": 3.0, "word_embed_proj_dim": 16, "ffn_dim": 48,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()
    with torch.no_grad():
        strengthen(model, 2.0)
    ran = engine(model, tokenizer, max_batch_tokens=500)
    texts = [text[:40].rstrip() for text in texts[:8]]
    found = ran.rerank("bees", texts, template="A question: {query}\nA document: {document}\nYes or no?")
    for text, ours in zip(texts, found, strict=True):
        ids = tokenizer.encode(f"A question: bees\nA document: {text}\nYes or no?")
        yes_no = logprobs_alone(model, ids)[-1][tokenizer.convert_tokens_to_ids(["yes", "no"])]
        torch.testing.assert_close(ours, yes_no.softmax(0)[0], **CLOSE)
    prompts = [f"Text: {text}" for text in texts]
    scores = ran.score(prompts, [" river bread"] * len(texts)).logprobs
    truth = [continuation_alone(model, tokenizer, prompt, " river bread") for prompt in prompts]
    torch.testing.assert_close(scores, torch.tensor(truth), **CLOSE)


def test_results_stand_in_the_order_of_the_requests(model: Any, tokenizer: Any, texts: list[str]) -> None:
    many = [prefix + text[:80] for prefix in ("a ", "b, as is known, ", "") for text in texts] * 2
    random.Random(1).shuffle(many)
    ran = engine(model, tokenizer, max_batch_tokens=300)
    truth = {text: ran.embed([text])[0] for text in set(many)}
    ran.stats.reset()
    found = ran.embed(many)
    torch.testing.assert_close(found, torch.stack([truth[text] for text in many]), **CLOSE)
    assert ran.stats.requests == len(many)
    assert ran.stats.tokens == sum(len(tokenizer.encode(text)) for text in many)
    assert ran.stats.rows <= 300 * ran.stats.batches


def test_repeated_requests_are_computed_once(model: Any, tokenizer: Any, texts: list[str]) -> None:
    once, often = (engine(model, tokenizer) for _ in range(2))
    found = often.embed([texts[0], texts[1]] * 50)
    torch.testing.assert_close(found[:2], once.embed(texts[:2]))
    assert torch.equal(found, found[:2].repeat(50, 1))
    assert often.stats.rows == once.stats.rows
    assert (often.stats.requests, often.stats.tokens) == (100, 50 * once.stats.tokens)


def test_nothing_in_nothing_out(model: Any, make_model: Callable[..., Any], tokenizer: Any) -> None:
    ran = engine(model, tokenizer)
    assert ran.embed([]).shape == (0, 32)
    assert ran.embed([], pooling="mean").shape == (0, 32)
    assert ran.rerank("query", []).shape == (0,)
    assert ran.rerank_pairs([], []).shape == (0,)
    assert ran.classify([], ["a", "b"]).logprobs.shape == (0, 2)
    assert ran.classify([], ["a", "b"]).labels == []
    scores = ran.score([], [])
    assert scores.logprobs.shape == scores.num_tokens.shape == (0,)
    classifier = make_model("classifier", num_labels=1)
    assert engine(classifier, tokenizer).rerank("query", []).shape == (0,)
    assert ran.stats.batches == 0
    assert ran.stats.gamma == 1.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_results_that_are_not_finite_are_named(
    make_model: Callable[..., Any], tokenizer: Any, texts: list[str], value: float
) -> None:
    model = make_model()
    (poison,) = tokenizer.encode("~")
    assert not any("~" in text for text in texts)
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = value
    requests = [*texts[:4], "the ~ is bad", *texts[4:], "the ~ is bad"]
    ran = engine(model, tokenizer, max_batch_tokens=300)
    named = rf"request 4 has a result that is not finite \(so have requests 4, {len(requests) - 1}"
    with pytest.raises(RequestError, match=named) as raised:
        ran.embed(requests)
    assert raised.value.index == 4
    with pytest.raises(RequestError, match="request 4 has a result that is not finite"):
        ran.score(requests, [" river"] * len(requests))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_deterministic_results_depend_on_the_set_of_requests_alone(
    make_model: Callable[..., Any], tokenizer: Any, texts: list[str], pooling: Any
) -> None:
    model = make_model(dtype=torch.bfloat16)
    ran = engine(model, tokenizer, max_batch_tokens=500, deterministic=True)
    found = ran.embed(texts, "The same prompt for all. ", pooling)
    order = [*range(len(texts)), 3, 3, 5]
    random.Random(2).shuffle(order)
    again = engine(model, tokenizer, max_batch_tokens=500, deterministic=True).embed(
        [texts[i] for i in order], "The same prompt for all. ", pooling
    )
    assert torch.equal(again, found[order])
    assert not torch.are_deterministic_algorithms_enabled()


def test_enabled_and_training_models_are_left_as_they_were(
    make_model: Callable[..., Any], tokenizer: Any, texts: list[str]
) -> None:
    model = make_model(attention_dropout=0.5)
    expected = engine(model, tokenizer).embed(texts)
    radixmlp.enable(model)
    model.train()
    torch.testing.assert_close(engine(model, tokenizer).embed(texts), expected, **CLOSE)
    assert model.training
    assert hasattr(model, "radixmlp_stats")
    assert not engine(model, tokenizer).embed(texts).requires_grad


def test_templates_may_be_objects(model: Any, tokenizer: Any, texts: list[str]) -> None:
    documents = [text[:60] for text in texts]
    form = Template("{instruction}. {query}: {document}", suffix="\nText:", instruction="Judge")
    ran = engine(model, tokenizer)
    given = ran.rerank("bees", documents, template=form)
    other = ran.rerank("bees", documents, "Judge", template=form)
    assert torch.equal(given, other)
    assert not torch.allclose(given, ran.rerank("bees", documents, "Do not judge", template=form))
