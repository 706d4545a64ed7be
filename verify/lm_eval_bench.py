"""lm-evaluation-harness on SmolLM2-135M, 5-shot: dense, enabled, and with loglikelihoods from compact rows.

Three variants answer the same multiple-choice items: `HFLM` on the untouched model, the same `HFLM` on an enabled
one, and `RadixHFLM`. Every round takes other items, so that all items together check the predictions.

`HFLM` takes a log-softmax over [batch, length, vocabulary], which nothing behind the model can share. What it
spends outside the model is measured in the dense run, and bounds what enabling can reach:
ceiling = dense / (model / r + outside), with r = slots of the padded batches / rows computed.

`HFLM` also asks for the [batch, length, vocabulary] logits themselves. Written from distinct rows, into memory whose
every page is touched for the first time, they take an eighth of the enabled run; `ceiling_with_expansion` counts them
in. Huge pages make that copy three times faster, and the log-softmax after it slower by more. `RadixHFLM` needs
neither tensor.

Run alone: `python -P -m radixmlp.verify.lm_eval_bench`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import radixmlp
from radixmlp.verify import smollm2
from radixmlp.verify.bars import Bar
from radixmlp.verify.lm_eval_task import CHOICES, SHOTS, Variant, documents, local_task, quiet
from radixmlp.verify.models import DTYPES
from radixmlp.verify.timing import Timings, quantile, time_interleaved

DENSE, ENABLED, COMPACT = "HFLM, dense", "HFLM, enabled", "RadixHFLM"
SHARE_OF_CEILING, SHARE_OF_R = 0.9, 0.85
ITEMS_PER_ROUND, ROUNDS, BATCH_SIZE = 10, 4, 8

Progress = Callable[[str], None]


def run_lm_eval_bench(
    items_per_round: int = ITEMS_PER_ROUND,
    rounds: int = ROUNDS,
    batch_size: int = BATCH_SIZE,
    dtype: str = "float32",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluate with all three variants, interleaved.

    fp32 is the default because predictions must be equal: in bf16 dense itself changes some with the batch.

    Returns:
        A dictionary of plain values: seconds, ratios with quantiles, r, the ceiling and its parts, `differing_items`,
        `largest_difference` (of log-probabilities, as a share of the largest), and `wrong`, a reason or None.

    Raises:
        ValueError: there are not so many items, or SmolLM2 is not installed.
    """
    available = len(documents()[1])
    if not 0 < items_per_round * rounds <= available:
        raise ValueError(f"{rounds} rounds of {items_per_round} items: there are {available} items")
    say = progress or (lambda what: None)
    with quiet():
        say("loading SmolLM2")
        task, variants = local_task(), _variants(dtype, batch_size)
        timings: Timings | None = None
        for number in range(-1, rounds):
            first = max(number, 0) * items_per_round
            items = list(range(first, first + (items_per_round if number >= 0 else 1)))
            names = list(variants)
            names = names[number % len(names) :] + names[: number % len(names)]
            calls = {name: partial(variants[name].run, task, items) for name in names}
            say("warm-up" if number < 0 else f"round {number + 1}/{rounds}")
            measured = time_interleaved(calls, rounds=1, warmup=0)
            if number < 0:
                _forget_warm_up(variants)
            else:
                timings = measured if timings is None else timings.extended(measured)
    assert timings is not None
    return _summary(variants, timings, _expansion_seconds(variants), dtype)


def _variants(dtype: str, batch_size: int) -> dict[str, Variant]:
    from lm_eval.models.huggingface import HFLM

    from radixmlp.optimized.integration.lm_eval import RadixHFLM

    tokenizer = smollm2.load_tokenizer()
    dense = smollm2.load_model(DTYPES[dtype], "sdpa").eval()
    enabled = radixmlp.enable(smollm2.load_model(DTYPES[dtype], "sdpa").eval())
    options: dict[str, Any] = {"tokenizer": tokenizer, "batch_size": batch_size}
    return {
        DENSE: Variant(HFLM(dense, **options)),
        ENABLED: Variant(HFLM(enabled, **options)),
        COMPACT: Variant(RadixHFLM(enabled, **options)),
    }


def _forget_warm_up(variants: dict[str, Variant]) -> None:
    for variant in variants.values():
        variant.model_seconds, variant.slots, variant.rows = [], [], []
        variant.answers, variant.right, variant.dense_reasons = {}, {}, {}


def _expansion_seconds(variants: dict[str, Variant]) -> float:
    """Time a round needs to write its [B, L, V] logits from their distinct rows: the caller asks for all of them."""
    dense, enabled = variants[DENSE], variants[ENABLED]
    batch, length = max(dense.calls, key=lambda shape: shape[0] * shape[1])
    slots = batch * length
    rows = max(1, slots * enabled.rows[-1] // dense.slots[-1])
    embeddings = dense.lm.model.get_input_embeddings().weight
    logits = torch.zeros(rows, embeddings.shape[0], dtype=embeddings.dtype)
    index = torch.arange(slots) % rows
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        logits.index_select(0, index)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * statistics.fmean(dense.slots) / slots


def _summary(variants: dict[str, Variant], timings: Timings, expansion: float, dtype: str) -> dict[str, Any]:
    dense, enabled, compact = (variants[name] for name in (DENSE, ENABLED, COMPACT))
    totals = timings.seconds
    r = [slots / rows for slots, rows in zip(dense.slots, enabled.rows, strict=True)]
    compact_r = [slots / rows for slots, rows in zip(dense.slots, compact.rows, strict=True)]
    outside = [total - model for total, model in zip(totals[DENSE], dense.model_seconds, strict=True)]
    parts = list(zip(totals[DENSE], dense.model_seconds, outside, r, strict=True))
    ceilings = [total / (model / ratio + rest) for total, model, rest, ratio in parts]
    written = [total / (model / ratio + rest + expansion) for total, model, rest, ratio in parts]
    reached = [a / b for a, b in zip(totals[DENSE], totals[ENABLED], strict=True)]
    faster = [a / b for a, b in zip(totals[DENSE], totals[COMPACT], strict=True)]
    return {
        "dtype": dtype,
        "items": len(dense.answers),
        "rounds": timings.rounds,
        "prompt_tokens": round(statistics.fmean(length for _, length in dense.calls)),
        "seconds": {name: timings.median(name) for name in totals},
        "dense_model_seconds": statistics.median(dense.model_seconds),
        "dense_outside_seconds": statistics.median(outside),
        "expansion_seconds": expansion,
        "r": statistics.median(r),
        "ceiling": statistics.median(ceilings),
        "ceiling_with_expansion": statistics.median(written),
        "enabled_speedup": statistics.median(reached),
        "enabled_share_of_ceiling": _spread([a / b for a, b in zip(reached, ceilings, strict=True)]),
        "compact_r": statistics.median(compact_r),
        "compact_speedup": statistics.median(faster),
        "compact_share_of_r": _spread([a / b for a, b in zip(faster, compact_r, strict=True)]),
        "accuracy": {name: _accuracy(variant) for name, variant in variants.items()},
        "differing_items": len(_differing(dense, enabled) | _differing(dense, compact)),
        "largest_difference": max(_largest_difference(dense, other) for other in (enabled, compact)),
        "wrong": _wrong(variants),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "q20": quantile(values, 0.2),
        "q80": quantile(values, 0.8),
    }


def _accuracy(variant: Variant) -> list[float]:
    """[acc, acc_norm] over all items."""
    return [statistics.fmean(column) for column in zip(*variant.right.values(), strict=True)]


def _choice(answers: list[tuple[float, bool]]) -> int:
    return max(range(len(answers)), key=lambda place: answers[place][0])


def _differing(dense: Variant, other: Variant) -> set[int]:
    """Items whose prediction, or being right by either metric, is not dense's."""
    return {
        item
        for item, answers in dense.answers.items()
        if _choice(answers) != _choice(other.answers[item]) or dense.right[item] != other.right[item]
    }


def _largest_difference(dense: Variant, other: Variant) -> float:
    pairs = [
        (a[0], b[0])
        for item, answers in dense.answers.items()
        for a, b in zip(answers, other.answers[item], strict=True)
    ]
    return max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)


def _wrong(variants: dict[str, Variant]) -> str | None:
    """Why the timings mean nothing."""
    for name, variant in variants.items():
        if variant.dense_reasons:
            return f"{name} left batches dense: {variant.dense_reasons}"
    return None


def bars_of(result: dict[str, Any]) -> list[Bar]:
    """The figures to reach, from what `run_lm_eval_bench` returned."""
    shape = (
        f"SmolLM2-135M, {result['dtype']}, lm-eval {SHOTS}-shot, {result['items']} items x {CHOICES} choices, "
        f"about {result['prompt_tokens']} tokens"
    )
    ceiling = (
        f"{shape}; r = {result['r']:.2f}, ceiling {result['ceiling']:.2f}x: dense spends "
        f"{result['dense_outside_seconds']:.1f} of {result['seconds'][DENSE]:.1f} s outside the model"
    )
    wrong = result["wrong"]
    enabled, compact = result["enabled_share_of_ceiling"], result["compact_share_of_r"]
    return [
        Bar("lm-eval: items predicted otherwise than by dense", result["differing_items"], 0, "lower", shape),
        Bar(
            "lm-eval: unchanged HFLM, share of its ceiling",
            enabled["median"],
            SHARE_OF_CEILING,
            "higher",
            ceiling,
            (enabled["q20"], enabled["q80"]),
            wrong=wrong,
            details=result,
        ),
        Bar(
            "lm-eval: RadixHFLM over dense HFLM, as a share of r",
            compact["median"],
            SHARE_OF_R,
            "higher",
            f"{shape}; r = {result['compact_r']:.2f}, {result['compact_speedup']:.2f}x",
            (compact["q20"], compact["q80"]),
            wrong=wrong,
        ),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return what `run_lm_eval_bench` returns."""
    parser = argparse.ArgumentParser(prog="lm_eval_bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--items-per-round", type=int, default=ITEMS_PER_ROUND)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    given = parser.parse_args(argv)
    result = run_lm_eval_bench(
        given.items_per_round,
        given.rounds,
        given.batch_size,
        given.dtype,
        lambda what: print(what, flush=True),
    )
    for name, seconds in result["seconds"].items():
        accuracy = ", ".join(f"{value:.3f}" for value in result["accuracy"][name])
        print(f"{name:14} {seconds:7.2f} s a round   acc, acc_norm: {accuracy}")
    for bar in bars_of(result):
        sign = ">=" if bar.better == "higher" else "<="
        state = "ok" if bar.passed else f"FAILED {bar.wrong or ''}"
        print(f"{bar.name}: {bar.value:.3f} ({sign} {bar.limit:g}) {state}\n    {bar.shape}")
    print(f"largest difference of log-probabilities: {result['largest_difference']:.1e}")
    print(
        f"the caller's [B, L, V] logits take {result['expansion_seconds']:.2f} s a round to write from their "
        f"distinct rows: with them the ceiling is {result['ceiling_with_expansion']:.2f}x"
    )
    return result


if __name__ == "__main__":
    sys.exit(0 if all(bar.passed for bar in bars_of(main())) else 1)
