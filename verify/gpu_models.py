"""Sections `qwen3-*`: whole models with random weights, dense against the paper's path and the trie's.

What is timed is a whole call: the plan is built, the backbone runs, and the head makes the last token's logits.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import TIMED, Bar
from radixmlp.verify.gpu_setting import DENSE_FLASH, SCATTER, TRIE, Setting, share_of_allowed
from radixmlp.verify.ideal import DecoderShape, ideal_speedup, path_of
from radixmlp.verify.memory import peak_of
from radixmlp.verify.models import cast_parameters
from radixmlp.verify.oracle import Outputs, each_alone
from radixmlp.verify.timing import Timings, time_interleaved
from radixmlp.verify.variants import DENSE, Variant, build_variants, warm_up
from radixmlp.verify.workloads import make_workload

PREFIXES = (2048, 1024, 512, 256)  # the judged one first
SUFFIX, SEQUENCES = 256, 32
DENSE_ALL = (*DENSE, DENSE_FLASH)
OURS = {"trie": TRIE, "scatter": SCATTER}
_MOST_ROUNDS, _FEWEST_ROUNDS = 7, 3
_TRUTH_BYTES = 2 + 4  # of a weight while the truth is computed: bf16, and its fp32 copy


@dataclass(frozen=True)
class Size:
    """A published Qwen3 model; heads of 128, 8 of them for keys and values.

    `bars`: what the speed-ups must reach at the longest prefix, by path.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    tie_word_embeddings: bool
    bars: dict[str, float]


SIZES = {
    "qwen3-0.6b": Size(1024, 3072, 28, 16, True, {}),
    "qwen3-4b": Size(2560, 9728, 36, 32, True, {}),
    "qwen3-8b": Size(4096, 12288, 36, 32, False, {"trie": 6.5, "scatter": 4.5}),
}


def run(setting: Setting, name: str) -> None:
    """One model at each prefix: speed-ups over the fastest dense, peak memory, parity."""
    size = SIZES[name]
    layers = size.num_hidden_layers if not setting.dry else 2
    if not setting.dry:
        layers = min(layers, _layers_that_fit(size))
    model = make_model(size, layers, setting)
    depth = f"all {layers}" if layers == size.num_hidden_layers else f"{layers} of {size.num_hidden_layers}"
    width = "tiny widths in place of its own, " if setting.dry else ""
    words = f"{name}, {width}{depth} layers, random weights, {setting.dtype_name}"
    needed = 0.0  # seconds of the longest prefix so far
    for prefix in (32,) if setting.dry else PREFIXES:
        started = time.monotonic()
        if not setting.dry and setting.seconds_left < max(10.0, needed):
            setting.emit(_unmeasured(name, prefix, "no time was left"))
            continue
        try:
            for bar in measure(setting, name, size, model, prefix, words):
                setting.emit(bar)
        except Exception as error:
            setting.emit(_unmeasured(name, prefix, f"{type(error).__name__}: {error}"[:500]))
        needed = max(needed, time.monotonic() - started)


@torch.no_grad()
def make_model(size: Size, layers: int, setting: Setting) -> Any:
    """Random weights, made on the device itself in the dtype that runs; rotary tables stay fp32."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    tiny = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    real = {
        "vocab_size": 151_936,
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_attention_heads": size.num_attention_heads,
    }
    config = Qwen3Config(
        **(tiny if setting.dry else real),
        num_hidden_layers=layers,
        num_key_value_heads=1 if setting.dry else 8,
        head_dim=64 if setting.dry else 128,
        tie_word_embeddings=size.tie_word_embeddings,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    torch.manual_seed(0)
    with setting.device:
        model = AutoModelForCausalLM.from_config(config, dtype=setting.dtype, attn_implementation="sdpa")
    return cast_parameters(model.to(setting.device), setting.dtype).eval()


def measure(setting: Setting, name: str, size: Size, model: Any, prefix: int, words: str) -> Iterator[Bar]:
    """Bars of one batch: parity first, then time and memory of what answers."""
    suffix, count = (8, 3) if setting.dry else (SUFFIX, SEQUENCES)
    vocabulary = int(model.config.vocab_size)
    batch = make_workload(f"synthetic:{prefix}+{suffix}x{count}", None, vocabulary).batch.to(setting.device)
    refused = _refused(model, [*DENSE_ALL, *OURS.values()])
    names = [variant for variant in (*DENSE_ALL, *OURS.values()) if variant not in refused]
    wrong, bars = _parity(setting, name, model, batch, prefix, names)
    yield from bars
    wrong |= refused
    calls = build_variants(model, batch, names)
    timings = _timed(setting, calls, names)
    dense = timings.fastest([variant for variant in DENSE_ALL if variant in timings.seconds])
    plan = radixmlp.build_plan(batch)
    flops = ideal_speedup(DecoderShape.from_config(model.config), batch, plan, batch.num_sequences)
    shape = f"{words}, {prefix} + {suffix} tokens x {count}, r = {plan.compression_ratio:.1f}; {TIMED}"
    for path, variant in OURS.items():
        label = f"{name}: {path} over dense at prefix {prefix}"
        if variant not in timings.seconds:
            yield Bar(label, math.nan, None, "higher", shape, wrong=wrong.get(variant))
            continue
        reasons = [f"{which}: {wrong[which]}" for which in (variant, dense) if which in wrong]
        limit = setting.speed_limit(size.bars.get(path) if prefix == PREFIXES[0] else None)
        ideal = flops.speedup(path_of(variant))
        yield _speed_bar(label, timings, variant, dense, limit, shape, ideal, "; ".join(reasons) or None)
    peaks = {variant: peak_of(calls[variant], setting.device) for variant in timings.seconds}
    for path, variant in OURS.items():
        if variant in peaks:
            label = f"{name}: {path}'s peak memory over dense at prefix {prefix}"
            details = {"peak_mb": peaks, "against": dense, "one_over_r": plan.gamma}
            share = peaks[variant] / peaks[dense] if peaks[dense] > 0 else math.nan
            yield Bar(label, share, None, "lower", f"{shape}; above the weights", details=details)


def _speed_bar(
    label: str,
    timings: Timings,
    variant: str,
    dense: str,
    limit: float | None,
    shape: str,
    ideal: float,
    wrong: str | None,
) -> Bar:
    ratio = timings.ratio(dense, variant)
    details = {
        "seconds": timings.median(variant),
        "against": dense,
        "against_seconds": timings.median(dense),
        "rounds": timings.rounds,
    }
    quantiles = (ratio.q20, ratio.q80)
    return Bar(label, ratio.median, limit, "higher", shape, quantiles, ideal, wrong, details)


def _refused(model: Any, names: list[str]) -> dict[str, str]:
    """Which variants cannot serve this model here, and why; the others are compiled by this."""
    refused = {}
    for name in names:
        try:
            warm_up(model, [name])
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:500]
    return refused


def _timed(setting: Setting, calls: dict[str, Variant], names: list[str]) -> Timings:
    """Rounds of our variants and of the dense that one call on this batch shows to be the fastest."""
    synchronize = None if setting.dry else torch.cuda.synchronize
    started = time.monotonic()
    first = time_interleaved(calls, 1, warmup=1, synchronize=synchronize)
    dense = first.fastest([name for name in DENSE_ALL if name in names])
    kept = {name: call for name, call in calls.items() if name not in DENSE_ALL or name == dense}
    round_seconds = sum(first.median(name) for name in kept)
    spent = time.monotonic() - started
    affordable = int(max(0.0, min(setting.seconds_left / 3, 4 * spent)) / max(round_seconds, 1e-3))
    rounds = 1 if setting.dry else min(_MOST_ROUNDS, max(_FEWEST_ROUNDS, affordable))
    return time_interleaved(kept, rounds, warmup=0, synchronize=synchronize)


@torch.no_grad()
def _parity(
    setting: Setting, name: str, model: Any, batch: RaggedBatch, prefix: int, names: list[str]
) -> tuple[dict[str, str], list[Bar]]:
    """(why a path is wrong, by variant; its bars): hidden states and last logits of two sequences of the batch.

    The truth is the model in fp32, each sequence alone; the dense backends and the model's own forward in the
    same dtype set the scale.
    """
    sample = [0, batch.num_sequences // 2]
    bounds = batch.cu_seqlens.tolist()
    rows = torch.cat([torch.arange(bounds[b], bounds[b + 1], device=setting.device) for b in sample])
    picked = RaggedBatch.from_sequences([batch.input_ids[bounds[b] : bounds[b + 1]].tolist() for b in sample])
    picked = picked.to(setting.device)
    outputs = {}
    for variant in names:
        if variant not in DENSE:
            out = radixmlp.forward(model, batch, attention=variant, logits_to_keep=1)
            assert out.logits is not None
            outputs[variant] = Outputs(out.last_hidden_state[rows], out.logits[sample])
            del out
    own = each_alone(model, picked, keep=1)
    truth = each_alone(cast_parameters(copy.deepcopy(model), torch.float32), picked, keep=1)
    legitimate = [own, *(outputs[variant] for variant in outputs if variant == DENSE_FLASH)]
    wrong, bars = {}, []
    for variant in (*OURS.values(), DENSE_FLASH):
        if variant not in outputs:
            continue
        against = [own] if variant == DENSE_FLASH else legitimate
        for part in ("last_hidden_state", "logits"):
            got, exact = (_part(x, part) for x in (outputs[variant], truth))
            share, details = share_of_allowed(got, exact, [_part(x, part) for x in against])
            label = f"{name}: error of {variant}'s {part} over the allowed at prefix {prefix}"
            words = f"sequences {sample} of the batch, truth in fp32"
            bars.append(Bar(label, share, 1.0, "lower", words, details=details))
            if not share <= 1:
                wrong[variant] = f"the error of its {part} is {share:.2f} times the allowed"
    return wrong, bars


def _part(outputs: Outputs, part: str) -> Tensor:
    values = getattr(outputs, part)
    assert isinstance(values, Tensor)
    return values


def _layers_that_fit(size: Size) -> int:
    """Layers for which weights, their fp32 copy and a dense pass over the longest batch fit into memory."""
    free, _ = torch.cuda.mem_get_info()
    heads = (2 * size.num_attention_heads + 2 * 8) * 128
    layer = size.hidden_size * (heads + 3 * size.intermediate_size)
    ends = 151_936 * size.hidden_size * (1 if size.tie_word_embeddings else 2)
    tokens = (PREFIXES[0] + SUFFIX) * SEQUENCES
    activations = 2 * tokens * (4 * size.intermediate_size + 8 * size.hidden_size + 2 * heads)
    return max(1, int((free * 0.95 - activations - _TRUTH_BYTES * ends) / (_TRUTH_BYTES * layer)))


def _unmeasured(name: str, prefix: int, reason: str) -> Bar:
    return Bar(f"{name}: prefix {prefix}", math.nan, None, "higher", "", wrong=reason, broken=True)
