"""What this project claims besides its bars: rules that measured, predicted or published numbers obey."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .data import Data, Point
from .data_models import QWEN3, TITLES
from .roofline import DEVICES, Work, predicted_speedup

NOISE = 0.02  # a median may fall this far below a claimed bound before the claim is broken
NOT_SLOWER = 0.02  # of dense, where nothing is shared


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds; None: there is no data for it. `why` gives the numbers."""

    name: str
    holds: bool | None
    why: str


@dataclass(frozen=True)
class Claim:
    """`rule` returns what breaks the claim ("": it holds), or None where the data are missing."""

    name: str
    rule: Callable[[Data], str | None]

    def judge(self, data: Data) -> Verdict:
        found = self.rule(data)
        if found is None:
            return Verdict(self.name, None, "not measured")
        return Verdict(self.name, not found, found or "holds")


def _headline_order(data: Data) -> str | None:
    trie, scatter = (data.bar(f"qwen3-0.6b: {path} over dense") for path in ("trie", "scatter"))
    if trie is None or scatter is None:
        return None
    return _broken(
        not trie.y > scatter.y > 1, f"trie {trie.y:.2f}, the paper's path {scatter.y:.2f}, dense 1"
    )


def _order_at_every_prefix(data: Data) -> str | None:
    return _at_every_x(data, "prefix", [f"{model} {{}}" for model in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")])


def _order_at_long_contexts(data: Data) -> str | None:
    return _at_every_x(data, "long", ["{}"])


def _grows_with_the_prefix(data: Data) -> str | None:
    points = data.points("prefix", "qwen3-0.6b trie")
    if len(points) < 2:
        return None
    first, last = points[0], points[-1]
    return _broken(last.y <= first.y, f"{last.y:.2f} at {last.x:g} tokens, {first.y:.2f} at {first.x:g}")


def _query_first_shares_more(data: Data) -> str | None:
    query, document = (
        data.points("gamma", f"rerank, {order}") for order in ("query first", "document first")
    )
    if not query or not document:
        return None
    return _broken(query[0].y >= document[0].y, f"gamma {query[0].y:.2f} and {document[0].y:.2f}")


def _never_slower(data: Data) -> str | None:
    points = [p for p in data.points("low", "auto") if p.x == 0]
    if not points:
        return None
    point = points[0]
    fastest = point.q80 if point.q80 is not None else point.y
    return _broken(max(point.y, fastest) < 1 - NOT_SLOWER, f"auto runs at {point.y:.3f} of dense")


def _leaner(data: Data) -> str | None:
    trie, scatter = data.points("memory", "trie"), data.points("memory", "scatter")
    if not trie or not scatter:
        return None
    wrong = not trie[0].y <= scatter[0].y * (1 + NOISE) or trie[0].y >= 1
    return _broken(wrong, f"trie {trie[0].y:.2f}, the paper's path {scatter[0].y:.2f}, dense 1")


def _predicted_order(_: Data) -> str | None:
    work = Work.shared_prefix(2048, 256, 32).without_head()
    device = DEVICES["h100"]
    texts = []
    for model, shape in QWEN3.items():
        trie, scatter = (predicted_speedup(device, shape, work, path) for path in ("trie", "scatter"))
        if not trie > scatter > 1:
            texts.append(f"{model}: trie {trie:.2f}, the paper's path {scatter:.2f}")
    return "; ".join(texts)


def _published_order(_: Data) -> str | None:
    from .published import synthetic

    best = {model: max(p.speedup for p in synthetic() if p.model == TITLES[model]) for model in QWEN3}
    found = [best[model] for model in ("0.6b", "4b", "8b")]
    return _broken(found != sorted(set(found)), f"published {found}")


CLAIMS = (
    Claim("trie > the paper's path > dense at 512 + 64 tokens x 16 (0.6B width)", _headline_order),
    Claim("trie > the paper's path at every measured prefix", _order_at_every_prefix),
    Claim("trie > the paper's path at every measured context length", _order_at_long_contexts),
    Claim("the trie's speed-up grows with the prefix (0.6B width)", _grows_with_the_prefix),
    Claim("query first shares more than document first", _query_first_shares_more),
    Claim(
        f"auto is not slower than dense by more than {NOT_SLOWER:.0%} where nothing is shared", _never_slower
    ),
    Claim("the trie needs no more memory than the paper's path, and less than dense", _leaner),
    Claim("predicted on an H100: trie > the paper's path > dense, every model", _predicted_order),
    Claim("published: the gain grows with the model, 0.6B < 4B < 8B", _published_order),
)


def _at_every_x(data: Data, figure: str, patterns: list[str]) -> str | None:
    """The trie's median is above the paper's path's wherever both were measured, but for noise."""
    worse, seen = [], 0
    for pattern in patterns:
        scatter = {p.x: p for p in data.points(figure, pattern.format("scatter"))}
        for point in data.points(figure, pattern.format("trie")):
            if point.x in scatter:
                seen += 1
                if point.y < scatter[point.x].y * (1 - NOISE):
                    worse.append(_pair(point, scatter[point.x]))
    return "; ".join(worse) if seen else None


def _pair(trie: Point, scatter: Point) -> str:
    return f"{trie.series} at {trie.x:g}: {trie.y:.2f}, the paper's path {scatter.y:.2f}"


def _broken(wrong: bool, numbers: str) -> str:
    return numbers if wrong else ""
