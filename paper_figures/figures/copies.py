"""Table 3: moving rows to the ragged layout and back: published, PyTorch, ours, a copy as the bound."""

from __future__ import annotations

from ..data import Data, Drawing, Point
from ..published import row_copies
from ..style_table import Table

HEADINGS = (
    "rows x width, fp16",
    "published: native, H100",
    "published: theirs, H100",
    "published: speed-up",
    "measured: index_select, CPU",
    "measured: index_copy_, CPU",
    "measured: a copy, CPU (bound)",
    "share of the bound, CPU",
    "measured: our Triton kernel, GPU",
    "our kernel's share of a copy, GPU",
)
MISSING = "not measured on this device"
NO_GPU = "not measured: no GPU"


def main(data: Data) -> Drawing:
    """One row a published shape."""
    rows = []
    for place, fact in enumerate(row_copies()):
        found = {p.series: p for p in _at(data, place)}
        select, bound = found.get("index_select"), found.get("copy")
        share = MISSING if select is None or bound is None else f"{bound.y / select.y:.0%}"
        rows.append(
            [
                fact.shape,
                _time(fact.native_us),
                _time(fact.kernel_us),
                f"{fact.speedup:.3g}×",
                _spread(select),
                _spread(found.get("index_copy_")),
                _spread(bound),
                share,
                *_gpu(data, fact.shape.split(" x ")),
            ]
        )
    caption = (
        "Published: H100, fp16 (arXiv 2601.15013). Measured: medians with the 20% and 80% quantiles, every "
        "row goes to another place. On a CPU the paper's path calls PyTorch's index_select, and the trie "
        "path moves no rows at all; our Triton kernels need a GPU and stand there only where one was "
        "measured. Times of different devices are not to be compared; the share of a plain copy is. Nothing "
        f"is predicted. {data.provenance()}"
    )
    return Drawing(3, "copies", "Gather and scatter kernels", caption, table=Table(HEADINGS, rows))


def _at(data: Data, place: int) -> list[Point]:
    series = data.series_of("copies")
    return [point for name in series for point in data.points("copies", name) if point.x == place]


def _gpu(data: Data, sizes: list[str]) -> list[str]:
    """The kernel's time and its share of copy bandwidth, from the first GPU that has them."""
    words = f"[{', '.join(sizes)}]"
    for gpu in data.gpus:
        rows = [row for row in gpu.bars if row["name"].startswith("copies: ") and words in row["name"]]
        over = next((row for row in rows if "gather_rows" in row["name"] and " over " in row["name"]), None)
        share = next((row for row in rows if "gather_rows" in row["name"] and "share" in row["name"]), None)
        if over is not None and share is not None and over["wrong"] is None and share["wrong"] is None:
            microseconds = over["details"]["gather_rows_us"]
            return [f"{_time(microseconds)} ({gpu.device})", f"{share['value']:.0%}"]
    return [NO_GPU, NO_GPU]


def _spread(point: Point | None) -> str:
    if point is None:
        return MISSING
    if point.q20 is None or point.q80 is None:
        return _time(point.y)
    return f"{_time(point.y)} ({_time(point.q20)} – {_time(point.q80)})"


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3g} ms" if microseconds >= 1000 else f"{microseconds:.3g} µs"
