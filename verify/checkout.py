"""Folders of a checkout that are run but not installed: `experiments/` and `paper_figures/`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from radixmlp.verify.environment import find_checkout


class NoCheckoutError(RuntimeError):
    """A command that works on the repository's own files runs where there is no repository."""


def require_checkout(command: str) -> Path:
    """The repository's root.

    Args:
        command: what was asked for, for the message.

    Raises:
        NoCheckoutError: radixmlp is installed without its repository.
    """
    root = find_checkout()
    if root is None:
        raise NoCheckoutError(
            f"{command} works on a checkout of radixmlp, and this is an installed package without one: clone the "
            "repository and run `make setup` there"
        )
    return root


def load_folder(folder: Path, name: str) -> ModuleType:
    """Import `folder` as the package `name`, so that its modules can import each other relatively.

    Nothing is added to `sys.path`: folders at the top of the repository have names that other packages use. A
    second call returns the same package.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the name belongs to a package of another place.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    known = sys.modules.get(name)
    if known is not None:
        if str(folder.resolve()) in map(str, getattr(known, "__path__", [])):
            return known
        raise ValueError(f"a module called {name!r} is loaded from elsewhere: {known}")
    own = folder / "__init__.py"
    if own.is_file():
        spec = importlib.util.spec_from_file_location(
            name, own, submodule_search_locations=[str(folder.resolve())]
        )
    else:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(folder.resolve())]
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if spec.loader is not None:
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def load_module(folder: Path, package: str, module: str) -> ModuleType:
    """Import `folder`/`module`.py as `package.module` (dots for subfolders); see `load_folder`."""
    load_folder(folder, package)
    return importlib.import_module(f"{package}.{module}")
