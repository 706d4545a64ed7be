"""Section `copies`: the paper's three gather/scatter shapes, and its attention boundary, against copy bandwidth.

Bandwidth is what PyTorch's own copy of as many bytes reaches in the same rounds.
"""

from __future__ import annotations

import math

import torch

import radixmlp
from radixmlp.verify.bars import Bar
from radixmlp.verify.gpu_setting import Setting, random_qkv
from radixmlp.verify.gpu_timing import time_kernels
from radixmlp.verify.timing import Timings
from radixmlp.verify.workloads import make_workload

# arXiv 2601.15013, on an H100 in fp16: shape -> (native us, theirs us), published.
PUBLISHED = {(16_000, 1024): (106, 28), (100_000, 2048): (33_700, 1470), (2_000, 64, 256): (2880, 211)}
DRY_SHAPES = ((40, 64), (30, 128), (20, 2, 64))
SHARE_OF_COPY = 0.85
OURS, NATIVE = ("gather_rows", "scatter_rows"), {"gather_rows": "index_select", "scatter_rows": "index_copy_"}


def run(setting: Setting) -> None:
    """All three shapes in fp16, every row moved to another place; then Q, K and V of one layer of Qwen3-8B."""
    for shape in DRY_SHAPES if setting.dry else tuple(PUBLISHED):
        for bar in measure(setting, shape):
            setting.emit(bar)
    for bar in measure_boundary(setting):
        setting.emit(bar)


def measure(setting: Setting, shape: tuple[int, ...]) -> list[Bar]:
    """Two bars a kernel: its share of copy bandwidth, and its speed-up over PyTorch's."""
    from radixmlp.kernels.rows import gather_rows, scatter_rows

    rows, device = shape[0], setting.device
    random = torch.Generator(device).manual_seed(0)
    x = torch.randn(*shape, generator=random, device=device, dtype=torch.float32).to(torch.float16)
    index = torch.randperm(rows, generator=random, device=device)
    short = index.to(torch.int32)
    out = torch.empty_like(x)
    calls = {
        "copy": lambda: out.copy_(x),
        "gather_rows": lambda: gather_rows(x, short),
        "index_select": lambda: torch.index_select(x, 0, short),
        "scatter_rows": lambda: scatter_rows(x, short, rows),
        "index_copy_": lambda: out.index_copy_(0, index, x),
    }
    wrong = {
        "gather_rows": None if torch.equal(calls["gather_rows"](), x[index]) else "rows differ from x[index]",
        "scatter_rows": None if torch.equal(calls["scatter_rows"]()[index], x) else "rows differ from x",
    }
    timings = time_kernels(calls, 3 if setting.dry else 50, device)
    return [bar for name in OURS for bar in _bars(setting, shape, name, timings, wrong[name])]


def _bars(
    setting: Setting, shape: tuple[int, ...], name: str, timings: Timings, wrong: str | None
) -> list[Bar]:
    moved = 2 * 2 * math.prod(shape)  # bytes read and written, fp16
    with_index = moved + 4 * shape[0]
    words = f"{list(shape)} fp16, rows permuted, cold L2, events"
    share = _share_of_copy(setting, f"{name} {list(shape)}", name, timings, with_index / moved, words, wrong)
    ratio = timings.ratio(NATIVE[name], name)
    details = {f"{which}_us": timings.median(which) * 1e6 for which in (name, NATIVE[name])}
    if shape in PUBLISHED:
        details |= dict(zip(("published_native_us", "published_theirs_us"), PUBLISHED[shape], strict=True))
    quantiles = (ratio.q20, ratio.q80)
    label = f"copies: {name} {list(shape)} over {NATIVE[name]}"
    against = Bar(label, ratio.median, None, "higher", words, quantiles, wrong=wrong, details=details)
    return [share, against]


def measure_boundary(setting: Setting) -> list[Bar]:
    """Compact Q, K, V to the ragged layout in one launch, without RoPE and with it.

    Counted are the bytes that must move: each compact row is read once, each ragged row written once.
    """
    from radixmlp.kernels.chunks import scatter_segments
    from radixmlp.kernels.rope import rope_scatter
    from radixmlp.kernels.rows import gather_rows_together

    heads, dim, batch = ((2, 1), 64, "24+8x3") if setting.dry else ((32, 8), 128, "2048+256x32")
    plan = radixmlp.build_plan(make_workload(f"synthetic:{batch}", None, 10_000).batch).to(setting.device)
    q, k, v = random_qkv(plan, heads, dim, setting.dtype)
    segments, rows = scatter_segments(plan), plan.scatter.long()
    quarter = torch.full((plan.num_nodes, dim), math.pi / 2, device=setting.device)
    cos, sin = quarter.cos(), quarter.sin()  # 0 and 1: RoPE swaps halves exactly
    row_bytes = (heads[0] + 2 * heads[1]) * dim * q.element_size()
    moved = {"Q, K, V expanded": (plan.num_nodes + plan.num_tokens) * row_bytes + 4 * plan.num_tokens}
    moved["rope_scatter"] = moved["Q, K, V expanded"] + 2 * cos.nbytes
    source = torch.empty(moved["rope_scatter"] // 2, dtype=torch.int8, device=setting.device)
    target = torch.empty_like(source)
    calls = {
        "copy": lambda: target.copy_(source),
        "Q, K, V expanded": lambda: gather_rows_together((q, k, v), plan.scatter, segments),
        "rope_scatter": lambda: rope_scatter(q, k, v, cos, sin, segments),
    }
    turned = [torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1) for x in (q, k)]
    expected = {"Q, K, V expanded": (q, k, v), "rope_scatter": (*turned, v)}
    timings = time_kernels(calls, 2 if setting.dry else 30, setting.device)
    shape = f"{heads[0]}/{heads[1]} heads of {dim}, {setting.dtype_name}, {batch} tokens, cold L2, events"
    bars = []
    for name, bytes_moved in moved.items():
        pairs = zip(calls[name](), expected[name], strict=True)
        right = all(torch.allclose(got, x[rows], rtol=0, atol=1e-4) for got, x in pairs)
        wrong = None if right else "rows differ from those expected"
        scale = bytes_moved / (2 * source.nbytes)
        bars.append(_share_of_copy(setting, name, name, timings, scale, shape, wrong))
    return bars


def _share_of_copy(
    setting: Setting, name: str, call: str, timings: Timings, scale: float, shape: str, wrong: str | None
) -> Bar:
    """`scale`: the bytes of `call` over those of the copy."""
    ratio = timings.ratio("copy", call)
    return Bar(
        f"copies: {name}, share of copy bandwidth",
        ratio.median * scale,
        setting.speed_limit(SHARE_OF_COPY),
        "higher",
        shape,
        (ratio.q20 * scale, ratio.q80 * scale),
        wrong=wrong,
        details={f"{which}_us": timings.median(which) * 1e6 for which in ("copy", call)},
    )
