"""What an installation puts where: one top-level package, and nobody else's name taken."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_wheel_has_one_top_level_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"radixmlp"}
    for wanted in ("reference/trie.py", "optimized/integration/hooks.py", "verify/run.py", "py.typed"):
        assert f"radixmlp/{wanted}" in names
    assert not any("notebooks" in name for name in names)  # they are read in a checkout
    assert any(name.startswith("radixmlp/verify/data/") for name in names)
    assert any(name.startswith("radixmlp/verify/templates/") for name in names)


def test_the_repository_root_is_not_importable() -> None:
    assert str(ROOT) not in sys.path
    for name in ("reference", "optimized", "verify"):
        assert importlib.util.find_spec(name) is None


def test_transformers_finds_the_real_kernels_package() -> None:
    found = importlib.util.find_spec("kernels")
    assert found is not None, "the dev extra installs Hugging Face's kernels"
    assert found.origin is not None
    assert ROOT not in Path(found.origin).parents or ".venv" in found.origin
    code = (
        "import radixmlp, radixmlp.optimized.integration, kernels, transformers.integrations.hub_kernels; "
        "print(kernels.__file__)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "site-packages" in run.stdout
