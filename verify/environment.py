"""Where a number was measured: commit, machine and versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch


def environment(device: str | None = None) -> dict[str, Any]:
    """Commit, dirty flag, device, threads, and the versions of python and of what computes.

    Args:
        device: "cpu" or "cuda[:i]"; None: CUDA where there is one.

    Returns:
        {"commit", "dirty", "device", "threads", "omp_wait_policy", "radixmlp", "torch", "triton",
        "transformers", "numpy", "python"}. `commit` and `dirty` are None outside a checkout; a version is None
        where the package is missing.
    """
    root = find_checkout()
    status = None if root is None else _git(root, "status", "--porcelain")
    packages = ("radixmlp", "torch", "triton", "transformers", "numpy")
    return {
        "commit": None if root is None else _git(root, "rev-parse", "HEAD"),
        "dirty": None if status is None else bool(status),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        **{package: _version(package) for package in packages},
        "python": platform.python_version(),
    }


def find_checkout() -> Path | None:
    """The repository this package runs from; None where it is installed without one.

    A wheel inside somebody else's repository is not a checkout: that commit says nothing about this code.
    """
    root = Path(__file__).resolve().parents[1]
    is_ours = (root / "pyproject.toml").is_file() and (root / "verify" / Path(__file__).name).is_file()
    return root if is_ours and (root / ".git").exists() else None


def device_name(device: str | None = None) -> str:
    """The GPU's name, or the CPU's model with the cores this process may use."""
    wants_cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if wants_cuda:
        return torch.cuda.get_device_name(torch.device(device or "cuda"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_cpu_model()}, {cores} core{'' if cores == 1 else 's'}"


def device_slug(name: str) -> str:
    """A device's name as a file name: lower case, runs of anything else become one hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
