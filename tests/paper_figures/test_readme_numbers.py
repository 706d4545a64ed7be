"""The README says what was measured, and nothing else."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "paper_figures" / "figures" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_table_is_a_committed_measurement() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    figures = script("readme_measured")
    measured = [
        json.loads(p.read_text(encoding="utf-8"))
        for p in (ROOT / "paper_figures" / "measured").glob("*.json")
    ]
    assert any(figures.with_table(readme, m) == readme for m in measured)


def test_measurements_name_their_machine_and_a_clean_commit() -> None:
    for path in (ROOT / "paper_figures" / "measured").glob("*.json"):
        environment = json.loads(path.read_text(encoding="utf-8"))["environment"]
        assert environment["device"]
        assert environment["torch"]
        assert environment["commit"]
        assert environment["dirty"] is False
