"""Section `attention`: the trie kernel against FlexAttention and against scatter and varlen flash, one layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import AttentionSpec, TriePlan
from radixmlp.verify.bars import Bar
from radixmlp.verify.gpu_setting import (
    FLEX,
    SCATTER,
    TRIE,
    Setting,
    attention_truth,
    random_qkv,
    share_of_allowed,
)
from radixmlp.verify.gpu_timing import gemm_flops, time_kernels
from radixmlp.verify.ideal import visible_pairs
from radixmlp.verify.timing import Timings, quantile
from radixmlp.verify.workloads import make_workload

PREFIXES = (2048, 256, 1024, 512)  # the judged one first
HEADS, HEAD_DIM = (32, 8), 128  # of Qwen3-8B
JUDGED_PREFIX, SHARE_OF_GEMM, AIMED_SHARE_OF_GEMM = 2048, 0.45, 0.60


def run(setting: Setting) -> None:
    """Qwen3-8B's heads, 32 sequences of 256 own tokens behind a shared prefix."""
    size = 64 if setting.dry else 8192
    gemm = gemm_flops(setting.device, setting.dtype, size)
    setting.emit(
        Bar(
            "attention: TFLOP/s of a matrix product",
            gemm / 1e12,
            None,
            "higher",
            f"{size} x {size} x {size}, {setting.dtype_name}",
        )
    )
    for prefix in (32,) if setting.dry else PREFIXES:
        if setting.seconds_left < 10 and not setting.dry:
            setting.emit(_unmeasured(prefix, "no time was left"))
            continue
        try:
            for bar in measure(setting, prefix, gemm):
                setting.emit(bar)
        except Exception as error:
            setting.emit(_unmeasured(prefix, f"{type(error).__name__}: {error}"[:500]))


def measure(setting: Setting, prefix: int, gemm: float) -> Iterator[Bar]:
    """The trie against each rival in turn on one batch; a rival that refuses becomes a bar that says why."""
    suffix, count = (16, 3) if setting.dry else (256, 32)
    heads, head_dim = ((2, 1), 64) if setting.dry else (HEADS, HEAD_DIM)
    batch = make_workload(f"synthetic:{prefix}+{suffix}x{count}", None, 10_000).batch
    plan = radixmlp.build_plan(batch).to(setting.device)
    layer = _Layer(random_qkv(plan, heads, head_dim, setting.dtype), plan, AttentionSpec(head_dim**-0.5))
    shape = f"{heads[0]}/{heads[1]} heads of {head_dim}, {setting.dtype_name}, {prefix} + {suffix} tokens x {count}"
    pairs = visible_pairs(plan.depth)
    ideal = visible_pairs(TriePlan.identity(batch).depth) / pairs
    wrong = layer.wrong(TRIE)
    for rival in (SCATTER, FLEX):  # FlexAttention last: it compiles for a while
        label = f"attention: trie over {rival} at prefix {prefix}"
        try:
            reasons = [f"{name}: {why}" for name, why in ((TRIE, wrong), (rival, layer.wrong(rival))) if why]
            timings = layer.timed([TRIE, rival], 2 if setting.dry else 20, setting.device)
        except Exception as error:
            yield Bar(label, math.nan, None, "higher", shape, wrong=f"{type(error).__name__}: {error}"[:500])
            continue
        if rival == SCATTER:
            limit = setting.speed_limit(SHARE_OF_GEMM if prefix == JUDGED_PREFIX else None)
            flops = 4.0 * heads[0] * head_dim * pairs
            yield _share_of_gemm(prefix, timings, flops, gemm, limit, shape, wrong)
        ratio = timings.ratio(rival, TRIE)
        yield Bar(
            label,
            ratio.median,
            None,
            "higher",
            shape,
            (ratio.q20, ratio.q80),
            ideal if rival == SCATTER else None,
            "; ".join(reasons) or None,
            {f"{name}_ms": timings.median(name) * 1e3 for name in timings.seconds},
        )


class _Layer:
    """One attention layer's inputs, its truth, and the backends on them."""

    def __init__(self, qkv: tuple[Tensor, Tensor, Tensor], plan: TriePlan, spec: AttentionSpec) -> None:
        self._inputs = (*qkv, plan, spec)
        self._truth, self._rounded = attention_truth(*qkv, plan, spec)

    @torch.no_grad()
    def attend(self, name: str) -> Tensor:
        q, k, v, plan, spec = self._inputs
        return radixmlp.attention_backends()[name](q, k, v, plan, spec)

    def wrong(self, name: str) -> str | None:
        """Why the backend's result is wrong, or None."""
        share, details = share_of_allowed(self.attend(name), self._truth, [self._rounded])
        return None if share <= 1 else f"its error is {share:.2f} times the allowed: {details}"

    def timed(self, names: list[str], rounds: int, device: torch.device) -> Timings:
        return time_kernels({name: partial(self.attend, name) for name in names}, rounds, device)


def _share_of_gemm(
    prefix: int,
    timings: Timings,
    flops: float,
    gemm: float,
    limit: float | None,
    shape: str,
    wrong: str | None,
) -> Bar:
    seconds = timings.seconds[TRIE]
    fast, slow = quantile(seconds, 0.2), quantile(seconds, 0.8)
    details = {
        "ms": timings.median(TRIE) * 1e3,
        "useful_tflops": flops / timings.median(TRIE) / 1e12,
        "aim": AIMED_SHARE_OF_GEMM,
    }
    return Bar(
        f"attention: trie at prefix {prefix}, share of the matrix product's rate over useful FLOPs",
        flops / timings.median(TRIE) / gemm,
        limit,
        "higher",
        shape,
        (flops / slow / gemm, flops / fast / gemm),
        wrong=wrong,
        details=details,
    )


def _unmeasured(prefix: int, reason: str) -> Bar:
    return Bar(f"attention: prefix {prefix}", math.nan, None, "higher", "", wrong=reason, broken=True)
