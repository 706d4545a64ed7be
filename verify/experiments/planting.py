"""Planting every fault of `experiment_faults.py` into one backend, and seeing whether parity turns red."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from radixmlp.optimized.attention import AttentionBackend, register_attention, unregister_attention
from radixmlp.verify.experiments.faults import (
    FAULTS,
    GRADIENT,
    WINDOW,
    Faulty,
    Outcome,
    outcome_of,
    subject_with_faults,
)
from radixmlp.verify.gradients import check_gradients
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.parity import check_parity
from radixmlp.verify.records import Workload
from radixmlp.verify.subject import fast_path
from radixmlp.verify.workloads import make_workload

PLAIN_MODEL = "tiny-qwen3"  # causal attention and nothing else
WINDOW_MODEL = "tiny-mistral"
SHAPE = "tree"
DTYPES = ("float32", "bfloat16")


def plant_faults(
    backend: AttentionBackend, refused: Collection[str], device: str, progress: Callable[[str], None]
) -> list[Outcome]:
    """Each fault on a tree in two dtypes; the window's where windows are served, the gradient's in fp64.

    Args:
        refused: what the backend does not serve: dtypes by name, "sliding window", "training".
    """
    outcomes: list[Outcome] = []
    plain = [fault for fault in FAULTS if fault not in (WINDOW, GRADIENT)]
    for dtype in DTYPES:
        if dtype not in refused:
            outcomes += _plant(backend, plain, PLAIN_MODEL, dtype, device, progress)
    if "sliding window" in refused:
        outcomes.append(Outcome(backend.name, WINDOW, WINDOW_MODEL, "", remark="windows are refused"))
    else:
        outcomes += _plant(backend, [WINDOW], WINDOW_MODEL, "float32", device, progress)
    if "training" in refused:
        outcomes.append(Outcome(backend.name, GRADIENT, PLAIN_MODEL, "", remark="training is refused"))
    else:
        outcomes.append(_plant_in_gradient(backend, device))
    return outcomes


@contextmanager
def registered(backends: Sequence[AttentionBackend]) -> Iterator[None]:
    """Within the block, `backends` are known to `radixmlp.forward` by their names."""
    names: list[str] = []
    try:
        for backend in backends:
            names.append(register_attention(backend).name)
        yield
    finally:
        for name in names:
            unregister_attention(name)


def _plant(
    backend: AttentionBackend,
    faults: Sequence[str],
    model: str,
    dtype: str,
    device: str,
    progress: Callable[[str], None],
) -> list[Outcome]:
    loaded, workload = _tree(model, dtype, device)
    faulty = [Faulty(backend, fault) for fault in faults]
    with registered(faulty):
        names = [each.name for each in faulty]
        records = check_parity(loaded, workload, names, subject_with_faults(), progress)
    return [outcome_of(each, f"{model}, {SHAPE}, {dtype}", records) for each in faulty]


def _plant_in_gradient(backend: AttentionBackend, device: str) -> Outcome:
    loaded, workload = _tree(PLAIN_MODEL, "float64", device)
    faulty = Faulty(backend, GRADIENT)
    with registered([faulty]):
        records = check_gradients(loaded, workload, [faulty.name], fast_path())
    return outcome_of(faulty, f"{PLAIN_MODEL}, {SHAPE}, float64", records)


def _tree(model: str, dtype: str, device: str) -> tuple[LoadedModel, Workload]:
    loaded = load_model(model, dtype, device)
    return loaded, make_workload(SHAPE, None, loaded.vocab_size)
