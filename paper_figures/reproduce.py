"""Draw every figure and table from committed data, and a page that shows them with their captions."""

from __future__ import annotations

import html
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from .data import Data, Drawing
from .style import FORMATS, save

FIGURES = {
    1: "prefix",
    2: "msmarco",
    3: "copies",
    4: "index",
    5: "vllm",
    6: "gamma",
    7: "memory",
    8: "grid",
    9: "limits",
    10: "training",
}
README_FIGURES = (1, 8)  # their SVGs are committed in pictures/
OUT = Path("paper_figures", "out")
PAGE = "index.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 2.5rem 0; border-top: 1px solid #ddd; padding-top: 1rem; }
img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #ddd; padding: .3rem .6rem; text-align: left; }
figcaption { margin-top: .6rem; color: #444; max-width: 52rem; }
.files { font-size: 13px; }
"""


def draw(number: int, data: Data) -> Drawing:
    """One figure, by its number.

    Raises:
        ValueError: there is no figure of that number.
    """
    if number not in FIGURES:
        raise ValueError(f"there is no figure {number}: they are 1 to {max(FIGURES)}")
    script = importlib.import_module(f"{__package__}.figures.{FIGURES[number]}")
    drawing: Drawing = script.main(data)
    return drawing


def reproduce(
    data: Data, out: Path, numbers: Sequence[int] | None = None, say: Callable[[str], None] = print
) -> Path:
    """Write the figures in every format, and the page.

    Args:
        out: the folder; made where missing. Files of figures that are not asked for stay.
        numbers: which ones; all where omitted. The page then shows only those.

    Returns:
        The page.
    """
    drawings = []
    for number in numbers or FIGURES:
        drawing = draw(number, data)
        write(drawing, out)
        drawings.append(drawing)
        say(f"{'table' if drawing.figure is None else 'figure':>6} {number:>2}  {drawing.title}")
    page = out / PAGE
    page.write_text(_page(drawings), encoding="utf-8")
    return page


def write(drawing: Drawing, out: Path) -> list[Path]:
    """A figure as SVG, PDF and PNG; a table as Markdown, CSV and LaTeX."""
    paths: list[Path] = []
    name = file_name(drawing)
    if drawing.figure is not None:
        paths += save(drawing.figure, out, name)
    if drawing.table is not None:
        paths += drawing.table.save(out, name)
    return paths


def file_name(drawing: Drawing) -> str:
    """ "figure-08-grid": the files' name without its ending."""
    return f"figure-{drawing.number:02}-{drawing.name}"


def _page(drawings: Sequence[Drawing]) -> str:
    title = "RadixMLP: published, predicted and measured"
    body = "\n".join(_section(drawing) for drawing in drawings)
    how = (
        "Published numbers are those of arXiv 2601.15013 and its files. Predicted ones come from the "
        "roofline model and are drawn dashed and hollow. Measured ones are this project's; each caption "
        "names the machine and the commit."
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n<p>{how}</p>\n{body}\n</body>\n</html>\n"
    )


def _section(drawing: Drawing) -> str:
    name = file_name(drawing)
    parts, endings = [], []
    if drawing.figure is not None:
        parts.append(f'<img src="{name}.svg" alt="{html.escape(drawing.title)}">')
        endings += list(FORMATS)
    if drawing.table is not None:
        parts.append(drawing.table.html())
        endings += ["md", "csv", "tex"]
    links = " · ".join(f'<a href="{name}.{ending}">{ending}</a>' for ending in endings)
    parts.append(f"<figcaption>{html.escape(drawing.caption)}</figcaption>")
    parts.append(f'<p class="files">{links}</p>')
    heading = f"<h2>{drawing.number}. {html.escape(drawing.title)}</h2>"
    return f'<figure id="{drawing.name}">\n{heading}\n' + "\n".join(parts) + "\n</figure>"
