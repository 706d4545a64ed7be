"""The folders below `experiments/`: their names, what they say of themselves, and how they are loaded."""

from __future__ import annotations

import ast
import json
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from radixmlp.verify.checkout import load_module, require_checkout

PACKAGE = "radixmlp_experiment_"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_STATUS_LINE = re.compile(r"^\*\*Status:\*\*\s*(.+?)(?=\n\s*\n|\n#|\Z)", re.MULTILINE | re.DOTALL)
_STATUS_SECTION = re.compile(r"^## Status\s*\n+(.+?)(?=\n\s*\n|\n#|\Z)", re.MULTILINE | re.DOTALL)


class ExperimentError(ValueError):
    """An experiment that is named wrongly, does not exist, or does not load; the message says what to do."""


class MeasureError(ExperimentError):
    """`measure()` raised (a check of its own failed, or it is broken), or its numbers cannot be written."""


@dataclass(frozen=True)
class Summary:
    """One line of `radixmlp experiment list`.

    Args:
        name: the folder.
        status: of its README, one line.
        question: what it asks; the README's title where the folder has no `experiment.py`.
        result: what its `result.json` is of, "" where there is none.
        harness: whether `radixmlp experiment run` runs it (else its own `run.py` does).
    """

    name: str
    status: str
    question: str
    result: str
    harness: bool


def experiments_folder(command: str = "radixmlp experiment") -> Path:
    """`experiments/` of the checkout.

    Raises:
        NoCheckoutError: radixmlp is installed without its repository.
    """
    return require_checkout(command) / "experiments"


def check_name(name: str) -> None:
    """Raises ExperimentError unless `name` can be a folder, a module and a part of a command line."""
    if not _NAME.fullmatch(name):
        raise ExperimentError(
            f"{name!r} cannot name an experiment: take a lower-case letter and then at most 39 lower-case letters, "
            "digits and underscores, such as two_level"
        )


def load_experiment(name: str, module: str = "experiment", root: Path | None = None) -> ModuleType:
    """The module `experiments/NAME/MODULE.py`, its relative imports working.

    Args:
        name: the folder.
        module: which of its modules, "experiment" unless a test wants another.
        root: the folder of experiments; None: the checkout's.

    Raises:
        ExperimentError: there is none of that name, or importing it raised: the message names file and line.
        NoCheckoutError: radixmlp is installed without its repository.
    """
    check_name(name)
    folder = (experiments_folder() if root is None else root) / name
    if not (folder / f"{module}.py").is_file():
        raise ExperimentError(_missing(folder, module))
    try:
        return load_module(folder, PACKAGE + name, module)
    except Exception as error:
        raise ExperimentError(f"{name} does not load: {where_raised(error, folder)}") from error


def _missing(folder: Path, module: str) -> str:
    if (folder / "run.py").is_file() and module == "experiment":
        return f"{folder.name} has a run.py of its own: its README says how to run it"
    if folder.is_dir():
        return f"{folder.name} has no {module}.py"
    root = folder.parent
    known = ", ".join(name for name in _folder_names(root) if (root / name / "experiment.py").is_file())
    return f"there is no experiment {folder.name!r}; there are: {known or 'none'}"


def where_raised(error: BaseException, folder: Path) -> str:
    """ "experiment.py, line 12: NameError: ..." of the deepest line below `folder` that an error passed through."""
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(folder.resolve())]
    if not own:
        return message
    place = Path(own[-1].filename).resolve().relative_to(folder.resolve())
    return f"{place}, line {own[-1].lineno}: {message}"


def summaries(root: Path) -> Iterator[Summary]:
    """Every experiment below `root` by name, read without running any of its code."""
    for name in _folder_names(root):
        folder = root / name
        readme = folder / "README.md"
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        harness = (folder / "experiment.py").is_file()
        question = _question(folder / "experiment.py") if harness else _title(text)
        yield Summary(name, _status(text), question, _result(folder / "result.json"), harness)


def _folder_names(root: Path) -> list[str]:
    def is_experiment(path: Path) -> bool:
        return path.is_dir() and any(
            (path / file).is_file() for file in ("README.md", "experiment.py", "run.py")
        )

    return sorted(path.name for path in root.iterdir() if is_experiment(path)) if root.is_dir() else []


def _question(file: Path) -> str:
    """The string given to QUESTION, without importing the module."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=file.name)
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"(broken: {where_raised(error, file.parent)})"
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "QUESTION" for target in node.targets
        ):
            try:
                return str(ast.literal_eval(node.value))
            except ValueError:
                return f"(experiment.py, line {node.lineno}: QUESTION is not a plain string)"
    return "(experiment.py has no QUESTION)"


def _status(readme: str) -> str:
    found = _STATUS_LINE.search(readme) or _STATUS_SECTION.search(readme)
    return " ".join(found.group(1).split()) if found else "(its README has no **Status:** line)"


def _title(readme: str) -> str:
    return next(
        (line.removeprefix("# ") for line in readme.splitlines() if line.startswith("# ")), "(no README)"
    )


def _result(file: Path) -> str:
    """The commit and device of a result.json; what is wrong with it where it cannot be read."""
    if not file.is_file():
        return ""
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
        environment = document.get("environment", {})
        commit = str(environment.get("commit") or "no commit")[:10]
        return f"{commit}{'+' if environment.get('dirty') else ''} on {environment.get('device', 'unknown device')}"
    except (ValueError, AttributeError) as error:
        return f"unreadable: {error}"
