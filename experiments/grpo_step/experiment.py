"""One GRPO step (arXiv 2402.03300, section 4.1) on SmolLM2-135M, shared prefixes against the un-shared route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from radixmlp.verify import smollm2
from radixmlp.verify.families import small_model

from .problems import grade, prompts
from .step import Settings, passed, run_step

QUESTION = "one GRPO step on a shared prompt: the same loss and gradients from fewer rows, and in less time?"
SETTINGS = Settings(shots=3, questions=1, group=4, new_tokens=48, rounds=2)
QUICK = Settings(0, 2, 4, 8, learning_rate=0.05, micro_batch=3, rounds=1)
QUICK_PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 12]]


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Sample a group, update twice on it, and hold the last gradient against fp64.

    Quick runs take a tiny random model and reward even token ids.

    Raises:
        ValueError: losses, gradients or completions of the two routes differ.
    """
    settings = QUICK if quick else SETTINGS
    progress("sampling, updates, and the truth in fp64")
    result = _tiny(settings) if quick else _smollm2(settings)
    if not passed(result):
        raise ValueError(f"the shared route is wrong, so its times say nothing: {result}")
    return {"settings": asdict(settings), **result}


def even(_: int, completion: list[int]) -> float:
    """The share of even token ids."""
    return sum(token % 2 == 0 for token in completion) / len(completion)


def _tiny(settings: Settings) -> dict[str, Any]:
    return run_step(small_model("llama"), QUICK_PROMPTS, even, list(range(60)), settings, truth=True)


def _smollm2(settings: Settings) -> dict[str, Any]:
    tokenizer: Any = smollm2.load_tokenizer()
    policy = smollm2.load_model(torch.float32, "sdpa")
    stop = [tokenizer.eos_token_id, *(tokenizer.encode(end)[0] for end in ("\n", "\n\n"))]
    asked = prompts(settings.shots, settings.questions, settings.seed)
    return run_step(
        policy,
        [tokenizer.encode(prompt) for prompt, _ in asked],
        lambda number, completion: grade(tokenizer.decode(completion), asked[number][1]),
        stop,
        settings,
        truth=True,
    )


def report(measured: dict[str, Any]) -> str:
    """Markdown: what was sampled, rows, losses, gradients and times."""
    s, rows, last = measured["settings"], measured["rows"], measured["updates"][-1]
    error = last["gradient_error"]
    lines = [
        f"{s['questions']} questions after {s['shots']} examples, {s['group']} completions each, of at most "
        f"{s['new_tokens']} tokens; {s['updates']} updates (clip {s['clip']}, beta {s['beta']}, AdamW "
        f"{s['learning_rate']}), un-shared micro-batches of {s['micro_batch']}, seed {s['seed']}.",
        "",
        f"- Completions have {', '.join(map(str, measured['completion_tokens']))} tokens and are the same on both "
        f"routes; rewards are {', '.join(f'{reward:.3g}' for reward in measured['rewards'])}.",
        f"- Old log-probabilities of the two routes differ by at most {measured['logprob_difference']:.1e}.",
        "",
        "| | un-shared | shared | |",
        "|---|---|---|---|",
        f"| rows of forward and backward | {rows['unshared']} | {rows['shared']} | r = {rows['ratio']:.3f} |",
    ]
    for number, update in enumerate(measured["updates"], start=1):
        loss = update["loss"]
        lines.append(
            f"| loss of update {number} | {loss['unshared']:.7f} | {loss['shared']:.7f} | apart by "
            f"{update['loss_difference']:.1e}, gradients by {update['gradient_difference']:.1e}, norm "
            f"{update['gradient_norm']:.4g} |"
        )
    lines += [
        f"| error of the last fp32 gradient, against fp64 | {error['unshared']:.1e} | {error['shared']:.1e} | fp64 "
        f"ones apart by {last['fp64_gradient_difference']:.1e} |",
        _times("loss and backward, seconds", measured["loss_and_backward_seconds"], s["rounds"]),
        _times("sampling, seconds", measured["sampling_seconds"], 1),
    ]
    return "\n".join(lines) + "\n"


def _times(name: str, seconds: Mapping[str, Any], rounds: int) -> str:
    spread = ""
    if "quantiles" in seconds:
        low, high = seconds["quantiles"]
        spread = f" ({low:.2f}–{high:.2f})"
    ratio = f"{seconds['ratio']:.2f}{spread} times, {rounds} rounds"
    return f"| {name} | {seconds['unshared']:.4g} | {seconds['shared']:.4g} | {ratio} |"
