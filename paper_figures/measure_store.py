"""Finished cells of a measuring run on disk: a run that is killed goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from radixmlp.verify.measured import MACHINE, write_atomically
from radixmlp.verify.report import finite

_CODE = (
    "reference",
    "kernels",
    "optimized",
    "verify",
    "paper_figures",
)  # folders whose code decides a number


class CellStore:
    """One JSON file a finished cell.

    A cell counts only for the code and the machine it was measured with: each file carries a hash of the
    repository's code, of the device, its threads and versions, and of the size of the run.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key

    def load(self, name: str) -> dict[str, Any] | None:
        """What the cell measured; None where it has to be measured (a broken file counts as none)."""
        try:
            cell = json.loads(self._file(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(cell, dict) or cell.get("key") != self.key:
            return None
        result: dict[str, Any] = cell["result"]
        return result

    def save(self, name: str, result: dict[str, Any], seconds: float) -> None:
        """Keep a finished cell."""
        write_atomically(
            self._file(name), finite({"key": self.key, "cell": name, "seconds": seconds, "result": result})
        )

    def clear(self) -> None:
        """Forget all cells: the next run starts anew."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name.replace(':', '-').replace(' ', '-')}.json"


def fingerprint(root: Path, environment: dict[str, Any], size: str) -> str:
    """A hash of the code in a checkout, of the machine and its versions, and of the size of the run."""
    digest = hashlib.sha256()
    for path in _sources(root):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    digest.update(json.dumps([size, *(environment.get(key) for key in MACHINE)]).encode())
    return digest.hexdigest()[:32]


def _sources(root: Path) -> Iterable[Path]:
    for folder in _CODE:
        yield from sorted((root / folder).rglob("*.py"))
