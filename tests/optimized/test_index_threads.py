"""The fast builder lets other threads run, and several may build at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from radixmlp.optimized.index import build_plan
from radixmlp.reference.ragged import RaggedBatch

FIELDS = ("gather", "scatter", "parent", "subtree_end", "input_ids", "position_ids")


def prefix_batch(num_sequences: int, length: int, shared: int, seed: int) -> RaggedBatch:
    ids = np.random.default_rng(seed).integers(0, 50_000, (num_sequences, length))
    ids[:, :shared] = ids[0, :shared]
    return RaggedBatch.from_padded(torch.from_numpy(ids))


@contextmanager
def no_switch_on_request() -> Iterator[None]:
    """Within, a thread gives the interpreter up only by itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def other_thread_runs_during(work: Callable[[], object], tries: int = 30) -> bool:
    """Whether another thread ever gets a turn while `work` runs."""
    turns = 0
    stop = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0)

    with no_switch_on_request():
        thread = threading.Thread(target=take_turns)
        thread.start()
        try:
            for _ in range(tries):
                before = turns
                work()
                if turns > before:
                    return True
        finally:
            stop.set()
            thread.join()
    return False


def test_the_interpreter_is_free_while_a_batch_is_built() -> None:
    batch = prefix_batch(1024, 512, 500, seed=0)
    build_plan(batch)
    assert other_thread_runs_during(lambda: build_plan(batch))


def test_work_that_keeps_the_interpreter_is_noticed() -> None:
    numbers = list(range(200_000))
    assert not other_thread_runs_during(lambda: sorted(numbers, key=lambda x: -x), tries=3)


def test_threads_build_at_once() -> None:
    batches = [prefix_batch(64 + seed, 128, 32 * seed, seed) for seed in range(4)]
    expected = [build_plan(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(25):
            plans = pool.map(build_plan, batches)
            for plan, want in zip(plans, expected, strict=True):
                assert all(torch.equal(getattr(plan, f), getattr(want, f)) for f in FIELDS)
