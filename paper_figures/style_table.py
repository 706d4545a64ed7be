"""A table in the four forms a reader may want: Markdown, CSV, LaTeX and HTML."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FORMATS = ("md", "csv", "tex")
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "×": r"$\times$",
    "–": "--",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "µ": r"$\mu$",
}


@dataclass(frozen=True)
class Table:
    """Headings and rows of text; every row has one cell a heading.

    Raises:
        ValueError: a row is longer or shorter than the headings.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.headings):
                raise ValueError(f"row {number} has {len(row)} cells, the table {len(self.headings)} columns")

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )

    def csv(self) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *self.rows])
        return text.getvalue().rstrip("\n")

    def latex(self) -> str:
        """A `tabular` for the package booktabs."""
        lines = [" & ".join(map(_latex, line)) + r" \\" for line in (self.headings, *self.rows)]
        begin = r"\begin{tabular}{" + "l" * len(self.headings) + "}"
        body = [lines[0], r"\midrule", *lines[1:]]
        return "\n".join([begin, r"\toprule", *body, r"\bottomrule", r"\end{tabular}"])

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.headings)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"

    def save(self, folder: Path, name: str) -> list[Path]:
        """Write `name`.md, .csv and .tex."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"md": self.markdown(), "csv": self.csv(), "tex": self.latex()}
        paths = []
        for suffix in FORMATS:
            path = folder / f"{name}.{suffix}"
            path.write_text(texts[suffix] + "\n", encoding="utf-8")
            paths.append(path)
        return paths


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)
