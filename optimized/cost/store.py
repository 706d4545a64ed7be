"""Calibrations on disk: one JSON file each below the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from radixmlp.optimized.cost.model import CostModel

FORMAT = "1"  # of what is measured: another number makes older files useless


def key_of(model: Any, backbone: nn.Module) -> dict[str, str]:
    """What a calibration of `model` holds for."""
    weight = model.get_input_embeddings().weight
    return {
        "device": _device_name(weight.device),
        "threads": str(torch.get_num_threads()),
        "dtype": str(weight.dtype),
        "model": type(backbone).__name__,
        "shape": _fingerprint(backbone),
        "torch": str(torch.__version__),
        "transformers": importlib.metadata.version("transformers"),
        "radixmlp": _own_version(),
        "format": FORMAT,
    }


def path_of(key: dict[str, str]) -> Path | None:
    """The file of a calibration; None where there is no home to keep it in."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    except RuntimeError:
        return None
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder / "radixmlp" / "cost" / f"{digest[:20]}.json"


def load(key: dict[str, str]) -> CostModel | None:
    """The calibration kept for `key`; None where there is none that can be read."""
    path = path_of(key)
    if path is None:
        return None
    try:
        cost = CostModel.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return None
    return cost if cost.key == key else None


def save(cost: CostModel) -> None:
    """Keep a calibration, in one step; where that is not possible it is left out."""
    path = path_of(cost.key)
    if path is None:
        return
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".", suffix=".tmp", delete=False
        ) as file:
            temporary = file.name
            json.dump(cost.to_dict(), file, indent=1)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _fingerprint(backbone: nn.Module) -> str:
    """Names, shapes and dtypes of all weights: adapters and quantisation show in them."""
    digest = hashlib.sha256()
    for tensors in (backbone.named_parameters(), backbone.named_buffers()):
        for name, tensor in tensors:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()[:20]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}, {cores} cores"


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except (OSError, UnicodeDecodeError):
        pass
    return platform.processor() or platform.machine()


def _own_version() -> str:
    try:
        return importlib.metadata.version("radixmlp")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
