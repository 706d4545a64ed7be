"""What pages show of the measurements: the READMEs' pictures and tables, and the tables of ROOFLINE.md."""

from __future__ import annotations

from pathlib import Path

from radixmlp.verify.measured import HOUSE_DEVICE, measured_file, read_document

from .data import load_data
from .figures import readme_measured
from .reproduce import README_FIGURES, draw
from .roofline_page import PAGE, write_page
from .style import save


def redraw(root: Path) -> list[Path]:
    """Write the pictures into `paper_figures/pictures/`, and the tables into the READMEs and ROOFLINE.md."""
    paths = pictures(root, root / "paper_figures" / "pictures")
    readme_measured.main([])
    write_page()
    return [*paths, *(path for path in readme_measured.READMES if path.is_file()), PAGE]


def pictures(root: Path, folder: Path) -> list[Path]:
    """The pictures alone, into any folder, from the committed data."""
    paths = []
    for number in README_FIGURES:
        drawing = draw(number, load_data(root))
        paths += save(drawing.figure, folder, drawing.name, formats=["svg"])
    bars = folder / readme_measured.PICTURE.name
    readme_measured.draw(read_document(measured_file(root, HOUSE_DEVICE)), bars)
    return [*paths, bars]
