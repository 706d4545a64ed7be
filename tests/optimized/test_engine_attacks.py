"""What users get wrong, or mean badly: an answer is the plain model's for the request alone, or a clear refusal."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from radixmlp.optimized.cost import store
from radixmlp.optimized.engine import Engine, EngineConfig, RequestError
from radixmlp.optimized.jobs import command as jobs
from radixmlp.optimized.jobs.journal import Journal
from radixmlp.optimized.jobs.run import InputFile, run_job
from radixmlp.optimized.jobs.tasks import embed_task
from radixmlp.verify.families import small_model, strengthen
from radixmlp.verify.inspect.command import main as inspect
from radixmlp.verify.passages import load_passages

VOCABULARY = 480
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
RELAXED = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
PASSAGES = [passage[:160] for entry in load_passages() for passage in entry.passages[:3]]

# Texts that share beginnings, repeat each other, and hold what tokenizers treat in their own way.
WORDS = st.sampled_from(
    [
        "river",
        "River",
        " river",
        "bread ",
        "\n",
        "é",
        "日本",
        "🙂",
        "{text}",
        "<|im_end|>",
        "</s>",
        "<s>",
        "0",
        "\u200d",
    ]
)
TEXT = st.lists(WORDS, min_size=1, max_size=8).map("".join)
TEXTS = st.lists(TEXT, min_size=1, max_size=7)


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _train(
        made, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet)
    )
    return made


def sentence_pieces() -> Tokenizer:
    """One that lowercases, strips, and marks the beginnings of words."""
    made = Tokenizer(models.BPE(unk_token="</s>"))
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    _train(made, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=SPECIAL))
    return made


def _train(made: Tokenizer, trainer: Any) -> None:
    trainer.show_progress = False
    made.train_from_iterator([*PASSAGES, *["yes", "no", "river bread text: label:"] * 100], trainer)


def wrapped(made: Tokenizer, bos: bool = False, eos: bool = False, **options: Any) -> Any:
    made = Tokenizer.from_str(made.to_str())
    if bos or eos:
        one = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
        two = ["<s>"] * bos + ["$A", "</s>", "$B"] + ["</s>"] * eos
        ids = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
        made.post_processor = processors.TemplateProcessing(
            single=" ".join(one), pair=" ".join(two), special_tokens=ids
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **options)


@pytest.fixture(scope="module")
def bytes_like() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="module")
def model() -> Any:
    return _causal()


def _causal(**changes: Any) -> Any:
    return small_model("qwen3", **_sizes(**changes))


def _sizes(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "max_position_embeddings": 400, **changes}


def classifier() -> Any:
    torch.manual_seed(0)
    made = AutoModelForSequenceClassification.from_config(_causal(num_labels=1, pad_token_id=5).config)
    with torch.no_grad():
        strengthen(made)
    return made.eval()


@torch.no_grad()
def last_states(model: Any, rows: Sequence[Sequence[int]]) -> Tensor:
    """[n, hidden]: the last token's state of each row, computed alone."""
    return torch.stack(
        [model.base_model(input_ids=torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
    )


@torch.no_grad()
def logprob(model: Any, ids: list[int], start: int) -> float:
    """log p of ids[start:] after ids[:start]."""
    values = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(values[place - 1, ids[place]].item() for place in range(start, len(ids)))


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1.0)


# Answers against the plain model


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("eos", [False, True])
@RELAXED
@given(texts=TEXTS, budget=st.integers(64, 160))
def test_any_text_embeds_as_alone(
    model: Any, bytes_like: Tokenizer, bos: bool, eos: bool, texts: list[str], budget: int
) -> None:
    tokenizer = wrapped(bytes_like, bos, eos, padding_side="left", truncation_side="left")
    engine = Engine(model, tokenizer, EngineConfig(max_batch_tokens=budget))
    got = engine.embed(texts, normalize=False)
    assert_close(got, last_states(model, [tokenizer(text)["input_ids"] for text in texts]))
    assert engine.stats.requests == len(texts)
    assert sum(engine.stats.choices.values()) == engine.stats.batches
    assert not got.requires_grad


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
@RELAXED
@given(pairs=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=5))
def test_any_continuation_scores_as_alone(
    model: Any, make: Callable[[], Tokenizer], pairs: list[tuple[str, str]]
) -> None:
    tokenizer = wrapped(_made(make), bos=True)
    engine = Engine(model, tokenizer)
    for prompt, continuation in pairs:  # alone first: what is refused is refused for a reason we can see
        whole = tokenizer(prompt + continuation)["input_ids"]
        before = tokenizer(prompt.rstrip())["input_ids"]
        if whole[: len(before)] != before or len(whole) == len(before):
            with pytest.raises(RequestError, match="request 0"):
                engine.score([prompt], [continuation])
            continue
        scores = engine.score([prompt, "river"], [continuation, " bread"])
        assert scores.num_tokens[0] == len(whole) - len(before)
        assert scores.logprobs[0].item() == pytest.approx(logprob(model, whole, len(before)), abs=1e-3)


_tokenizers: dict[Any, Tokenizer] = {}


def _made(make: Callable[[], Tokenizer]) -> Tokenizer:
    return _tokenizers.setdefault(make, make())


@RELAXED
@given(texts=st.lists(TEXT, min_size=2, max_size=8), data=st.data())
def test_any_order_and_repetition_gives_the_same_bits(
    model: Any, bytes_like: Tokenizer, texts: list[str], data: st.DataObject
) -> None:
    engine = Engine(model, wrapped(bytes_like), EngineConfig(max_batch_tokens=100, deterministic=True))
    order = data.draw(st.permutations(range(len(texts))))
    order = [*order, *data.draw(st.lists(st.sampled_from(order), max_size=4))]
    expected = engine.embed(texts)
    assert torch.equal(engine.embed([texts[index] for index in order]), expected[order])


@RELAXED
@given(text=TEXT, slack=st.integers(-1, 1))
def test_budgets_hold_to_the_row(model: Any, bytes_like: Tokenizer, text: str, slack: int) -> None:
    tokenizer = wrapped(bytes_like, bos=True)
    length = len(tokenizer(text)["input_ids"])
    engine = Engine(model, tokenizer, EngineConfig(max_batch_tokens=length + slack))
    if slack < 0:
        with pytest.raises(RequestError, match=f"has {length} tokens"):
            engine.embed([text])
    else:
        assert_close(
            engine.embed([text], normalize=False), last_states(model, [tokenizer(text)["input_ids"]])
        )


@pytest.mark.parametrize("ending", ["", "é"])
def test_documents_with_the_classifiers_pad_id(bytes_like: Tokenizer, ending: str) -> None:
    made, tokenizer = classifier(), wrapped(bytes_like)
    pad = tokenizer.decode([made.config.pad_token_id])
    documents = [f"{text} {pad}{ending}" for text in PASSAGES[:4]]
    rows = [tokenizer("river", document)["input_ids"] for document in documents]
    assert all(made.config.pad_token_id in row for row in rows)
    expected = made.score(last_states(made, rows))[:, 0].detach()
    assert_close(Engine(made, tokenizer).rerank("river", documents), expected)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mistral", "opt"])
def test_learned_positions_windows_and_softcaps(bytes_like: Tokenizer, family: str) -> None:
    made, tokenizer = small_model(family, vocab_size=VOCABULARY), wrapped(bytes_like)
    texts = [text[:90] for text in PASSAGES[:5]]
    got = Engine(made, tokenizer, EngineConfig(max_batch_tokens=150)).embed(texts, normalize=False)
    assert_close(got, last_states(made, [tokenizer(text)["input_ids"] for text in texts]))


@pytest.mark.parametrize("family", ["mamba", "bart", "bloom", "rwkv"])
def test_models_whose_rows_cannot_be_shared_are_refused(bytes_like: Tokenizer, family: str) -> None:
    with pytest.raises(ValueError, match="could not be given"):
        Engine(small_model(family), wrapped(bytes_like))


# Truncation and templates


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_tokenizers_truncation_side_does_not_matter(bytes_like: Tokenizer, side: str) -> None:
    made, document = classifier(), PASSAGES[0] + PASSAGES[1]
    tokenizer = wrapped(bytes_like, bos=True, truncation_side=side)
    full = wrapped(bytes_like, bos=True)("river", document)["input_ids"]
    expected = made.score(last_states(made, [full[:40]]))[:, 0].detach()
    engine = Engine(made, tokenizer, EngineConfig(max_length=40, truncate=True))
    assert_close(engine.rerank("river", [document]), expected)


@pytest.mark.parametrize(
    "template", ["{query} {document:.2}", "{query} {document!r}", "{query:>9} {document}"]
)
def test_templates_ignore_no_format_spec(model: Any, bytes_like: Tokenizer, template: str) -> None:
    with pytest.raises(ValueError, match=r"\{(query|document)"):
        Engine(model, wrapped(bytes_like)).rerank("river", ["bread"], template=template)


@pytest.mark.parametrize("prompt", ["river ", "river\n", "river  \n"])
def test_a_prompts_own_whitespace_is_no_continuation(model: Any, bytes_like: Tokenizer, prompt: str) -> None:
    with pytest.raises(RequestError, match="request 0 has an empty continuation"):
        Engine(model, wrapped(bytes_like)).score([prompt], [""])


@pytest.mark.parametrize("labels", [(True, False), (1.0, 2.0), (None, "no")])
def test_labels_that_are_neither_text_nor_ids(model: Any, bytes_like: Tokenizer, labels: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="label"):
        Engine(model, wrapped(bytes_like)).rerank("river", ["bread"], labels=labels)


@pytest.mark.parametrize("texts", [["river .", "rive"], ["rive", "river ."]])
def test_labels_are_checked_on_every_text(model: Any, bytes_like: Tokenizer, texts: list[str]) -> None:
    tokenizer = wrapped(bytes_like)
    assert tokenizer("river")["input_ids"][:-1] != tokenizer("rive")["input_ids"]
    with pytest.raises(ValueError, match=r"label|template"):
        Engine(model, tokenizer).classify(texts, ["r", "n"], template="{text}", separator="")


def test_a_bos_that_is_the_unknown_token_too_still_leads(model: Any) -> None:
    made = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "river": 2, "yes": 3}, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = wrapped(made, bos=True)
    got = Engine(model, tokenizer).score(["river"], [" yes"]).logprobs
    assert got.item() == pytest.approx(logprob(model, [0, 2, 3], 2), abs=1e-3)


# One engine in use


def test_two_threads_and_a_model_in_training_mode(bytes_like: Tokenizer) -> None:
    """The call that ends first must not put dropout back under the one that runs."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.5)
    made = small_model("gpt2", vocab_size=VOCABULARY, **dropout)
    texts = [text[:60] for text in PASSAGES]
    engine = Engine(made, wrapped(bytes_like), EngineConfig(max_batch_tokens=120))
    expected = engine.embed(texts)
    made.train()
    found: list[Tensor] = []

    def work(times: int) -> None:
        for _ in range(times):
            found.append(engine.embed(texts))

    threads = [threading.Thread(target=work, args=(times,)) for times in (4, 6, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 15
    for values in found:
        assert_close(values, expected)
    assert all(module.training for module in made.modules())


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), StopIteration()])
def test_a_call_that_ends_early_spoils_nothing(
    model: Any, bytes_like: Tokenizer, error: BaseException
) -> None:
    engine = Engine(model, wrapped(bytes_like), EngineConfig(max_batch_tokens=200))
    expected = engine.embed(PASSAGES)
    engine.stats.reset()
    before = threading.active_count()

    def fail(*_: Any) -> None:
        raise error

    with pytest.raises(type(error)):
        engine.embed(PASSAGES, on_batch=fail)
    assert threading.active_count() == before
    assert torch.is_grad_enabled()
    assert torch.equal(engine.embed(PASSAGES), expected)
    assert engine.stats.gamma <= 1.0  # rows of a call that failed come with its tokens, or not at all


def test_stats_can_be_copied(model: Any, bytes_like: Tokenizer) -> None:
    engine = Engine(model, wrapped(bytes_like))
    engine.embed(PASSAGES[:2])
    assert copy.deepcopy(engine.stats) == engine.stats


# The commands


@pytest.fixture
def checkpoint(tmp_path: Path, model: Any, bytes_like: Tokenizer) -> Path:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    wrapped(bytes_like).save_pretrained(folder)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(PASSAGES)))
    return path


def arguments(source: Path, checkpoint: Path | str, out: Path, *more: str) -> list[str]:
    return [str(source), "--model", str(checkpoint), "--out", str(out), *more]


@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_the_input_is_never_replaced(checkpoint: Path, source: Path, more: list[str]) -> None:
    before = source.read_bytes()
    assert jobs.embed(arguments(source, checkpoint, source, *more)) == 2
    assert source.read_bytes() == before


@pytest.mark.parametrize("more", [[], ["--restart"]])
def test_a_running_job_is_left_alone(
    checkpoint: Path, source: Path, tmp_path: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    running = Journal(tmp_path / "out.jsonl.job", {"job": "running"})
    try:
        assert jobs.embed(arguments(source, checkpoint, tmp_path / "out.jsonl", *more)) == 2
        assert "in use" in capsys.readouterr().err
        assert running.path.exists()
        assert not (tmp_path / "out.jsonl").exists()
    finally:
        running.close()


@pytest.mark.parametrize(
    "wrong", [["--dtype", "float17"], ["--attention", "trie-flash"], ["--device", "foo"]]
)
def test_a_slip_can_be_put_right(
    checkpoint: Path, source: Path, tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert jobs.embed(arguments(source, checkpoint, out, *wrong)) == 2
    assert wrong[1] in capsys.readouterr().err
    assert jobs.embed(arguments(source, checkpoint, out)) == 0
    assert len(out.read_text().splitlines()) == len(PASSAGES)


@pytest.mark.parametrize("changed", ["tokenizer", "last weights"])
def test_an_interrupted_run_goes_on_with_the_same_checkpoint_only(
    checkpoint: Path,
    source: Path,
    tmp_path: Path,
    model: Any,
    bytes_like: Tokenizer,
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = arguments(source, checkpoint, tmp_path / "out.jsonl", "--max-batch-tokens", "200")
    keep = Journal.add

    def once(journal: Journal, results: Any) -> None:
        keep(journal, results)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "add", once)
        assert jobs.embed(given) == 130
    if changed == "tokenizer":
        wrapped(bytes_like, bos=True).save_pretrained(checkpoint)
    else:
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.model.layers[0].mlp.up_proj.weight[-1].add_(1.0)
        other.save_pretrained(checkpoint)
    assert jobs.embed(given) == 2  # results of two checkpoints must not stand in one file
    assert "--restart" in capsys.readouterr().err


@RELAXED
@given(
    ids=st.lists(
        st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT, max_size=5
    )
)
def test_ids_come_back_as_they_were(
    model: Any, bytes_like: Tokenizer, tmp_path_factory: pytest.TempPathFactory, ids: list[Any]
) -> None:
    folder = tmp_path_factory.mktemp("ids")
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    lines = [json.dumps({"id": id, "text": f"river {i}"}) for i, id in enumerate(ids)]
    source.write_text("".join(line + "\n\n" for line in lines), encoding="utf-8")
    engine = Engine(model, wrapped(bytes_like))
    journal = Journal(folder / "job", {})
    run_job(embed_task(), lambda: engine, InputFile.read(source), out, journal)
    journal.close()
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["id"] for row in rows] == ids
    assert [row["line"] for row in rows] == [2 * i + 1 for i in range(len(ids))]


# Inspect


@RELAXED
@given(texts=TEXTS, lines=st.lists(st.binary(max_size=20), max_size=3))
def test_inspect_survives_any_file(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], lines: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("inspect")
    hostile = [*texts, "</script><script>alert(1)</script>", "<img src=x>", "[bold red]", "\x1b[2J"]
    good = [json.dumps({"text": text}).encode() for text in hostile]
    source, page, numbers = folder / "in.jsonl", folder / "page.html", folder / "numbers.json"
    source.write_bytes(b"\n".join([*good, *lines]) + b"\n")
    given = [str(source), "--tokenizer", "bytes", "--html", str(page), "--json", str(numbers)]
    assert inspect(given) == 0
    html = page.read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "<img" not in html
    found = json.loads(numbers.read_text(encoding="utf-8"))
    sequences = [text.encode() for text in hostile]
    prefixes = {text[:end] for text in sequences for end in range(1, len(text) + 1)}
    assert found["template"]["all_in_one_batch"]["tokens"] == sum(map(len, sequences))
    assert found["template"]["all_in_one_batch"]["rows"] == len(prefixes)


# Calibrations on disk


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"key": {}}',
        b"[" * 100_000,
        b'{"attention": {"parts": [NaN]}}',
    ],
)
def test_a_broken_calibration_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = store.path_of({"device": "here"})
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert store.load({"device": "here"}) is None
