"""One GRPO step (arXiv 2402.03300, section 4.1): shared prefixes against the un-shared computation."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp import RaggedBatch
from radixmlp.training import sequence_logprobs
from radixmlp.verify import oracle, rules
from radixmlp.verify.timing import time_interleaved


@dataclass(frozen=True)
class Settings:
    """Sizes and constants of a step.

    Args:
        shots: worked examples at the start of every prompt.
        questions: prompts.
        group: completions sampled for each.
        new_tokens: at most so many a completion.
        updates: optimiser steps on the same completions; from the second on ratios and divergences are not trivial.
        clip, beta: of the ratio, and the weight of the divergence from the reference.
        micro_batch: sequences that the un-shared computation runs at once.
        rounds: timed repetitions of loss and backward.
    """

    shots: int = 8
    questions: int = 2
    group: int = 8
    new_tokens: int = 64
    updates: int = 2
    clip: float = 0.2
    beta: float = 0.04
    learning_rate: float = 1e-5
    micro_batch: int = 4
    rounds: int = 3
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Sampled completions.

    Args:
        prompts, completions: token ids, one list a sequence.
        rewards, advantages: [B].
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: Tensor
    advantages: Tensor

    @property
    def batch(self) -> RaggedBatch:
        """Prompts with their completions."""
        return RaggedBatch.from_sequences(
            [p + c for p, c in zip(self.prompts, self.completions, strict=True)]
        )


Logprobs = list[Tensor]  # one tensor a sequence: log p of each token of its completion


def sample(
    model: Any, prompts: list[list[int]], settings: Settings, stop: list[int], share: bool
) -> tuple[list[list[int]], float]:
    """`group` completions of each prompt, and the seconds; with `share` the prompts are computed once."""
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), stop[0])
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
    repeated = [x.repeat_interleave(settings.group, 0) for x in (ids, mask)]
    if share:
        radixmlp.enable(model)
    torch.manual_seed(settings.seed)
    started = time.perf_counter()
    try:
        out = model.generate(
            repeated[0],
            attention_mask=repeated[1],
            do_sample=True,
            top_k=0,
            max_new_tokens=settings.new_tokens,
            eos_token_id=stop,
            pad_token_id=stop[0],
        )
    finally:
        seconds = time.perf_counter() - started
        radixmlp.disable(model)
    completions = []
    for row in out[:, width:].tolist():
        end = next((place for place, token in enumerate(row) if token in stop), len(row) - 1)
        completions.append(row[: end + 1])
    return completions, seconds


def advantages_of(rewards: Tensor, group: int) -> Tensor:
    """[B] rewards less their group's mean, over its standard deviation."""
    grouped = rewards.view(-1, group)
    spread = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
    return spread.flatten()


def shared_logprobs(model: Any, rollouts: Rollouts, rows: range) -> Logprobs:
    """Every prefix once; all rows at once, since little is left of them."""
    assert rows == range(len(rollouts.prompts))
    values = sequence_logprobs(model, rollouts.batch, attention="auto").split()
    return [v[-len(c) :] for v, c in zip(values, rollouts.completions, strict=True)]


def own_logprobs(model: Any, rollouts: Rollouts, rows: range) -> Logprobs:
    """The model's own forward on a padded batch, its head on the completions only."""
    sequences = [rollouts.prompts[row] + rollouts.completions[row] for row in rows]
    width = max(map(len, sequences))
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = torch.tensor(sequence), 1
    keep = width - min(len(rollouts.prompts[row]) for row in rows) + 1
    logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=keep).logits
    out = []
    for place, row in enumerate(rows):
        completion = torch.tensor(rollouts.completions[row])
        first = keep - width + len(rollouts.prompts[row]) - 1
        wide = logits[place, first : first + len(completion)]
        out.append(wide.log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return out


def loss_of(
    new: Logprobs, old: Logprobs, reference: Logprobs, advantages: Tensor, settings: Settings
) -> Tensor:
    """Sum over sequences of the mean over tokens: clipped surrogate less the divergence (its estimator k3)."""
    total = new[0].new_zeros(())
    for row, values in enumerate(new):
        ratio = (values - old[row]).exp()
        clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        surrogate = torch.minimum(ratio * advantages[row], clipped * advantages[row])
        away = reference[row] - values
        total = total - (surrogate - settings.beta * (away.exp() - away - 1)).mean()
    return total


@dataclass(frozen=True)
class Route:
    """A way to compute log-probabilities, and how many sequences it takes at once."""

    logprobs: Callable[[Any, Rollouts, range], Logprobs]
    micro_batch: int

    def parts(self, count: int) -> list[range]:
        """Rows 0 .. count-1 in micro-batches."""
        return [range(a, min(a + self.micro_batch, count)) for a in range(0, count, self.micro_batch)]

    def fixed(self, model: Any, rollouts: Rollouts) -> Logprobs:
        """Without gradients."""
        with torch.no_grad():
            parts = self.parts(len(rollouts.prompts))
            return [v for rows in parts for v in self.logprobs(model, rollouts, rows)]

    def gradients(
        self, model: Any, rollouts: Rollouts, old: Logprobs, reference: Logprobs, settings: Settings
    ) -> float:
        """The loss; its gradients are left in the weights' `.grad`."""
        model.zero_grad(set_to_none=True)
        count, total = len(rollouts.prompts), 0.0
        for rows in self.parts(count):
            new = self.logprobs(model, rollouts, rows)
            pick = slice(rows.start, rows.stop)
            loss = loss_of(new, old[pick], reference[pick], rollouts.advantages[pick].to(new[0]), settings)
            (loss / count).backward()
            total += float(loss.detach()) / count
        return total


def worst(got: list[Tensor], truth: list[Tensor]) -> float:
    """The largest difference, as a share of that tensor's largest value."""
    shares = [
        (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-300)
        for a, b in zip(got, truth, strict=True)
    ]
    return float(torch.stack(shares).max())  # NaN, where one is


@dataclass(frozen=True, eq=False)
class Step:
    """Everything an update starts from; both routes compute from the same weights.

    Args:
        routes: "shared" and "unshared".
    """

    policy: Any
    rollouts: Rollouts
    old: dict[str, Logprobs]
    reference: dict[str, Logprobs]
    routes: dict[str, Route]
    settings: Settings

    def update(self, optimizer: torch.optim.Optimizer, truth: bool) -> dict[str, Any]:
        """Loss and gradients of both routes, compared; the optimiser takes those of the shared one."""
        losses, gradients = {}, {}
        for name in ("unshared", "shared"):
            losses[name] = self._gradients(name, self.policy)
            gradients[name] = [p.grad.clone() for p in self.policy.parameters()]
        scale = max(abs(losses["unshared"]), float(self.rollouts.advantages.abs().mean()))
        found = {
            "loss": losses,
            "loss_difference": abs(losses["shared"] - losses["unshared"]) / scale,
            "gradient_difference": worst(gradients["shared"], gradients["unshared"]),
            "gradient_norm": float(torch.stack([g.norm() for g in gradients["shared"]]).norm()),
        }
        if truth:
            found |= self._against_truth(gradients)
        optimizer.step()
        return found

    def _against_truth(self, gradients: dict[str, list[Tensor]]) -> dict[str, Any]:
        """Both routes in fp64, transformers' casts to fp32 lifted; fp32 gradients against the un-shared ones."""
        exact, true = copy.deepcopy(self.policy).double(), {}
        with oracle.lifted(exact):
            for name in self.routes:
                self._gradients(name, exact)
                true[name] = [p.grad.clone() for p in exact.parameters()]
        return {
            "fp64_gradient_difference": worst(true["shared"], true["unshared"]),
            "gradient_error": {name: worst(got, true["unshared"]) for name, got in gradients.items()},
        }

    def seconds(self) -> dict[str, Any]:
        """Loss and backward, the routes in turn."""
        calls = {name: lambda name=name: self._gradients(name, self.policy) for name in self.routes}
        timings = time_interleaved(calls, self.settings.rounds, warmup=0)
        ratio = timings.ratio("unshared", "shared")
        return {
            **{name: timings.median(name) for name in self.routes},
            "ratio": ratio.median,
            "quantiles": [ratio.q20, ratio.q80],
        }

    def _gradients(self, name: str, model: Any) -> float:
        exact = next(model.parameters()).dtype == torch.float64
        start = "unshared" if exact else name  # in fp64 what is given must be the same numbers
        old, reference = ([v.to(model.dtype) for v in part[start]] for part in (self.old, self.reference))
        return self.routes[name].gradients(model, self.rollouts, old, reference, self.settings)


def run_step(
    policy: Any,
    prompts: list[list[int]],
    reward: Callable[[int, list[int]], float],
    stop: list[int],
    settings: Settings,
    truth: bool = False,
) -> dict[str, Any]:
    """Sample, score, and update `policy`; what both routes found, and what they took.

    Args:
        prompts: token ids, one list a question.
        reward: of (question, completion).
        stop: token ids that end a completion.
        truth: in the last update both routes in fp64 as well, which takes longer than all else.

    Raises:
        ValueError: all completions of every group have the same reward.
    """
    reference = copy.deepcopy(policy)
    seconds, sampled = {}, {}
    for name in ("unshared", "shared"):
        sampled[name], seconds[name] = sample(policy, prompts, settings, stop, name == "shared")
    questions = [q for q in range(len(prompts)) for _ in range(settings.group)]
    rewards = torch.tensor([reward(q, c) for q, c in zip(questions, sampled["shared"], strict=True)])
    advantages = advantages_of(rewards, settings.group)
    if not bool(advantages.any()):
        raise ValueError(
            f"every group's rewards are equal ({rewards.tolist()}): nothing to learn from, take another seed"
        )
    rollouts = Rollouts([prompts[q] for q in questions], sampled["shared"], rewards, advantages)
    routes = {
        "shared": Route(shared_logprobs, len(questions)),
        "unshared": Route(own_logprobs, settings.micro_batch),
    }
    old = {name: route.fixed(policy, rollouts) for name, route in routes.items()}
    fixed = {name: route.fixed(reference, rollouts) for name, route in routes.items()}
    step = Step(policy, rollouts, old, fixed, routes, settings)
    timed = step.seconds()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate)
    updates = [
        step.update(optimizer, truth and number == settings.updates - 1) for number in range(settings.updates)
    ]
    plan = radixmlp.build_plan(rollouts.batch)
    return {
        "same_completions": sampled["shared"] == sampled["unshared"],
        "rewards": rewards.tolist(),
        "completion_tokens": [len(c) for c in rollouts.completions],
        "rows": {"unshared": plan.num_tokens, "shared": plan.num_nodes, "ratio": plan.compression_ratio},
        "logprob_difference": max(
            float((a - b).abs().max()) for a, b in zip(old["shared"], old["unshared"], strict=True)
        ),
        "updates": updates,
        "sampling_seconds": {**seconds, "ratio": seconds["unshared"] / seconds["shared"]},
        "loss_and_backward_seconds": timed,
    }


def passed(result: dict[str, Any]) -> bool:
    """Equal completions, fewer rows, losses to 1e-5; where there is a truth, gradients to 1e-10 in fp64, and in fp32
    no further from the truth than twice the un-shared ones (advantages add up to nothing, so terms cancel)."""
    good = result["same_completions"] and result["rows"]["ratio"] > 1
    for update in result["updates"]:
        good &= update["loss_difference"] <= rules.FLOAT32
        if "gradient_error" in update:
            errors = update["gradient_error"]
            good &= update["fp64_gradient_difference"] <= rules.LIFTED_GRADIENT
            good &= errors["shared"] <= max(rules.FLOAT32, rules.LARGEST_FACTOR * errors["unshared"])
    return bool(good)
