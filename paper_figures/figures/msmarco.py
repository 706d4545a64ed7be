"""Table 2: MS MARCO reranking: published latencies, and SmolLM2-135M measured here."""

from __future__ import annotations

from ..data import Data, Drawing, Point
from ..published import reranking
from ..style_table import Table

HEADINGS = (
    "kind",
    "model",
    "path",
    "on",
    "dense (s)",
    "compact (s)",
    "speed-up",
    "20–80%",
    "r",
    "memory, as printed",
)
MISSING = "not measured on this device"
SMALL = "SmolLM2-135M"
NAMES = {"scatter": "the paper's", "trie": "the trie"}


def main(data: Data) -> Drawing:
    """Published rows, then measured ones."""
    rows = [
        [
            "published",
            fact.model,
            "the paper's",
            f"H100, batches of up to {fact.max_batch_tokens:,} tokens",
            f"{fact.dense_s:.2f}",
            f"{fact.radix_s:.2f}",
            f"{fact.speedup:.2f}×",
            "–",
            "–",
            f"{fact.memory_percent:g}%",
        ]
        for fact in reranking()
    ]
    dense = data.points("rerank", "dense")
    shape = "no shape is measured yet"
    for path, name in NAMES.items():
        points = data.points("rerank", path)
        if not points or not dense:
            rows.append(["measured", SMALL, name, MISSING, *["–"] * 6])
            continue
        shape = points[0].shape
        rows.append(_row(dense[0], points[0], name, data))
    caption = (
        "Published: seconds a request, query first, P50, H100, fp16. Measured: median seconds of a query's "
        f"batch on the CPU ({shape}), the speed-up as the median over queries of paired ratios over the "
        "faster dense. Hardware, model and batches differ: the rows stand beside each other as facts. "
        f"Nothing is predicted. {data.provenance()}"
    )
    return Drawing(2, "msmarco", "Reranking MS MARCO: latency", caption, table=Table(HEADINGS, rows))


def _row(dense: Point, compact: Point, name: str, data: Data) -> list[str]:
    found = compact.details
    low, high = found["speedup_q20_q80"]
    return [
        "measured",
        SMALL,
        name,
        data.cpu.device if data.cpu else "–",
        f"{dense.y:.2f}",
        f"{compact.y:.2f}",
        f"{found['speedup']:.2f}×",
        f"{low:.2f}–{high:.2f}",
        f"{found['r']:.2f}",
        "–",
    ]
