"""The engine's figures: measured on a tiny model, wrong results and swapped documents turn them red."""

from __future__ import annotations

import dataclasses
import re
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from radixmlp.optimized.engine import Engine, EngineConfig, EngineStats
from radixmlp.verify import engine_bars
from radixmlp.verify.engine_bars import Task, index_bar, measure, order_bar, speed_bar, tasks, wrong_results
from radixmlp.verify.engine_batching import batching_bars, rows_of, synthetic_texts
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.passages import load_passages
from radixmlp.verify.timing import Timings


class Words:
    """One token a word, by its hash."""

    def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text) for text in texts]}

    def encode(self, text: str, **_: Any) -> list[int]:
        return [zlib.crc32(word.encode()) % 512 for word in re.findall(r"\s*\w+|\W", text)]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return dataclasses.replace(load_model("tiny-qwen3", "bfloat16"), read_tokenizer=Words)


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> list[tuple[Task, Timings, dict[str, Tensor], EngineStats]]:
    found = []
    for task in tasks(loaded, load_passages()[:2]):
        engines = {
            impl: Engine(loaded.model, loaded.tokenizer, EngineConfig(model_impl=impl, max_batch_tokens=2000))
            for impl in ("radix", "dense")
        }
        found.append((task, *measure(task, engines, 1, lambda _: None), engines["radix"].stats))
    return found


def test_correct_results_pass(loaded: LoadedModel, measured: Any) -> None:
    for task, timings, results, stats in measured:
        wrong, errors = wrong_results(task, loaded.model, results)
        assert wrong is None
        assert 0 < errors["radix"]["largest"] < 0.1
        bar = speed_bar(task, timings, stats, "shipped passages", wrong, errors)
        assert bar.details["r"] > 1.2
        (dense,), (radix,) = timings.seconds["dense"], timings.seconds["radix"]
        assert bar.value == pytest.approx(dense / radix / bar.details["r"])
        assert "20 requests" in bar.shape
    assert [task.name for task, *_ in measured] == ["rerank", "embed"]


def test_wrong_results_are_caught(loaded: LoadedModel, measured: Any) -> None:
    for task, timings, results, stats in measured:
        for fault in (torch.zeros_like, lambda values: values.roll(1, 0), lambda values: values * 1.2):
            broken = results | {"radix": fault(results["radix"])}
            wrong, errors = wrong_results(task, loaded.model, broken)
            assert wrong is not None
            assert not speed_bar(task, timings, stats, "shipped passages", wrong, errors).passed
        assert (
            wrong_results(task, loaded.model, results | {"radix": results["radix"] * torch.nan})[0]
            is not None
        )


def test_swapped_documents_are_caught(measured: Any) -> None:
    task, _, results, _ = measured[0]
    bar = order_bar(task, results)
    assert bar.passed
    assert bar.details["pairs"] == 2 * 45
    reversed_ = order_bar(task, results | {"radix": 1 - results["radix"]})
    assert reversed_.details["swapped"] == bar.details["pairs"] - _ties(task, results["dense"])
    assert not reversed_.passed
    close = torch.tensor([0.5, 0.501])
    assert order_bar(
        dataclasses.replace(task, groups=[[0, 1]]), {"dense": close, "radix": close.flip(0)}
    ).passed


def _ties(task: Task, scores: Tensor) -> int:
    return sum(int(scores[i] == scores[j]) for group in task.groups for i in group for j in group if i < j)


def test_an_index_that_is_waited_for_is_caught(measured: Any) -> None:
    task, _, _, stats = measured[0]
    assert index_bar(task, stats).value == stats.unhidden_index_seconds / stats.seconds
    slow = EngineStats(seconds=10.0, unhidden_index_seconds=0.2, index_seconds=1.0)
    assert not index_bar(task, slow).passed
    assert index_bar(task, EngineStats(seconds=10.0, unhidden_index_seconds=0.05)).passed


def test_batching_is_judged_by_what_it_computes(loaded: LoadedModel) -> None:
    texts = synthetic_texts(12, 20)
    assert len(texts) == 240
    found = rows_of(loaded.tokenizer, texts[::7] + texts[3::7] + texts[5::7], 200)
    assert 1 <= found["prefix"] < found["fifo"]
    assert found["prefix_batches"] < found["fifo_batches"]
    bars = batching_bars(loaded, load_passages(), "shipped passages")
    assert [bar.name.split(", ")[1] for bar in bars] == ["real requests", "synthetic requests"]
    for bar in bars:
        assert bar.passed
        assert bar.value == max(found["prefix"] for found in bar.details.values())
    assert max(found["fifo"] for found in bars[1].details.values()) > 1.05


@pytest.mark.slow
def test_the_whole_group_runs(monkeypatch: pytest.MonkeyPatch, loaded: LoadedModel) -> None:
    monkeypatch.setattr(engine_bars, "load_model", lambda *_: loaded)
    monkeypatch.setattr(engine_bars, "_ROUNDS", 2)
    told: list[str] = []
    bars = engine_bars.engine_bars(told.append)
    assert len(bars) == 7
    assert all(bar.name.startswith("engine: ") for bar in bars)
    assert all(bar.wrong is None for bar in bars)
    assert any("truth" in line for line in told)
