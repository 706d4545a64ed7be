"""This project's numbers beside the published ones: other hardware, so they are shown, not judged."""

from __future__ import annotations

from .data import Data, Measured
from .data_models import TITLES, WIDTHS
from .published import index_times, reranking, row_copies, synthetic

NONE = "not measured"


def beside_published(new: Measured) -> list[tuple[str, str, str, str]]:
    """Rows of what, published (H100, or the paper's CPU), measured, and what was measured."""
    data = Data(new)
    return [*_synthetic(data), *_msmarco(data), *_index(data), *_copies(data)]


def _synthetic(data: Data) -> list[tuple[str, str, str, str]]:
    rows = []
    models = {title: model for model, title in TITLES.items()}
    for fact in synthetic():
        model = models[fact.model]
        points = {p.x: p for p in data.points("prefix", f"{WIDTHS[model]} trie")}
        headline = data.bar("qwen3-8b: trie over dense", 2048)
        if model == "8b" and headline is not None:
            points[2048] = headline
        point = points.get(fact.prefix_tokens)
        what = f"{fact.model}, {fact.prefix_tokens} shared tokens: speed-up"
        here = NONE if point is None else f"{point.y:.2f}x (the trie)"
        rows.append((what, f"{fact.speedup:.1f}x", here, "" if point is None else point.shape.split(";")[0]))
    return rows


def _msmarco(data: Data) -> list[tuple[str, str, str, str]]:
    points = data.points("rerank", "trie")
    here = f"{points[0].details['speedup']:.2f}x (the trie)" if points else NONE
    shape = points[0].shape if points else ""
    return [
        (f"MS MARCO, {fact.model}: speed-up", f"{fact.speedup:.2f}x", here, shape) for fact in reranking()
    ]


def _index(data: Data) -> list[tuple[str, str, str, str]]:
    rows = []
    for fact in index_times():
        if fact.throughput_mtok_per_s is None:
            continue
        point = data.bar(
            f"index: {fact.sequences} x {fact.tokens_per_sequence}, 25% shared, index_speedup_vs_radix_mlp"
        )
        here = NONE
        if point is not None:
            here = f"{point.details['num_tokens'] / point.details['microseconds']:.0f} Mtok/s"
        what = f"index, {fact.sequences} x {fact.tokens_per_sequence} tokens"
        rows.append((what, f"{fact.throughput_mtok_per_s:.1f} Mtok/s", here, "25% shared, one thread"))
    return rows


def _copies(data: Data) -> list[tuple[str, str, str, str]]:
    rows = []
    for place, fact in enumerate(row_copies()):
        point = next((p for p in data.points("copies", "index_select") if p.x == place), None)
        here = NONE if point is None else f"{point.y:.0f} us (index_select, CPU)"
        rows.append((f"rows {fact.shape}, fp16", f"{fact.kernel_us:g} us", here, "every row permuted"))
    return rows
