"""What is cut, what is refused and named, and what the templates leave whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixmlp.optimized.engine import QWEN3_RERANKER, Engine, EngineConfig, RequestError, Template
from radixmlp.optimized.engine.encoders import Encoder, Entry, PairEncoder, TemplateEncoder, TextEncoder
from radixmlp.optimized.engine.limits import Limit
from radixmlp.optimized.engine.tokens import Tokens
from radixmlp.optimized.errors import UnsupportedAttentionError, UnsupportedModelError

LONG = "The river bent around the town and the bread was warm. " * 40


class SlowTokenizer:
    """One token a character, without offsets, as a slow tokenizer has none."""

    is_fast = False

    def __call__(
        self, texts: list[str], seconds: list[str] | None = None, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, Any]:
        trail = [1] if add_special_tokens else []
        return {"input_ids": [[ord(letter) % 400 + 2 for letter in text] + trail for text in texts]}


@pytest.fixture
def nothing_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something ran before the error")

    monkeypatch.setattr("radixmlp.optimized.engine.rows.run_decoder", refuse)
    monkeypatch.setattr("radixmlp.optimized.engine.rows.forward", refuse)


def engine(model: Any, tokenizer: Any, **settings: Any) -> Engine:
    return Engine(model, tokenizer, EngineConfig(**settings))


def entries(encoder: Encoder) -> list[Entry]:
    return encoder(range(len(encoder.parts)))


def limit(tokens: int, truncate: bool = True) -> Limit:
    return Limit(tokens, "max_length", "raise max_length, shorten it", truncate)


@pytest.mark.parametrize("count", [30, 31, 200])
def test_embedding_cuts_the_end_and_keeps_special_tokens(
    make_tokenizer: Callable[..., Any], count: int
) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    encoder = TextEncoder(Tokens(tokenizer), "Query: ", ["short", LONG], [0, 1], limit(count))
    short, long = (entry.tokens for entry in entries(encoder))
    assert short == tokenizer("Query: short")["input_ids"]
    whole = tokenizer("Query: " + LONG)["input_ids"]
    assert long == [*whole[: count - 1], 1]


@pytest.mark.parametrize("count", [60, 61, 150])
def test_reranking_cuts_the_document_alone(tokenizer: Any, count: int) -> None:
    """As the model card does: the body loses its end, what is around it is whole."""
    form = QWEN3_RERANKER
    around = len(tokenizer.encode(form.prefix)) + len(tokenizer.encode(form.suffix))
    parts = [("<Query>: what bends\n<Document>: ", document, "") for document in ("the river", LONG)]
    encoder = TemplateEncoder(Tokens(tokenizer), form, parts, [0, 1], limit(around + count))
    short, long = (entry.tokens for entry in entries(encoder))
    prefix, suffix = (tokenizer.encode(part) for part in (form.prefix, form.suffix))
    assert short == prefix + tokenizer.encode("<Query>: what bends\n<Document>: the river") + suffix
    assert long == prefix + tokenizer.encode("<Query>: what bends\n<Document>: " + LONG)[:count] + suffix
    assert len(long) == around + count


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("count", [25, 26, 27, 80])
def test_a_document_in_the_middle_is_cut_where_it_stands(tokenizer: Any, slow: bool, count: int) -> None:
    given = SlowTokenizer() if slow else tokenizer
    tokens = Tokens(given)
    form = Template("<|im_start|>{document}\n: {query}<|im_end|>")
    parts = [("<|im_start|>", LONG, "\n: bend?<|im_end|>")]
    around = len(tokens.encode(["<|im_start|>\n: bend?<|im_end|>"])[0])
    (entry,) = entries(TemplateEncoder(tokens, form, parts, [0], limit(around + count)))
    assert len(entry.tokens) <= around + count
    assert len(entry.tokens) > around + count - 4
    kept = next(
        end for end in range(len(LONG), 0, -1)
        if tokens.encode(["<|im_start|>" + LONG[:end] + "\n: bend?<|im_end|>"])[0] == entry.tokens
    )  # fmt: skip
    assert kept > 20


def test_pairs_cut_the_document_and_never_the_query(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)
    pairs = [("which river", "the long one"), ("which river", LONG)]
    encoder = PairEncoder(Tokens(tokenizer), pairs, [0, 1], limit(40))
    short, long = (entry.tokens for entry in entries(encoder))
    assert short == tokenizer(*pairs[0])["input_ids"]
    whole = tokenizer(*pairs[1])["input_ids"]
    assert long == [*whole[:39], 1]
    assert encoder.around == 3


def test_scores_cut_the_prompts_beginning(model: Any, tokenizer: Any) -> None:
    ran = engine(model, tokenizer, max_length=50, truncate=True)
    found = ran.score([LONG, LONG[:40]], [" river bread", " river bread"])
    whole = tokenizer.encode(LONG.rstrip() + "  river bread")[-51:]
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([whole[:-1]])).logits[0].float().log_softmax(-1)
    count = int(found.num_tokens[0])
    truth = sum(float(logprobs[i - 1, whole[i]]) for i in range(51 - count, 51))
    torch.testing.assert_close(found.logprobs[0], torch.tensor(truth), rtol=1e-4, atol=1e-5)


def test_classification_cuts_the_text_and_keeps_the_question(model: Any, tokenizer: Any) -> None:
    labels = ["river", "bread and river"]
    cut = engine(model, tokenizer, max_length=60, truncate=True).classify([LONG], labels)
    room = 61 - max(len(tokenizer.encode(" " + label)) for label in labels)
    lengths = {end: len(tokenizer.encode(f"Text: {LONG[:end]}\nLabel:")) for end in range(300)}
    texts = [LONG[:end] for end, length in lengths.items() if room - 2 <= length <= room]
    by_hand = engine(model, tokenizer).classify(texts, labels)
    assert float((by_hand.logprobs - cut.logprobs).abs().amax(1).min()) < 1e-3, (
        "the question stands behind the cut"
    )


@pytest.mark.usefixtures("nothing_may_run")
@pytest.mark.parametrize(
    ("settings", "source"),
    [
        ({}, "the model's max_position_embeddings = 400"),
        ({"max_batch_tokens": 100}, r"max_batch_tokens = 100: raise max_batch_tokens, shorten it"),
        ({"max_length": 90}, r"max_length = 90: raise max_length, shorten it"),
    ],
)
def test_too_long_is_named_before_anything_runs(
    model: Any, tokenizer: Any, settings: dict[str, int], source: str
) -> None:
    ran = engine(model, tokenizer, **settings)
    requests = [f"text {i}" for i in range(1000)]
    requests[1], requests[700] = requests[0], "z " + LONG  # the last in the order they are taken in
    length = len(tokenizer.encode("z " + LONG))
    with pytest.raises(
        RequestError, match=rf"request 700 has {length} tokens, more than {source}.*truncate=True"
    ) as e:
        ran.embed(requests)
    assert e.value.index == 700
    with pytest.raises(RequestError, match=r"request 700 has \d+ tokens, more than"):
        ran.rerank("q", requests, template="{query}:{document}")
    with pytest.raises(RequestError, match=r"request 700 has \d+ tokens, more than"):
        ran.classify(requests, ["yes", "no"])
    with pytest.raises(RequestError, match=r"request 700 has \d+ tokens, more than"):
        ran.score(requests, [" river"] * 1000)


@pytest.mark.parametrize("call", ["rerank", "pairs", "embed", "classify", "score"])
def test_what_cannot_be_cut_enough_is_named(
    model: Any, make_model: Callable[..., Any], tokenizer: Any, call: str
) -> None:
    settings = EngineConfig(max_length=30, truncate=True)
    ran = Engine(make_model("classifier", num_labels=1) if call == "pairs" else model, tokenizer, settings)
    calls: dict[str, Callable[[], Any]] = {
        "rerank": lambda: ran.rerank_pairs(["a", LONG], ["b", LONG], template="{query}:{document}"),
        "pairs": lambda: ran.rerank_pairs(["a", LONG], ["b", LONG]),
        "embed": lambda: ran.embed(["short", LONG], prompt=LONG),
        "classify": lambda: ran.classify(["short", LONG], ["yes", "no"], instruction=LONG),
        "score": lambda: ran.score(["a", "a"], [" b", " " + LONG]),
    }
    with pytest.raises(
        RequestError, match=r"request \d cannot be cut to max_length = 30 tokens: the \w+.* alone"
    ):
        calls[call]()


def test_a_cut_request_equals_one_cut_by_hand(model: Any, make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer(eos=True)
    ids = tokenizer(LONG)["input_ids"]
    found = engine(model, tokenizer, max_length=77, truncate=True).embed([LONG], normalize=False)
    with torch.no_grad():
        alone = model.model(input_ids=torch.tensor([[*ids[:76], 1]])).last_hidden_state[0, -1]
    torch.testing.assert_close(found[0], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("over", [0, 1])
@pytest.mark.parametrize("call", ["embed", "rerank", "pairs", "classify", "score"])
def test_the_limit_itself_is_allowed(
    model: Any, make_model: Callable[..., Any], make_tokenizer: Callable[..., Any], call: str, over: int
) -> None:
    tokenizer = make_tokenizer(bos=True, eos=True)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    text = LONG[:200].rstrip()
    lengths = {
        "embed": count(text) + 2,
        "rerank": 1 + count(f"q:{text}"),
        "pairs": len(tokenizer("q", text)["input_ids"]),
        "classify": 1 + count(f"Text: {text}\nLabel:") + count(" river bread") - 1,
        "score": 1 + count(text + " river bread") - 1,
    }
    given = make_model("classifier", num_labels=1) if call == "pairs" else model
    ran = Engine(given, tokenizer, EngineConfig(max_length=lengths[call] - over))
    calls: dict[str, Callable[[], Any]] = {
        "embed": lambda: ran.embed([text]),
        "rerank": lambda: ran.rerank("q", [text], template="{query}:{document}"),
        "pairs": lambda: ran.rerank("q", [text]),
        "classify": lambda: ran.classify([text], ["yes", "river bread"]),
        "score": lambda: ran.score([text], [" river bread"]),
    }
    if over:
        with pytest.raises(RequestError, match=f"request 0 has {lengths[call]} tokens, more than max_length"):
            calls[call]()
    else:
        calls[call]()


@pytest.mark.usefixtures("nothing_may_run")
def test_empty_requests_are_named(model: Any, tokenizer: Any) -> None:
    ran = engine(model, tokenizer)
    with pytest.raises(RequestError, match=r"request 2 has no tokens: leave it out, or give it some text"):
        ran.embed(["a", "a", "", ""])
    with pytest.raises(RequestError, match=r"request 1 has an empty continuation"):
        ran.score(["a", "b"], [" c", ""])
    with pytest.raises(RequestError, match=r"request 1 has an empty prompt"):
        ran.score(["a", ""], [" c", " d"])


def test_special_tokens_make_an_empty_text_a_request(model: Any, make_tokenizer: Callable[..., Any]) -> None:
    found = engine(model, make_tokenizer(bos=True)).embed([""], normalize=False)
    with torch.no_grad():
        alone = model.model(input_ids=torch.tensor([[0]])).last_hidden_state[0, 0]
    torch.testing.assert_close(found[0], alone, rtol=1e-4, atol=1e-5)
    assert engine(model, make_tokenizer()).rerank("", ["", " "]).shape == (2,)


def test_no_strings_are_named(model: Any, tokenizer: Any) -> None:
    ran = engine(model, tokenizer)
    with pytest.raises(TypeError, match=r"texts\[1\] is a int: expected a string"):
        ran.embed(["a", 5])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"texts is a str: give a list of strings"):
        ran.embed("abc")
    with pytest.raises(TypeError, match=r"documents\[0\] is a NoneType"):
        ran.rerank("a", [None])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"query is a list"):
        ran.rerank(["a"], ["b"])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"prompt is a int"):
        ran.embed(["a"], prompt=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"1 prompts for 2 continuations: give one for each"):
        ran.score(["a"], [" b", " c"])
    with pytest.raises(TypeError, match=r"tokenizer is a NoneType"):
        Engine(model, None)


def test_text_that_is_no_unicode_is_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(RequestError, match=r"request 1 cannot be tokenised .*lone surrogates"):
        engine(model, tokenizer).embed(["fine", "broken \ud800"])
    with pytest.raises(RequestError, match=r"request 1 cannot be tokenised"):
        engine(model, tokenizer).score(["fine", "broken \ud800"], [" a", " b"])


def test_a_border_inside_a_token_is_named(model: Any, tokenizer: Any) -> None:
    assert len(tokenizer.encode("yes")) == 1
    with pytest.raises(RequestError, match=r"request 1 is tokenised across the end of its prompt \('ye'\)"):
        engine(model, tokenizer).score(["a", "ye"], [" b", "s"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["a", "b", "a"], r"labels\[2\] is 'a' again"),
        ([], "labels is empty"),
        (["a", " "], r"labels\[1\] is ' '"),
        (
            ["river", "river bank"],
            r"label 'river' has tokens that begin those of label 'river bank'.*rename one",
        ),
    ],
)
def test_labels_that_collide_are_named(model: Any, tokenizer: Any, labels: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(model, tokenizer).classify(["text"], labels)


def test_labels_with_equal_tokens_are_named(model: Any) -> None:
    class Lowering(SlowTokenizer):
        def __call__(self, texts: list[str], *rest: Any, **options: Any) -> dict[str, Any]:
            return super().__call__([text.lower() for text in texts], *rest, **options)

    with pytest.raises(ValueError, match=r"label 'River' has the same tokens as label 'river'"):
        engine(model, Lowering()).classify(["text"], ["River", "river"])


def test_labels_joined_to_the_prompt_are_named(model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"label 's' is tokenised together with the end of the prompt"):
        engine(model, tokenizer).classify(["text"], ["s"], template="{text} ye", separator="")
    with pytest.raises(ValueError, match=r"examples\[0\] has the label 'c': expected one of 'a', 'b'"):
        engine(model, tokenizer).classify(["text"], ["a", "b"], [("x", "c")])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("qwen4", "template is 'qwen4': expected one of qwen3-reranker, or a format string"),
        ("{query} only", r"template has \{document\} 0 times"),
        ("{query} {document} {document}", r"template has \{document\} 2 times"),
        ("{query} {document} {title}", r"template has the field \{title\}"),
        ("{query} {document", "is not a format string"),
    ],
)
def test_bad_templates_are_named(model: Any, tokenizer: Any, template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(model, tokenizer).rerank("q", ["d"], template=template)


def test_bad_answers_are_named(model: Any, tokenizer: Any) -> None:
    ran = engine(model, tokenizer)
    with pytest.raises(ValueError, match=r"label 'a long label' is \d+ tokens"):
        ran.rerank("q", ["d"], labels=("a long label", "no"))
    with pytest.raises(ValueError, match=r"both are token"):
        ran.rerank("q", ["d"], labels=("no", "no"))
    with pytest.raises(ValueError, match=r"label is 480, but the model has 480 tokens"):
        ran.rerank("q", ["d"], labels=(480, "no"))
    with pytest.raises(ValueError, match=r"expected two"):
        ran.rerank("q", ["d"], labels="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"instruction has no place"):
        ran.rerank("q", ["d"], "instruct", template="{query}{document}")
    with pytest.raises(ValueError, match=r"pooling is 'max'"):
        ran.embed(["a"], pooling="max")  # type: ignore[arg-type]


def test_models_that_cannot_answer_are_named(make_model: Callable[..., Any], tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="neither a language-model head nor a score of one label"):
        engine(make_model("base"), tokenizer).rerank("q", ["d"])
    with pytest.raises(UnsupportedModelError, match="neither a language-model head nor a score of one label"):
        engine(make_model("classifier", num_labels=3), tokenizer).rerank("q", ["d"])
    with pytest.raises(UnsupportedModelError, match="no language-model head to score with"):
        engine(make_model("base"), tokenizer).score(["a"], [" b"])
    with pytest.raises(UnsupportedModelError, match="no language-model head to classify with"):
        engine(make_model("base"), tokenizer).classify(["a"], ["b"])


def test_a_foreign_tokenizer_is_named(make_model: Callable[..., Any], tokenizer: Any) -> None:
    small = make_model(vocab_size=300)
    with pytest.raises(RequestError, match=r"has the token id \d+, but the model has 300 token embeddings"):
        engine(small, tokenizer).embed(["a", "the river and the bread were warm"])
    words = (tokenizer.decode([token]) for token in range(300, 480))
    word = next(text for text in words if text[0] == " " and len(tokenizer.encode(text)) == 1)
    with pytest.raises(RequestError, match=r"request 1 has the token id \d+, but the model has 300"):
        engine(small, tokenizer).score(["a", "a"], [" b", word])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_impl": "fast"}, "model_impl is 'fast'"),
        ({"radix_mlp_threshold": 1.5}, "radix_mlp_threshold is 1.5"),
        ({"radix_mlp_threshold": "0.9"}, "radix_mlp_threshold is '0.9'"),
        ({"max_batch_tokens": 0}, "max_batch_tokens is 0"),
        ({"max_batch_tokens": True}, "max_batch_tokens is True"),
        ({"max_length": -1}, "max_length is -1"),
        ({"truncate": 1}, "truncate is 1"),
        (
            {"model_impl": "dense", "attention": "trie-sdpa"},
            "attention is 'trie-sdpa', which runs on the trie's rows",
        ),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_unknown_attention_is_named() -> None:
    with pytest.raises(UnsupportedAttentionError, match="no attention backend is called 'magic'"):
        EngineConfig(attention="magic")
