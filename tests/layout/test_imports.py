"""Imports run one way, and the two implementations share the vocabulary alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOOR = "radixmlp"  # the package users import: re-exports and the command line
CORE = ("reference", "kernels", "optimized", "verify")
FOLDERS = (*CORE, "experiments", "paper_figures")
NOTEBOOKS = "reference/notebooks"  # lies in `reference`, but is read and run, not imported by anybody else
MAY_IMPORT = {
    "reference": {"reference"},
    "kernels": {"reference", "kernels"},
    "optimized": {"reference", "kernels", "optimized"},
    "verify": {*CORE, DOOR},
    "experiments": {*CORE, DOOR, "experiments"},
    "paper_figures": {*CORE, DOOR, "paper_figures"},
    NOTEBOOKS: {*CORE, DOOR, NOTEBOOKS},
    DOOR: {*CORE, DOOR},
}
# Two implementations that share computations cannot check each other.
VOCABULARY_ONLY = ("kernels", "optimized")
VOCABULARY_MODULES = ("ragged", "plan")
VOCABULARY_NAMES = ("RaggedBatch", "TriePlan", "AttentionSpec", "Order")
# `kernels` is missing: that name belongs to a package of Hugging Face's.
NEVER_TOP_LEVEL = tuple(folder for folder in FOLDERS if folder != "kernels")


def imports(source: str, package: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, module, name or None) of each import, `from` imports name by name; also import_module("...").

    `package` is the dotted package the source lies in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, module, alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, None


def complaint(folder: str, module: str, name: str | None) -> str | None:
    """Why a file in `folder` may not import `name` from `module` (or `module` itself), or None."""
    top, *below = module.split(".")
    if top != "radixmlp":
        if top in NEVER_TOP_LEVEL:
            return f"{top} is imported as radixmlp.{top}"
        if folder == "reference" and top != "torch" and top not in sys.stdlib_module_names:
            return f"reference stands on PyTorch and the standard library, not on {top}"
        return None
    if not below and name in FOLDERS:
        below, name = [name], None
    target = below[0] if below and below[0] in FOLDERS else DOOR
    if [*below, name][:2] == NOTEBOOKS.split("/"):
        target = NOTEBOOKS
    if target not in MAY_IMPORT[folder]:
        return f"{folder} may not import from {target}"
    if folder in VOCABULARY_ONLY and target == "reference":
        inner = below[1] if len(below) > 1 else name
        if inner not in VOCABULARY_MODULES and (len(below) > 1 or inner not in VOCABULARY_NAMES):
            return f"{folder} may use reference's vocabulary alone, not {inner or 'the package as a whole'}"
    return None


def source_files() -> list[tuple[str, Path]]:
    """(folder, file) of every module below the top folders that exist; notebooks are a folder of their own."""
    found = [(folder, file) for folder in (*FOLDERS, DOOR) for file in sorted((ROOT / folder).rglob("*.py"))]
    return [(NOTEBOOKS if ROOT / NOTEBOOKS in file.parents else folder, file) for folder, file in found]


def dotted_package(folder: str, file: Path) -> str:
    parts = file.relative_to(ROOT).parent.parts
    return ".".join(parts if folder == DOOR else (DOOR, *parts))


def test_there_is_something_to_read():
    folders = {folder for folder, _ in source_files()}
    assert {"reference", "optimized", "verify", NOTEBOOKS, DOOR} <= folders


def test_imports_run_one_way():
    found = []
    for folder, file in source_files():
        for line, module, name in imports(file.read_text(), dotted_package(folder, file)):
            reason = complaint(folder, module, name)
            if reason:
                found.append(f"{file.relative_to(ROOT)}:{line}: {reason}")
    assert not found, "\n".join(found)


FORBIDDEN = [
    ("reference", "import numpy"),
    ("reference", "from transformers import Qwen3Config"),
    ("reference", "from radixmlp.optimized.index import build_plan"),
    ("reference", "from ..optimized import index"),
    ("reference", "import radixmlp"),
    ("reference", "def f():\n    import triton.language as tl"),
    ("kernels", "from radixmlp.optimized.index import build_plan"),
    ("kernels", "from radixmlp.reference.attention import causal_attention"),
    ("optimized", "from radixmlp.reference import trie"),
    ("optimized", "from radixmlp.reference.trie import build_plan"),
    ("optimized", "from radixmlp.reference.validation import MAX_ID"),
    ("optimized", "from radixmlp.reference import *"),
    ("optimized", "from radixmlp import reference"),
    ("optimized", "import radixmlp.reference"),
    ("optimized", "import radixmlp.reference.attention as a"),
    ("optimized", "from ..reference import model"),
    ("optimized", "from radixmlp import build_plan"),
    ("optimized", "from radixmlp.verify.lift import lift_float32"),
    ("optimized", "import importlib\nimportlib.import_module('radixmlp.reference.trie')"),
    ("verify", "from radixmlp.experiments.tree import backend"),
    ("verify", "from radixmlp import experiments"),
    ("verify", "from reference.trie import build_plan"),
    ("radixmlp", "from radixmlp import paper_figures"),
    ("radixmlp", "from importlib import import_module\nimport_module('radixmlp.experiments')"),
    ("paper_figures", "import radixmlp.experiments"),
    ("reference", "from radixmlp.reference.notebooks.drawing import draw_trie"),
    ("reference", "from radixmlp.reference import notebooks"),
    ("verify", "from radixmlp.reference.notebooks import drawing"),
    (NOTEBOOKS, "from radixmlp.experiments.tree import backend"),
    (NOTEBOOKS, "from reference.notebooks import drawing"),
]


@pytest.mark.parametrize(("folder", "source"), FORBIDDEN)
def test_the_rules_bite(folder, source):
    package = DOOR if folder == DOOR else ".".join((DOOR, *folder.split("/")))
    assert [why for _, *what in imports(source, package) if (why := complaint(folder, *what))]


ALLOWED = [
    (
        "reference",
        "import dataclasses, torch.nn.functional as F\nfrom . import trie\nfrom .plan import TriePlan",
    ),
    ("kernels", "import triton\nfrom radixmlp.reference import TriePlan"),
    ("optimized", "import numba, kernels\nfrom radixmlp.reference import AttentionSpec, Order, RaggedBatch"),
    ("optimized", "from radixmlp.reference.plan import TriePlan\nfrom ..reference.ragged import RaggedBatch"),
    ("optimized", "from radixmlp.reference import plan\nfrom radixmlp.kernels import gather"),
    ("verify", "import radixmlp\nfrom radixmlp.reference import trie\nfrom radixmlp.optimized import index"),
    ("experiments", "from radixmlp.verify.records import Record\nfrom . import backend"),
    ("radixmlp", "from radixmlp.verify.report import write\nfrom radixmlp.cli import main"),
    (NOTEBOOKS, "import matplotlib\nfrom radixmlp.reference.notebooks.drawing import draw_trie"),
    (NOTEBOOKS, "import radixmlp\nfrom radixmlp.verify.ideal import DecoderShape"),
]


@pytest.mark.parametrize(("folder", "source"), ALLOWED)
def test_the_rules_leave_the_rest_alone(folder, source):
    package = DOOR if folder == DOOR else ".".join((DOOR, *folder.split("/")))
    assert not [why for _, *what in imports(source, package) if (why := complaint(folder, *what))]


WITHOUT_THE_REST = """
import sys
blocked = ("triton", "numba", "transformers", "numpy")
sys.modules.update(dict.fromkeys(blocked))  # None: importing it raises ModuleNotFoundError

import torch
import radixmlp

batch = radixmlp.RaggedBatch.from_sequences([[1, 2, 3, 5], [1, 2, 4, 7], [], [1, 2, 3, 6]])
plan = radixmlp.reference.trie.build_plan(batch)
assert plan.scatter.tolist() == [0, 1, 2, 3, 0, 1, 5, 6, 0, 1, 2, 4], plan.scatter

import radixmlp.reference.model

decoder = radixmlp.reference.model.Qwen3({
    "vocab_size": 9, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
})
weights = {name: torch.randn(p.shape, dtype=torch.float64) for name, p in decoder.named_parameters()}
decoder.load(weights)
dense, trie = (decoder(batch, mode=mode).logits for mode in ("dense", "trie"))
assert dense.shape == (12, 9)
torch.testing.assert_close(dense, trie, rtol=0, atol=1e-12)
assert all(sys.modules[name] is None for name in blocked)
print("served by PyTorch alone")
"""


def test_reference_works_without_triton_numba_transformers_and_numpy():
    run = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_THE_REST], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert "served by PyTorch alone" in run.stdout
