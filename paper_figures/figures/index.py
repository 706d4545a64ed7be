"""Figure 4: tokens a second of the index builders: published, `radix-mlp` here, ours."""

from __future__ import annotations

from typing import Any

from ..data import Data, Drawing, Point
from ..published import index_times
from ..style import LOOKS, absent, legend_below, measured, new_figure, plain_log, published

METRIC = ", index_speedup_vs_radix_mlp"
SHARED = ", 25% shared"


def main(data: Data) -> Drawing:
    """Left: throughput against the batch's tokens. Right: speed-up over the Rust package, with its spread."""
    rows = [p for p in data.bars("index: ") if p.series.endswith(METRIC) and SHARED in p.series]
    rows = [p for p in rows if "microseconds" in p.details]
    figure, [[left, right]] = new_figure(2, size=(9.4, 4.4))
    _throughput(left, rows)
    _speedup(right, rows)
    legend_below(figure, [left, right], columns=3)
    caption = (
        "One thread. Left: medians, with quantiles where they were kept; both builders get what they take, "
        "in one process, interleaved. Right: the same runs as paired ratios, whiskers from the 20% to the "
        "80% quantile. 25% of each sequence is shared. Stars: published for the Rust package, on other "
        f"hardware. Nothing is predicted. {data.provenance()}"
    )
    return Drawing(4, "index", "Index builder: throughput", caption, figure)


def _throughput(axes: Any, rows: list[Point]) -> None:
    facts = [fact for fact in index_times() if fact.throughput_mtok_per_s is not None]
    published(axes, [f.tokens for f in facts], [f.throughput_mtok_per_s for f in facts], "radix-mlp (Rust)")
    for key, path, label in (("peer_microseconds", "rust", "radix-mlp"), ("microseconds", "trie", "ours")):
        points = [_rate(p, key) for p in rows]
        measured(axes, points, path, label, line=False)
    axes.set_yscale("log")
    plain_log(axes, "y", (5, 10, 20, 50, 100, 200, 500, 1000))
    _tokens(axes)
    axes.set_ylabel("throughput (million tokens a second)")


def _rate(point: Point, key: str) -> Point:
    """Throughput from the median time of a call, with its quantiles where the file has them."""
    tokens = point.details["num_tokens"]
    slow, fast = reversed(point.details.get(f"{key}_q20_q80") or (None, None))
    q20, q80 = (None if time is None else tokens / time for time in (slow, fast))
    return Point("index", key, tokens, tokens / point.details[key], "Mtok/s", point.shape, q20, q80)


def _speedup(axes: Any, rows: list[Point]) -> None:
    points = [
        Point("index", "ours", p.details["num_tokens"], p.y, "times", p.shape, p.q20, p.q80) for p in rows
    ]
    if points:
        measured(axes, points, "trie", "ours over radix-mlp", line=False)
    else:
        absent(axes, "ours over radix-mlp", LOOKS["trie"])
    axes.axhline(1, color=LOOKS["dense"].color, linewidth=1)
    axes.set_ylabel("speed-up over radix-mlp here (times)")
    axes.set_ylim(bottom=0)
    _tokens(axes)


def _tokens(axes: Any) -> None:
    plain_log(axes, "x", (4096, 16_384, 65_536, 262_144, 1_048_576))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("tokens in the batch")
