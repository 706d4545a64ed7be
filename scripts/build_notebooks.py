"""Write `reference/notebooks/*.ipynb`, with outputs, from the `# %%` scripts beside them.

python -P scripts/build_notebooks.py          # all of them
python -P scripts/build_notebooks.py 01_trie  # one
python -P scripts/build_notebooks.py --check  # run nothing; exit 1 where a notebook is older than its script

A rebuild of unchanged scripts gives the same bytes: cells are numbered, the kernel's metadata is generic, and neither
timings nor versions are kept.
"""

from __future__ import annotations

import argparse
import base64
import os
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

NOTEBOOKS = Path(__file__).resolve().parents[1] / "reference" / "notebooks"
CELL = "# %%"
MARKDOWN = "# %% [markdown]"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python"},
}
KERNEL_SETTINGS = {
    "OMP_WAIT_POLICY": "PASSIVE",  # on a busy machine waiting threads give their core away
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # no word about frozen modules
    "PYTHONWARNINGS": "ignore:IProgress not found",  # nobody watches progress bars here
}
TIMEOUT = 60  # seconds for one cell; notebooks are meant to be stepped through, not waited for


def scripts() -> list[Path]:
    """The notebooks' scripts, in order; other modules of the folder do not start with a number."""
    return sorted(NOTEBOOKS.glob("[0-9]*.py"))


def read_cells(script: Path) -> list[tuple[str, str]]:
    """(kind, source) of each cell of a percent script; kind is "markdown" or "code".

    Raises:
        ValueError: text before the first cell, an unknown kind of cell, or a markdown line that is no comment.
    """
    cells: list[tuple[str, list[str]]] = []
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith(CELL):
            if line.rstrip() not in (CELL, MARKDOWN):
                raise ValueError(
                    f"{script.name}, line {number}: {line!r} opens neither a code nor a markdown cell"
                )
            cells.append(("code" if line.rstrip() == CELL else "markdown", []))
        elif not cells:
            if line.strip():
                raise ValueError(f"{script.name}, line {number}: put {CELL!r} before the first line")
        elif cells[-1][0] == "markdown" and line.strip():
            if line != "#" and not line.startswith("# "):
                raise ValueError(f"{script.name}, line {number}: a line of a markdown cell starts with '# '")
            cells[-1][1].append(line[2:])
        else:
            cells[-1][1].append(line)
    return [(kind, "\n".join(lines).strip("\n")) for kind, lines in cells]


def unexecuted(script: Path) -> Any:
    """The script as a notebook without outputs."""
    make = {"code": new_code_cell, "markdown": new_markdown_cell}
    cells = [
        make[kind](source, id=f"cell-{number:02d}")
        for number, (kind, source) in enumerate(read_cells(script), start=1)
    ]
    return new_notebook(cells=cells, metadata=METADATA)


def execute(notebook: Any, timeout: int = TIMEOUT) -> Any:
    """Run every cell in a fresh kernel whose current folder is that of the notebooks, and tidy the outputs.

    The kernel reads nobody's IPython profile and writes no history.

    Raises:
        CellExecutionError: a cell raised; the message holds its traceback.
        CellTimeoutError: a cell ran longer than `timeout` seconds.
    """
    with (
        tempfile.TemporaryDirectory() as own,
        mock.patch.dict(os.environ, KERNEL_SETTINGS, IPYTHONDIR=own, JUPYTER_RUNTIME_DIR=own),
    ):
        NotebookClient(
            notebook,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": str(NOTEBOOKS)}},
            record_timing=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],
        ).execute()
    return tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Leave in an executed notebook only what the next run gives again."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            picture = output.get("data", {}).get("image/png")
            if picture:
                bare = without_text(base64.b64decode(picture))
                output.data["image/png"] = base64.b64encode(bare).decode()
    return notebook


def without_text(png: bytes) -> bytes:
    """A PNG without the chunks that name the software and its version."""
    kept = (chunk for kind, chunk in _chunks(png) if kind not in (b"tEXt", b"zTXt", b"iTXt", b"tIME"))
    return png[:8] + b"".join(kept)


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    place = 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        end = place + 12 + length
        yield png[place + 4 : place + 8], png[place:end]
        place = end


def is_current(script: Path) -> bool:
    """Whether the notebook beside `script` holds its cells, in their order."""
    target = script.with_suffix(".ipynb")
    if not target.is_file():
        return False
    notebook = nbformat.read(target, as_version=4)
    return [(cell.cell_type, cell.source) for cell in notebook.cells] == read_cells(script)


def _chosen(names: Sequence[str]) -> list[Path]:
    known = {script.stem: script for script in scripts()}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no notebook {unknown[0]!r}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def main(argv: Sequence[str] | None = None) -> int:
    """Build the notebooks named, or all; 0 when all went well."""
    parser = argparse.ArgumentParser(prog="build_notebooks.py", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="notebooks to build (default: all)")
    parser.add_argument("--check", action="store_true", help="only say which notebooks are stale")
    options = parser.parse_args(argv)
    try:
        chosen = _chosen(options.names)
        if options.check:
            stale = [script.stem for script in chosen if not is_current(script)]
            for name in stale:
                print(f"{name}.ipynb is stale: run scripts/build_notebooks.py {name}")
            return 1 if stale else 0
        for script in chosen:
            print(script.stem, flush=True)
            notebook = execute(unexecuted(script))
            script.with_suffix(".ipynb").write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except (CellExecutionError, CellTimeoutError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
