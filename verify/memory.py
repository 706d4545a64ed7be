"""Memory: the peak of one forward pass above what stays resident anyway, each path in a fresh process.

On a CPU the peak is that of the process's resident set: the kernel's high-water mark, reset just before the
pass. The allocator is told to return freed blocks, so that a later pass cannot hide in what an earlier one
left behind. On CUDA the peak comes from PyTorch's allocator.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify.records import Record, Workload
from radixmlp.verify.variants import DENSE, build_variants, warm_up

MB = 1e6
TRIE_LIMIT = 1.05  # of the leanest dense
NOISE_MB = 4.0  # pages of libraries and thread stacks that a pass may touch first
MAX_CHILD_SECONDS = 900
# Large blocks come straight from the kernel and go straight back; few arenas; the heap keeps no free top.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "2"}


def measure_memory(
    model_name: str,
    workload: Workload,
    attentions: list[str],
    dtype: str,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> list[Record]:
    """One `peak_memory_ratio` record per backend: its peak over the leaner of dense padded and dense ragged.

    A trie backend may use 1.05 of dense (plus 4 MB that any pass may touch first); the others are reported.
    1/r stands beside it in the details: what activations alone would shrink to (arXiv 2601.15013, section 3).

    Args:
        model_name: as `verify.models.load_model` takes it; every process loads it anew.
        workload: no empty sequence.
        attentions: names of backends.
        dtype: "float32", "bfloat16", ...

    Raises:
        RuntimeError: a process failed; the message holds what it printed.
    """
    peaks = peak_megabytes(model_name, workload.batch, [*DENSE, *attentions], dtype, device, progress)
    leanest = min(DENSE, key=lambda name: peaks[name])
    plan = radixmlp.build_plan(workload.batch)
    records = []
    for name in dict.fromkeys(attentions):
        if name in DENSE:
            continue
        ratio = peaks[name] / peaks[leanest]
        limit = TRIE_LIMIT + NOISE_MB / peaks[leanest] if name.startswith("trie") else None
        details = {
            "peak_mb": peaks[name],
            "dense_peak_mb": peaks[leanest],
            "leanest_dense": leanest,
            "one_over_r": plan.gamma,
            "r": plan.compression_ratio,
            "tokens": plan.num_tokens,
        }
        passed = limit is None or ratio <= limit
        records.append(
            Record(
                "memory",
                model_name,
                workload.name,
                name,
                dtype,
                device,
                "peak_memory_ratio",
                ratio,
                limit,
                passed,
                details,
            )
        )
    return records


def peak_megabytes(
    model_name: str,
    batch: RaggedBatch,
    variants: list[str],
    dtype: str,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
    experiment: Path | None = None,
) -> dict[str, float]:
    """Peak MB (10^6 bytes) above the weights for each variant of `variants.py`, one fresh process each.

    Args:
        experiment: the folder of an experiment whose backends are among the variants.
    """
    peaks = {}
    with tempfile.TemporaryDirectory(prefix="radixmlp-memory-") as folder:
        batch_file = Path(folder) / "batch.pt"
        cpu = batch.to("cpu")
        torch.save(
            {"input_ids": cpu.input_ids, "position_ids": cpu.position_ids, "cu_seqlens": cpu.cu_seqlens},
            batch_file,
        )
        for variant in dict.fromkeys(variants):
            if progress is not None:
                progress(f"memory: {variant} in a fresh process")
            extra = [] if experiment is None else ["--experiment", str(experiment)]
            peaks[variant] = _run_child([model_name, variant, dtype, device, str(batch_file), *extra])
    return peaks


def peak_of(call: Callable[[], object], device: torch.device) -> float:
    """MB that one call needs at its peak above what is resident when it starts."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MB
    _return_free_memory()
    with _resident_peak() as watch:
        call()
    return (watch.peak - watch.before) / MB


@dataclass
class _Watch:
    """Resident bytes before the watched block, and the most seen within it."""

    before: int
    peak: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)


@contextmanager
def _resident_peak() -> Iterator[_Watch]:
    """The high-water mark of the resident set within the block; sampled where the kernel cannot reset it."""
    can_reset = _reset_high_water_mark()
    watch = _Watch(before=_status_bytes("VmRSS"))
    sampler = None if can_reset else threading.Thread(target=_sample, args=(watch,), daemon=True)
    if sampler is not None:
        sampler.start()
    try:
        yield watch
    finally:
        watch.stopped.set()
        if sampler is not None:
            sampler.join()
        last = _status_bytes("VmHWM") if can_reset else _status_bytes("VmRSS")
        watch.peak = max(watch.peak, last)


def _sample(watch: _Watch) -> None:
    while not watch.stopped.wait(0.001):
        watch.peak = max(watch.peak, _status_bytes("VmRSS"))


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: resident memory is measured on Linux only")


def _return_free_memory() -> None:
    """Give the heap's free pages back to the kernel, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _run_child(arguments: list[str]) -> float:
    environment = {**os.environ, **_ALLOCATOR}
    command = [sys.executable, "-P", "-m", "radixmlp.verify.memory", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAX_CHILD_SECONDS)
    if done.returncode != 0:
        tail = (done.stderr or done.stdout)[-2000:]
        raise RuntimeError(
            f"measuring memory of {arguments[1]} failed with exit code {done.returncode}:\n{tail}"
        )
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mb"])


def _register_backends_of(folder: Path) -> None:
    from radixmlp.verify.experiments.files import load_experiment

    for backend in load_experiment(folder.name, root=folder.parent).backends():
        radixmlp.register_attention(backend)


def _touch(model: nn.Module) -> None:
    """Read every weight, so that lazily mapped ones are resident before the pass."""
    for values in (*model.parameters(), *model.buffers()):
        values.sum()


def main(argv: list[str] | None = None) -> int:
    """The fresh process: load, warm up on a tiny batch, measure one pass, print {"peak_mb": ...}."""
    from radixmlp.verify.models import load_model

    parser = argparse.ArgumentParser(prog="radixmlp.verify.memory")
    for name in ("model", "variant", "dtype", "device", "batch"):
        parser.add_argument(name)
    parser.add_argument("--experiment", type=Path)
    arguments = parser.parse_args(argv)
    if arguments.experiment is not None:
        _register_backends_of(arguments.experiment)
    model = load_model(arguments.model, arguments.dtype, arguments.device).model
    _touch(model)
    batch = RaggedBatch(**torch.load(arguments.batch))
    warm_up(model, [arguments.variant])
    call = build_variants(model, batch, [arguments.variant])[arguments.variant]
    print(json.dumps({"peak_mb": peak_of(call, torch.device(arguments.device))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
