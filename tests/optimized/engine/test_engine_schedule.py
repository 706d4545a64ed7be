"""Batches are made ahead of the model, by a thread that never outlives its call; work is linear in the tokens."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import radixmlp
from radixmlp.optimized.attention import schedule
from radixmlp.optimized.cost import Choice
from radixmlp.optimized.engine import Engine, EngineConfig, RequestError, SlowIndexWarning, calls, windows
from radixmlp.optimized.engine import rows as engine_rows
from radixmlp.optimized.engine.ahead import ahead
from radixmlp.optimized.engine.encoders import Entry
from radixmlp.optimized.engine.limits import Limit
from radixmlp.optimized.engine.stats import Clock, EngineStats, overlap
from radixmlp.optimized.engine.windows import Prepared, prepare
from radixmlp.reference import RaggedBatch


class Bytes:
    """Encodes a text as its bytes, and repeats nothing."""

    around = 0
    limit = Limit(1 << 40, "nothing", "", truncate=False)

    def __init__(self, texts: list[str]) -> None:
        self.parts = [(text,) for text in texts]
        self.first = range(len(texts))

    def __call__(self, numbers: Any) -> list[Entry]:
        return [Entry(number, list(self.parts[number][0].encode())) for number in numbers]


def no_thread_left() -> bool:
    return not any(thread.name == "radixmlp-ahead" for thread in threading.enumerate())


@settings(deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=9), max_size=60), st.integers(9, 60), st.booleans())
def test_every_request_is_prepared_once(texts: list[str], budget: int, dense: bool) -> None:
    batches = list(prepare(Bytes(texts), budget, dense, Clock()))
    assert sorted(entry.request for one in batches for entry in one.entries) == list(range(len(texts)))
    for one in batches:
        assert one.batch.sequences() == [entry.tokens for entry in one.entries]
        assert (one.plan is None) == dense
        assert (one.batch.num_tokens if one.plan is None else one.plan.num_nodes) <= budget


PILES: dict[str, Callable[[int], list[str]]] = {
    "all different": lambda n: [f"{i * 7919 % 100_003:06d}" for i in range(n)],
    "all equal": lambda n: ["a request"] * n,
    "one long prefix": lambda n: ["p" * 100 + f"{i:05d}" for i in range(n)],
    "each the beginning of the next": lambda n: ["a" * i for i in range(1, int((4 * n) ** 0.5))],
}


@pytest.mark.parametrize("pile", PILES)
@pytest.mark.parametrize("budget", [1024, 65536])
@pytest.mark.parametrize("size", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_token_is_laid_out_more_than_a_few_times(
    pile: str, budget: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out = 0

    def counting(batch: RaggedBatch) -> Any:
        nonlocal laid_out
        laid_out += batch.num_tokens
        return radixmlp.build_plan(batch)

    monkeypatch.setattr(windows, "build_plan", counting)
    monkeypatch.setattr(windows, "_CHARACTERS_PER_TOKEN", 1)  # a byte is a token here
    texts = PILES[pile](size)
    batches = list(prepare(Bytes(texts), budget, False, Clock()))
    assert sum(len(one.entries) for one in batches) == len(texts)
    assert laid_out <= 4 * sum(map(len, texts))
    ordered = sorted(texts)
    unlimited = sum(len(b) - common(a, b) for a, b in zip(["", *ordered], ordered, strict=False))
    rows = sum(one.plan.num_nodes for one in batches if one.plan is not None)
    assert rows <= 1.05 * unlimited + len(batches) * max(map(len, texts))


def common(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


@pytest.mark.parametrize("equal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_hundred_thousand_requests(make_model: Callable[..., Any], tokenizer: Any, equal: bool) -> None:
    model = make_model(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1,
                       num_key_value_heads=1)  # fmt: skip
    texts = ["the river" if equal else f"river {i}" for i in range(100_000)]
    ran = Engine(model, tokenizer)
    found = ran.embed(texts)
    assert found.shape == (100_000, 8)
    assert torch.isfinite(found).all()
    for i in (0, 54_321, 99_999):
        torch.testing.assert_close(found[i], ran.embed([texts[i]])[0], rtol=1e-4, atol=1e-5)
    assert ran.stats.requests == 100_003
    assert ran.stats.gamma < (0.001 if equal else 0.5)


def test_batches_are_made_while_others_run(
    model: Any, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No run ends before the next batch is there; were it made afterwards, the run would wait in vain."""
    run, made, started = engine_rows.run_decoder, threading.Condition(), 0
    prepared, finished = 0, False

    def counting(*args: Any) -> Generator[Prepared, None, None]:
        nonlocal prepared, finished
        for one in prepare(*args):
            with made:
                prepared += 1
                made.notify()
            yield one
        with made:
            finished = True
            made.notify()

    def waiting_run(*args: Any) -> Any:
        nonlocal started
        started += 1
        with made:
            assert made.wait_for(lambda: finished or prepared > started, timeout=20)
        return run(*args)

    monkeypatch.setattr(calls, "prepare", counting)
    monkeypatch.setattr(engine_rows, "run_decoder", waiting_run)
    monkeypatch.setattr(windows, "_CHARACTERS", 400)
    ran = Engine(model, tokenizer, EngineConfig(max_batch_tokens=250))
    ran.embed(texts)
    stats = ran.stats
    assert stats.batches == prepared == started >= 5
    waited = stats.first_wait_seconds + stats.waited_seconds
    assert stats.unhidden_index_seconds + stats.unhidden_tokenize_seconds <= waited
    assert stats.unhidden_index_seconds <= stats.index_seconds
    assert stats.unhidden_tokenize_seconds <= stats.tokenize_seconds
    assert stats.run_seconds + waited <= stats.seconds


def test_all_index_work_is_done_ahead(
    model: Any, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[str]] = {}

    def noting(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def noted(*args: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name)
            return original(*args)

        monkeypatch.setattr(owner, name, noted)

    ran = Engine(model, tokenizer, EngineConfig(max_batch_tokens=300))
    noting(schedule, "build_schedule")
    noting(windows, "build_plan")
    ran.embed(texts, "a prompt that all of them share: ")
    assert ran.stats.choices["trie-sdpa"] > 0
    assert threads == {"build_schedule": {"radixmlp-ahead"}, "build_plan": {"radixmlp-ahead"}}


def test_one_engine_serves_several_threads(model: Any, tokenizer: Any, texts: list[str]) -> None:
    ran = Engine(model, tokenizer, EngineConfig(max_batch_tokens=300))
    expected = ran.embed(texts, "a shared prompt: "), ran.rerank("bees", [text[:50] for text in texts])
    with ThreadPoolExecutor(4) as pool:
        embedded = [pool.submit(ran.embed, texts, "a shared prompt: ") for _ in range(3)]
        ranked = [pool.submit(ran.rerank, "bees", [text[:50] for text in texts]) for _ in range(3)]
    for found, truth in ((embedded, expected[0]), (ranked, expected[1])):
        for future in found:
            torch.testing.assert_close(future.result(), truth, rtol=1e-4, atol=1e-5)
    assert ran.stats.requests == 8 * len(texts)
    assert no_thread_left()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where the tests run in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["tokenizer", "model", "on_batch", "interrupt"])
def test_an_error_anywhere_surfaces_and_leaves_no_thread(
    model: Any, tokenizer: Any, texts: list[str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, count = engine_rows.run_decoder, 0

    def breaking(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2 and where == "model":
            raise RuntimeError("the model broke")
        if count == 2 and where == "interrupt":
            signal.raise_signal(signal.SIGINT)
        return run(*args)

    def told(indices: list[int], values: Tensor) -> None:
        if where == "on_batch":
            raise RuntimeError("the caller broke")

    class Breaking:
        def __call__(self, given: list[str], **options: Any) -> Any:
            if where == "tokenizer" and "broken" in given:
                raise MemoryError("the tokenizer broke")
            return tokenizer(given, **options)

    monkeypatch.setattr(engine_rows, "run_decoder", breaking)
    requests = [*texts, "broken"] if where == "tokenizer" else texts
    ran = Engine(model, Breaking(), EngineConfig(max_batch_tokens=250))
    expected: Any = {
        "tokenizer": pytest.raises(
            RequestError, match=rf"request {len(texts)} cannot be tokenised \(MemoryError"
        ),
        "model": pytest.raises(RuntimeError, match="the model broke"),
        "on_batch": pytest.raises(RuntimeError, match="the caller broke"),
        "interrupt": pytest.raises(KeyboardInterrupt),
    }[where]
    with expected:
        ran.embed(requests, on_batch=told)
    assert no_thread_left()
    assert not model.training
    count = 10
    assert Engine(model, tokenizer).embed(texts).shape == (len(texts), 32), "the model is usable as before"


def test_what_is_not_taken_is_closed() -> None:
    closed = threading.Event()

    def numbers() -> Generator[int, None, None]:
        try:
            yield from range(1000)
        finally:
            closed.set()

    with ahead(numbers()) as items:
        assert next(items) == 0
        assert next(items) == 1
    assert closed.is_set()
    assert no_thread_left()


def test_a_full_queue_holds_the_producer_up() -> None:
    made: list[int] = []

    def numbers() -> Generator[int, None, None]:
        for number in range(100):
            made.append(number)
            yield number

    with ahead(numbers(), depth=3) as items:
        assert next(items) == 0
        time.sleep(0.1)
        assert len(made) <= 5
        assert list(items) == list(range(1, 100))
        assert list(items) == []


def test_an_error_comes_where_it_happened() -> None:
    def numbers() -> Generator[int, None, None]:
        yield 1
        yield 2
        raise KeyError("three")

    with ahead(numbers()) as items:
        assert [next(items), next(items)] == [1, 2]
        with pytest.raises(KeyError, match="three"):
            next(items)
        assert list(items) == []


def test_batches_are_reported_as_they_come(model: Any, tokenizer: Any, texts: list[str]) -> None:
    requests = [*texts, *texts[:3]]
    ran = Engine(model, tokenizer, EngineConfig(max_batch_tokens=300))
    told: dict[int, Tensor] = {}
    sizes: list[int] = []

    def note(indices: list[int], values: Tensor) -> None:
        assert threading.current_thread() is threading.main_thread()
        assert len(indices) == len(values)
        assert not set(indices) & set(told)
        told.update(zip(indices, values, strict=True))
        sizes.append(len(indices))

    found = ran.embed(requests, on_batch=note)
    assert len(sizes) == ran.stats.batches > 2
    assert sorted(told) == list(range(len(requests)))
    assert torch.equal(torch.stack([told[i] for i in range(len(requests))]), found)
    told.clear()
    scores = ran.rerank_pairs(["q"] * len(texts), [text[:99] for text in texts], on_batch=note)
    assert torch.equal(torch.stack([told[i] for i in range(len(texts))]), scores)
    told.clear()
    scored = ran.score([text[:30].rstrip() for text in requests], [" river"] * len(requests), on_batch=note)
    rows = torch.stack([told[i] for i in range(len(requests))])
    assert torch.equal(rows[:, 0], scored.logprobs)
    assert rows[:, 1].tolist() == scored.num_tokens.tolist()


def test_a_dense_choice_keeps_to_the_budget(
    model: Any, tokenizer: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Engine(model, tokenizer).embed(texts, "a prompt that they share: " * 4)
    monkeypatch.setattr(engine_rows, "choose_attention", lambda *_: Choice("dense-sdpa", {}, "planted"))
    ran = Engine(model, tokenizer, EngineConfig(max_batch_tokens=400))
    seen: list[int] = []
    run = engine_rows.run_decoder
    monkeypatch.setattr(
        engine_rows,
        "run_decoder",
        lambda model, batch, *rest: seen.append(batch.num_tokens) or run(model, batch, *rest),
    )
    torch.testing.assert_close(
        ran.embed(texts, "a prompt that they share: " * 4), expected, rtol=1e-4, atol=1e-5
    )
    assert max(seen) <= 400
    assert ran.stats.choices == {"dense-sdpa": len(seen)}
    assert ran.stats.gamma == 1.0


def test_named_backends_and_thresholds_are_kept(model: Any, tokenizer: Any, texts: list[str]) -> None:
    prompt = "a prompt that all of them share: "
    choices = {}
    for settings_ in (
        {"attention": "scatter-sdpa"},
        {"attention": "dense-sdpa"},
        {"radix_mlp_threshold": 0.1},
        {"deterministic": True},
        {"model_impl": "dense"},
    ):
        ran = Engine(model, tokenizer, EngineConfig(**settings_))  # type: ignore[arg-type]
        ran.embed(texts, prompt)
        choices[next(iter(settings_))] = set(ran.stats.choices)
    assert choices == {
        "attention": {"dense-sdpa"},
        "radix_mlp_threshold": {"dense-sdpa"},
        "deterministic": {"trie-sdpa"},
        "model_impl": {"dense-sdpa"},
    }


def test_progress_counts_requests(
    model: Any, tokenizer: Any, texts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    ran = Engine(model, tokenizer, EngineConfig(max_batch_tokens=300, progress=True))
    ran.embed([*texts, *texts])
    ran.classify(texts[:5], ["river", "bread and river"])
    shown = capfd.readouterr()
    assert shown.out == ""
    assert f"{2 * len(texts)}/{2 * len(texts)}" in shown.err
    assert "5/5" in shown.err


def clock_of(waits: list[tuple[float, float]], index: list[tuple[float, float]], run: float) -> Clock:
    clock = Clock()
    clock.waits, clock.run_seconds = waits, run
    clock.spans["index"] = index
    return clock


def test_a_slow_index_is_warned_about() -> None:
    with pytest.warns(SlowIndexWarning, match=r"waited 0\.20 s of 2\.50 s .*max_batch_tokens"):
        calls.warn_if_waiting(clock_of([(0, 0.3), (1, 1.2)], [(0, 1.5)], 2.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls.warn_if_waiting(clock_of([(0, 0.3), (1, 1.01)], [(0, 1.5)], 2.0))  # 0.4%
        calls.warn_if_waiting(clock_of([(0, 0.3)], [(0, 1.5)], 2.0))  # the first batch alone
        calls.warn_if_waiting(clock_of([(0, 0.1), (0.1, 0.2)], [(0, 0.2)], 0.2))  # too short a call
        slow_tokenizer = clock_of([(0, 0.3), (1, 1.2)], [(1, 1.05)], 2.0)
        slow_tokenizer.spans["tokenize"] = [(1.05, 1.2)]
        calls.warn_if_waiting(slow_tokenizer)


spans = st.lists(st.integers(0, 30), max_size=8, unique=True).map(
    lambda edges: [
        (float(a), float(b)) for a, b in zip(sorted(edges)[::2], sorted(edges)[1::2], strict=False)
    ]
)


@given(spans, spans)
def test_overlap_counts_common_seconds(
    some: list[tuple[float, float]], others: list[tuple[float, float]]
) -> None:
    def seconds(spans: list[tuple[float, float]]) -> set[int]:
        return {second for start, end in spans for second in range(int(start), int(end))}

    assert overlap(some, others) == len(seconds(some) & seconds(others))


def test_stats_start_anew() -> None:
    stats = EngineStats()
    stats.count_batch("trie-sdpa", 5, 10)
    stats.count_call(3, clock_of([(0, 1)], [(0, 0.5)], 1.0))
    assert (stats.requests, stats.tokens, stats.rows, stats.batches, stats.gamma) == (3, 10, 5, 1, 0.5)
    assert (stats.first_wait_seconds, stats.unhidden_index_seconds, stats.run_seconds) == (1, 0.5, 1)
    stats.reset()
    assert stats == EngineStats()


def test_prepared_batches_say_what_they_hold() -> None:
    (only,) = prepare(Bytes(["ab", "ac", "a"]), 10, False, Clock())
    assert isinstance(only, Prepared)
    assert [entry.request for entry in only.entries] == [2, 0, 1]
    assert only.plan is not None
    assert only.plan.num_nodes == 3
