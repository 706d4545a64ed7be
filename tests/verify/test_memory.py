"""Peak memory: the meter against known allocations, and the fresh processes end to end."""

import os
import subprocess
import sys

import pytest
import torch

from radixmlp.reference import RaggedBatch
from radixmlp.verify import memory
from radixmlp.verify.memory import MB, measure_memory, peak_megabytes, peak_of
from radixmlp.verify.records import Workload

CPU = torch.device("cpu")


def allocate(megabytes: int) -> None:
    torch.ones(int(megabytes * MB / 4)).sum()


@pytest.mark.parametrize("megabytes", [40, 160])
def test_the_meter_reads_what_a_call_touches(megabytes: int) -> None:
    allocate(1)
    assert peak_of(lambda: allocate(megabytes), CPU) == pytest.approx(megabytes, rel=0.1, abs=3)


def test_what_was_resident_before_does_not_count() -> None:
    resident = torch.ones(int(100 * MB / 4))
    assert peak_of(lambda: allocate(20), CPU) == pytest.approx(20, abs=4)
    assert resident.numel()


def test_sampling_serves_where_the_mark_cannot_be_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_reset_high_water_mark", lambda: False)
    peak = peak_of(lambda: [allocate(80) for _ in range(5)], CPU)
    assert 40 < peak < 100


def test_an_earlier_peak_does_not_hide_a_later_one() -> None:
    allocate(200)
    assert peak_of(lambda: allocate(30), CPU) == pytest.approx(30, abs=5)


def test_freed_memory_is_not_counted_twice() -> None:
    """The peak is the larger block: the first is gone before the second comes (real allocator settings)."""
    code = (
        "import sys, torch\n"
        "from radixmlp.verify.memory import MB, peak_of\n"
        "def call():\n"
        "    torch.ones(int(60 * MB / 4)).sum()\n"
        "    torch.ones(int(50 * MB / 4)).sum()\n"
        "call()\n"
        "print(peak_of(call, torch.device('cpu')))\n"
    )
    environment = {**os.environ, **memory._ALLOCATOR}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(60, abs=5)


def shared_batch() -> RaggedBatch:
    random = torch.Generator().manual_seed(0)
    stem = torch.randint(3, 500, (1600,), generator=random)
    tails = torch.randint(3, 500, (8, 50), generator=random)
    tails[:, 0] = torch.arange(8) + 3
    return RaggedBatch.from_sequences([torch.cat([stem, tail]) for tail in tails])


@pytest.mark.slow
def test_records_of_a_real_run() -> None:
    load = Workload("shared", shared_batch(), 1600)
    records = measure_memory("tiny-qwen3", load, ["dense-sdpa", "scatter-sdpa", "trie-sdpa"], "float32")
    assert [record.attention for record in records] == ["scatter-sdpa", "trie-sdpa"]
    scatter, trie = records
    assert scatter.limit is None
    assert trie.limit is not None
    assert trie.limit > 1.05
    assert trie.passed
    # r is 6.6: the trie's rows cannot need half of what dense needs, nor can they need nothing.
    assert 0.02 < trie.value < 0.5
    assert trie.value <= scatter.value * 1.1
    assert trie.details["one_over_r"] == pytest.approx(2000 / 13200)
    assert trie.details["peak_mb"] < trie.details["dense_peak_mb"]


def test_a_hungry_path_turns_red(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"dense-padded": 200.0, "dense-sdpa": 100.0, "trie-sdpa": 110.0, "scatter-sdpa": 300.0}
    monkeypatch.setattr(memory, "peak_megabytes", lambda *args, **kwargs: peaks)
    load = Workload("shared", RaggedBatch.from_sequences([[1, 2], [1, 3]]))
    scatter, trie = measure_memory("any", load, ["scatter-sdpa", "trie-sdpa"], "float32")
    assert not trie.passed
    assert trie.value == pytest.approx(1.1)
    assert trie.details["leanest_dense"] == "dense-sdpa"
    assert scatter.passed
    peaks["trie-sdpa"] = 104.0
    assert measure_memory("any", load, ["trie-sdpa"], "float32")[0].passed


def test_a_failing_process_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)measuring memory of dense-padded failed.*no-such-model"):
        peak_megabytes("no-such-model", RaggedBatch.from_sequences([[1, 2]]), ["dense-padded"], "float32")


def test_a_missing_counter_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no NoSuchKey"):
        memory._status_bytes("NoSuchKey")
