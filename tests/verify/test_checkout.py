"""Folders that are run but not installed are imported by path, and nothing else becomes importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from radixmlp.verify import checkout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "idea"
    (place / "inner").mkdir(parents=True)
    (place / "numbers.py").write_text("VALUE = 3\n")
    (place / "inner" / "deep.py").write_text("from ..numbers import VALUE\n\nTWICE = 2 * VALUE\n")
    return place


def test_modules_import_each_other_and_sys_path_stays(folder: Path) -> None:
    path = list(sys.path)
    module = checkout.load_module(folder, "radixmlp_test_idea", "inner.deep")
    assert module.TWICE == 6
    assert sys.path == path
    assert checkout.load_folder(folder, "radixmlp_test_idea") is sys.modules["radixmlp_test_idea"]


def test_a_name_is_not_taken_twice(folder: Path, tmp_path: Path) -> None:
    checkout.load_folder(folder, "radixmlp_test_twice")
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ValueError, match="loaded from elsewhere"):
        checkout.load_folder(other, "radixmlp_test_twice")
    with pytest.raises(FileNotFoundError, match="no folder"):
        checkout.load_folder(tmp_path / "missing", "radixmlp_test_missing")


def test_a_package_that_fails_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise RuntimeError('broken')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            checkout.load_folder(tmp_path, "radixmlp_test_broken")
    assert "radixmlp_test_broken" not in sys.modules


def test_without_a_checkout_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (checkout.require_checkout("figures") / "pyproject.toml").is_file()
    monkeypatch.setattr(checkout, "find_checkout", lambda: None)
    with pytest.raises(checkout.NoCheckoutError, match="figures works on a checkout"):
        checkout.require_checkout("figures")
