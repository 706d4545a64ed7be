"""Fine-tuning SmolLM2-135M on answers under one long instruction: shared prefixes against the un-shared loss.

python -P experiments/sft_shared_instruction/run.py [--quick]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp import RaggedBatch
from radixmlp.training import causal_lm_loss
from radixmlp.verify import rules, smollm2
from radixmlp.verify.environment import environment
from radixmlp.verify.passages import RankedPassages, load_passages
from radixmlp.verify.prompts import chatml
from radixmlp.verify.timing import quantile

RESULT = Path(__file__).with_name("result.json")
INSTRUCTION = (
    "You write the question that a passage answers. Read the passage to its end before you start. Ask about the "
    "passage as a whole, not about one detail of it. Use plain words and no more than twelve of them. Do not use "
    "names that the passage does not use. Do not answer the question, do not comment on the passage, do not greet "
    "and do not explain what you did. Write one line, in lower case, without a question mark. If a passage answers "
    "several questions, choose the one that a person without knowledge of the subject would ask first. If it gives "
    "a rule and its reason, ask for the reason. These are passages with the questions that others wrote for them."
)
IGNORED = -100


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Args:
        shots: passages with their questions at the end of the instruction.
        batch: examples a step.
        steps: AdamW updates of each of the two models.
    """

    shots: int = 6
    batch: int = 8
    steps: int = 20
    learning_rate: float = 1e-5
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """Token ids: what is given, and what is to be learnt."""

    prompt: list[int]
    answer: list[int]


def shared_loss(model: Any, examples: list[Example]) -> Tensor:
    """Every prefix once; the mean over answer tokens."""
    batch = RaggedBatch.from_sequences([e.prompt + e.answer for e in examples])
    labels = [token for e in examples for token in [IGNORED] * len(e.prompt) + e.answer]
    return causal_lm_loss(model, batch, torch.tensor(labels))


def own_loss(model: Any, examples: list[Example]) -> Tensor:
    """The model's own forward on a padded batch, its head on the rows that predict an answer's token."""
    width = max(len(e.prompt) + len(e.answer) for e in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.int64)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, e in enumerate(examples):
        end = len(e.prompt) + len(e.answer)
        ids[row, :end], mask[row, :end] = torch.tensor(e.prompt + e.answer), 1
        labels[row, len(e.prompt) : end] = torch.tensor(e.answer)
    hidden = model.base_model(ids, attention_mask=mask, use_cache=False).last_hidden_state
    counted = labels[:, 1:] != IGNORED
    logits = model.get_output_embeddings()(hidden[:, :-1][counted])
    targets = labels[:, 1:][counted]
    # `cross_entropy` says the same, but its fp32 sum over 49,152 entries comes out 9e-6 too low on a CPU.
    return (logits.logsumexp(-1) - logits.gather(1, targets[:, None])[:, 0]).mean()


LOSSES: dict[str, Callable[[Any, list[Example]], Tensor]] = {"unshared": own_loss, "shared": shared_loss}


def compare(model: Any, batches: list[list[Example]], learning_rate: float) -> dict[str, Any]:
    """Train two copies of `model` on the same batches, one with each loss; the losses and seconds of every step.

    Args:
        batches: one list of examples a step.
    """
    models = {name: copy.deepcopy(model) for name in LOSSES}
    optimizers = {
        name: torch.optim.AdamW(trained.parameters(), lr=learning_rate) for name, trained in models.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in LOSSES}
    seconds: dict[str, list[float]] = {name: [] for name in LOSSES}
    for number, examples in enumerate(batches):
        order = list(LOSSES) if number % 2 else list(LOSSES)[::-1]
        for name in order:
            started = time.perf_counter()
            optimizers[name].zero_grad(set_to_none=True)
            loss = LOSSES[name](models[name], examples)
            loss.backward()
            seconds[name].append(time.perf_counter() - started)
            optimizers[name].step()
            losses[name].append(float(loss.detach()))
    apart = [abs(a - b) / abs(b) for a, b in zip(losses["shared"], losses["unshared"], strict=True)]
    # The first step also sets things up: buffers, the check of the model.
    ratios = [a / b for a, b in zip(seconds["unshared"], seconds["shared"], strict=True)][1:]
    return {
        "losses": losses,
        "largest_relative_difference": max(apart),
        "rows": rows_of(batches),
        "loss_and_backward_seconds": {
            **{name: statistics.median(found[1:]) for name, found in seconds.items()},
            "ratio": statistics.median(ratios),
            "quantiles": [quantile(ratios, 0.2), quantile(ratios, 0.8)],
        },
    }


def rows_of(batches: list[list[Example]]) -> dict[str, float]:
    """Means over steps: tokens of the batch, nodes of its trie, answer tokens."""
    plans = [
        radixmlp.build_plan(RaggedBatch.from_sequences([e.prompt + e.answer for e in examples]))
        for examples in batches
    ]
    tokens = statistics.mean(plan.num_tokens for plan in plans)
    nodes = statistics.mean(plan.num_nodes for plan in plans)
    answers = statistics.mean(sum(len(e.answer) for e in examples) for examples in batches)
    return {"unshared": tokens, "shared": nodes, "ratio": tokens / nodes, "answer_tokens": answers}


def passed(result: dict[str, Any]) -> bool:
    """The curves agree to 1e-5 at every step, they fall, and fewer rows were computed."""
    curve = result["losses"]["unshared"]
    falls = statistics.mean(curve[-3:]) < statistics.mean(curve[:3])
    near = result["largest_relative_difference"] <= rules.FLOAT32
    return falls and near and result["rows"]["ratio"] > 1


def texts(settings: Settings, data: list[RankedPassages]) -> list[tuple[str, str]]:
    """(prompt, answer) of every passage that is not one of the instruction's examples, in a random order."""
    pairs = [(passage, entry.query) for entry in data for passage in entry.passages]
    random.Random(settings.seed).shuffle(pairs)
    shots, rest = pairs[: settings.shots], pairs[settings.shots :]
    examples = "".join(f"\n\nPassage: {passage}\nQuestion: {question}" for passage, question in shots)
    return [
        (chatml(INSTRUCTION + examples, f"Passage: {passage}"), f"{question}<|im_end|>")
        for passage, question in rest
    ]


def batches_of(examples: list[Example], settings: Settings) -> list[list[Example]]:
    """`steps` lists of `batch` examples, from the first again when they run out."""
    places = range(settings.steps * settings.batch)
    drawn = [examples[place % len(examples)] for place in places]
    return [drawn[a : a + settings.batch] for a in range(0, len(drawn), settings.batch)]


def main(argv: list[str] | None = None) -> int:
    """Run the experiment on SmolLM2-135M; 0 where it passed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short instruction and a tiny batch")
    parser.add_argument("--steps", type=int, help="AdamW updates of each model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="JSON file (without --quick: result.json beside this script)"
    )
    arguments = parser.parse_args(argv)
    settings = Settings(shots=0, batch=3) if arguments.quick else Settings()
    settings = replace(settings, seed=arguments.seed, steps=arguments.steps or settings.steps)
    tokenizer = smollm2.load_tokenizer()
    model = smollm2.load_model(torch.float32, "sdpa")
    examples = [
        Example(tokenizer.encode(prompt), tokenizer.encode(answer))
        for prompt, answer in texts(settings, load_passages())
    ]
    result = compare(model, batches_of(examples, settings), settings.learning_rate)
    record = {
        "environment": environment("cpu"),
        "settings": asdict(settings),
        **result,
        "passed": passed(result),
    }
    text = json.dumps(record, indent=1)
    print(text)
    out = arguments.out or (None if arguments.quick else RESULT)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
