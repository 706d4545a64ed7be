"""Section `values`: every kernel against fp64, before any of them is timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import radixmlp
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.verify import rules
from radixmlp.verify.bars import Bar
from radixmlp.verify.gpu_setting import Setting, random_qkv, share_of_allowed
from radixmlp.verify.gpu_setting import attention_truth as truth_of

_SECONDS_A_CHECK = 8  # kernels are compiled first
ONE_ROUNDING = {
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}  # of the largest value; fp32: `rules.FLOAT32`


def run(setting: Setting) -> None:
    """Copies bit by bit, sums and rotations to one rounding, attention by the rule of `rules.py`, with gradients."""
    checks: list[tuple[str, Callable[[Setting, torch.dtype], Iterator[Bar]]]] = [
        ("copies", _copies),
        ("segment_sum", _segment_sum),
        ("rope_scatter", _rope_scatter),
        *((f"trie_attention d{dim}", partial(_attention, head_dim=dim)) for dim in _head_dims(setting)),
    ]
    dtypes = (torch.float16, torch.float32) if setting.dry else (torch.bfloat16, torch.float16, torch.float32)
    for name, check in checks:
        for dtype in dtypes:
            if setting.seconds_left < _SECONDS_A_CHECK and not setting.dry:
                setting.emit(_unchecked(f"{name}, {dtype}", "no time was left"))
                continue
            try:
                for bar in check(setting, dtype):
                    setting.emit(bar)
            except Exception as error:  # the other kernels are still worth checking
                setting.emit(_unchecked(f"{name}, {dtype}", f"{type(error).__name__}: {error}"[:500]))


def _head_dims(setting: Setting) -> tuple[int, ...]:
    return (64,) if setting.dry else (128, 64, 256)


def _copies(setting: Setting, dtype: torch.dtype) -> Iterator[Bar]:
    """Differing elements of `gather_rows` and `scatter_rows` from PyTorch's own."""
    from radixmlp.kernels.chunks import Segments
    from radixmlp.kernels.rows import gather_rows, scatter_rows

    rows, device = (137 if setting.dry else 20_001), setting.device
    random = torch.Generator(device).manual_seed(1)
    whole = torch.randn(rows, 6, 136, generator=random, device=device).to(dtype)
    for shape, x in {"[rows, 136]": whole[:, 0], "[rows, 6, 129]": whole[..., :129], "whole": whole}.items():
        index = torch.randint(rows, (rows + 50,), generator=random, device=device, dtype=torch.int32)
        for kind, segments in {"": None, " with segments": Segments.of(index, rows)}.items():
            wrong = int((gather_rows(x, index, segments) != x[index.long()]).sum())
            yield _bar(f"gather_rows {shape}{kind}, {dtype}: differing elements", wrong, 0.0, f"{rows} rows")
        index = torch.randperm(rows + 50, generator=random, device=device)[:rows].to(torch.int32)
        expected = x.new_zeros(rows + 50, *x.shape[1:]).index_copy_(0, index.long(), x)
        wrong = int((scatter_rows(x, index, rows + 50) != expected).sum())
        yield _bar(f"scatter_rows {shape}, {dtype}: differing elements", wrong, 0.0, f"{rows} rows")


def _segment_sum(setting: Setting, dtype: torch.dtype) -> Iterator[Bar]:
    """One segment holds most rows, others few, some none."""
    from radixmlp.kernels.chunks import Segments
    from radixmlp.kernels.segments import segment_sum

    rows, device = (300 if setting.dry else 12_000), setting.device
    random = torch.Generator(device).manual_seed(2)
    x = torch.randn(rows, 72, generator=random, device=device).to(dtype)
    index = torch.randint(400, (rows,), generator=random, device=device)
    index[: rows * 5 // 6] = 7
    segments = Segments.of(index.to(torch.int32), 400)
    got = segment_sum(x, segments)
    expected = x.new_zeros(400, 72, dtype=torch.float64).index_add_(0, index, x.double())
    yield _rounded("segment_sum", got, expected, f"{rows} rows, {rows * 5 // 6} of them on one segment")
    again = int((segment_sum(x, segments) != got).sum())
    yield _bar(f"segment_sum, {dtype}: elements that differ in a second run", again, 0.0, f"{rows} rows")


def _rope_scatter(setting: Setting, dtype: torch.dtype) -> Iterator[Bar]:
    from radixmlp.kernels.chunks import scatter_segments
    from radixmlp.kernels.rope import rope_scatter

    plan = _plans(setting)["prefix and branches"].to(setting.device)
    q, k, v = random_qkv(plan, (4, 2), 64, dtype)
    angles = plan.position_ids[:, None].double() * 10_000.0 ** -torch.linspace(
        0, 1, 32, device=setting.device
    )
    angles = torch.cat([angles, angles], 1)
    cos, sin = angles.cos().float(), angles.sin().float()
    got = rope_scatter(q, k, v, cos, sin, scatter_segments(plan))
    for name, out, x in zip("qk", got, (q, k), strict=False):
        wide = x.double()
        turned = torch.cat([-wide[..., 32:], wide[..., :32]], -1)
        expected = (wide * cos.double()[:, None] + turned * sin.double()[:, None])[plan.scatter.long()]
        yield _rounded(
            f"rope_scatter {name}", out, expected, f"{plan.num_nodes} nodes, {plan.num_tokens} tokens"
        )
    wrong = int((got[2] != v[plan.scatter.long()]).sum())
    yield _bar(f"rope_scatter v, {dtype}: differing elements", wrong, 0.0, f"{plan.num_tokens} tokens")


def _attention(setting: Setting, dtype: torch.dtype, head_dim: int) -> Iterator[Bar]:
    """`trie-triton`, forward and gradients; the reference in the same dtype sets the scale."""
    backend = radixmlp.attention_backends()["trie-triton"]
    for trie, plan in _plans(setting).items():
        plan = plan.to(setting.device)
        for kind, spec in _specs(setting.device, head_dim).items():
            q, k, v = (x.requires_grad_() for x in random_qkv(plan, (4, 2), head_dim, dtype))
            learned = [q, k, v, *([] if spec.sinks is None else [spec.sinks.requires_grad_()])]
            truth, rounded = truth_of(q, k, v, plan, spec)
            outs = (backend(q, k, v, plan, spec), truth, rounded)
            weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(3)).to(truth)
            grads = [
                torch.autograd.grad((out * weights.to(out.dtype)).sum(), learned, retain_graph=True)
                for out in outs
            ]
            of_each = zip(*grads, strict=True)
            results = {"out": outs, **dict(zip(("dq", "dk", "dv", "dsinks"), of_each, strict=False))}
            for part, (mine, exact, legitimate) in results.items():
                share, details = share_of_allowed(
                    mine.detach(), exact.detach().double(), [legitimate.detach()]
                )
                name = f"trie_attention d{head_dim} {kind} {part}, {dtype}: error over the allowed"
                yield _bar(name, share, 1.0, f"{trie}, {plan.num_nodes} nodes", details=details)


def _specs(device: torch.device, head_dim: int) -> dict[str, AttentionSpec]:
    sinks = torch.linspace(-1, 2, 4, device=device)
    scale = head_dim**-0.5
    return {
        "plain": AttentionSpec(scale),
        "window, softcap, sinks": AttentionSpec(scale, sliding_window=50, softcap=8.0, sinks=sinks),
    }


def _plans(setting: Setting) -> dict[str, TriePlan]:
    few, own = (3, 20) if setting.dry else (24, 90)
    prefix = [[*range(130 if setting.dry else 700), 5000 + b, *range(own)] for b in range(few)]
    levels = [[*range(90), i, *range(60), j, *range(70 + j)] for i in range(4) for j in range(5)]
    batches = {"prefix and branches": prefix, **({} if setting.dry else {"three levels": levels})}
    return {name: radixmlp.build_plan(RaggedBatch.from_sequences(rows)) for name, rows in batches.items()}


def _rounded(name: str, got: Tensor, expected: Tensor, shape: str) -> Bar:
    """The largest error over one rounding of the largest value (fp32: over 1e-5 of it)."""
    allowed = ONE_ROUNDING.get(got.dtype, rules.FLOAT32)
    rows = got.shape[0]
    errors = rules.errors_against(got.reshape(rows, -1), expected.reshape(rows, -1))
    return _bar(f"{name}, {got.dtype}: error over the allowed", errors.largest / allowed, 1.0, shape)


def _bar(name: str, value: float, limit: float, shape: str, **more: object) -> Bar:
    return Bar(f"values: {name.replace('torch.', '')}", value, limit, "lower", shape, **more)  # type: ignore[arg-type]


def _unchecked(name: str, reason: str) -> Bar:
    return _bar(name, math.nan, 1.0, "", wrong=reason, broken=True)
