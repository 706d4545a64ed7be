"""Fine-tuning SmolLM2-135M on answers under one long instruction: shared prefixes against the un-shared loss."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from radixmlp.verify import smollm2
from radixmlp.verify.families import small_model
from radixmlp.verify.passages import load_passages

from .examples import Example, Settings, batches_of, texts
from .losses import compare, passed

QUESTION = "fine-tuning under one long instruction: the same loss curve from fewer rows, and in less time?"
SETTINGS = Settings(shots=3, batch=4, steps=10)
QUICK = Settings(0, 4, 6, learning_rate=1e-4)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Train two copies of the model, one with each loss. Quick runs take a tiny model and random tokens.

    Raises:
        ValueError: the curves are apart, or do not fall.
    """
    settings = QUICK if quick else SETTINGS
    if quick:
        model, examples = small_model("llama"), random_examples(6)
    else:
        tokenizer: Any = smollm2.load_tokenizer()
        model = smollm2.load_model(torch.float32, "sdpa")
        pairs = texts(settings, load_passages())
        examples = [Example(tokenizer.encode(prompt), tokenizer.encode(answer)) for prompt, answer in pairs]
    progress(f"two copies of the model, {settings.steps} steps each")
    result = compare(model, batches_of(examples, settings), settings.learning_rate)
    if not passed(result):
        raise ValueError(f"the shared loss is wrong or does not fall, so its times say nothing: {result}")
    return {"settings": asdict(settings), **result}


def random_examples(count: int) -> list[Example]:
    """Few examples under one random instruction of 24 tokens; asked for again and again, their loss falls."""
    rng = random.Random(0)

    def ids(number: int) -> list[int]:
        return [rng.randrange(1, 400) for _ in range(number)]

    instruction = ids(24)
    return [Example(instruction + ids(1 + i % 4), ids(2 + i % 3)) for i in range(count)]


def report(measured: dict[str, Any]) -> str:
    """Markdown: rows, times, and the loss of every step."""
    s, rows, seconds = measured["settings"], measured["rows"], measured["loss_and_backward_seconds"]
    low, high = seconds["quantiles"]
    losses = measured["losses"]
    lines = [
        f"{s['steps']} AdamW steps ({s['learning_rate']}) of {s['batch']} examples, {s['shots']} examples in the "
        f"instruction, seed {s['seed']}.",
        "",
        "| a step | un-shared | shared | |",
        "|---|---|---|---|",
        f"| rows of forward and backward | {rows['unshared']:.1f} | {rows['shared']:.1f} | r = {rows['ratio']:.3f} |",
        f"| answer tokens | {rows['answer_tokens']:.1f} | the same | |",
        f"| loss and backward, seconds | {seconds['unshared']:.4g} | {seconds['shared']:.4g} | "
        f"{seconds['ratio']:.2f} times ({low:.2f}–{high:.2f}) |",
        "",
        f"Largest relative difference of the two losses at any step: {measured['largest_relative_difference']:.1e}.",
        "",
        "| step | un-shared loss | shared loss |",
        "|---|---|---|",
    ]
    pairs = zip(losses["unshared"], losses["shared"], strict=True)
    lines += [f"| {step} | {a:.7f} | {b:.7f} |" for step, (a, b) in enumerate(pairs, start=1)]
    return "\n".join(lines) + "\n"
