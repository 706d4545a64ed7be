"""Speed records: what is judged, against what, and that slow and wrong paths turn red."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import radixmlp
from radixmlp.optimized.attention import get_attention
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.verify import speed
from radixmlp.verify.records import Record, Workload
from radixmlp.verify.speed import measure_index, measure_speed, promises_speed, speed_limit

ATTENTIONS = ["dense-sdpa", "scatter-sdpa", "trie-sdpa"]


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def workload(prefix: int, suffix: int, count: int) -> Workload:
    random = torch.Generator().manual_seed(3)
    stem = torch.randint(0, 128, (prefix,), generator=random)
    tails = torch.randint(0, 128, (count, suffix), generator=random)
    tails[:, 0] = torch.arange(count)
    batch = RaggedBatch.from_sequences([torch.cat([stem, tail]) for tail in tails])
    return Workload(f"{prefix}+{suffix}x{count}", batch, prefix)


def measure(model: Any, load: Workload, attentions: list[str], pairs: int = 2) -> dict[str, Record]:
    records = measure_speed(model, "tiny", load, attentions, "float32", "cpu", pairs)
    return {record.attention: record for record in records}


class SlowTrie:
    """The right answer, much too late."""

    name = "slow-trie"

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        return None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        time.sleep(0.1)
        return get_attention("trie-sdpa")(q, k, v, plan, spec)


@pytest.fixture
def slow_trie() -> Iterator[str]:
    radixmlp.register_attention(SlowTrie())
    yield SlowTrie.name
    radixmlp.unregister_attention(SlowTrie.name)


def test_every_alternative_has_a_record(model: Any) -> None:
    load = workload(24, 8, 4)
    records = measure(model, load, ATTENTIONS)
    fastest = records["trie-sdpa"].details["fastest_dense"]
    assert set(records) == {"dense-padded", "dense-sdpa", "scatter-sdpa", "trie-sdpa", "prefix-kv"} - {
        fastest
    }
    for record in records.values():
        assert (record.kind, record.metric, record.model, record.workload) == (
            "speed",
            "speedup",
            "tiny",
            load.name,
        )
        details = record.details
        assert details["q20"] <= record.value <= details["q80"]
        assert details["r"] == pytest.approx(32 * 4 / (24 + 4 * 8))
        assert details["gamma"] == pytest.approx(1 / details["r"])
        assert details["prefix_length"] == 24
    trie = records["trie-sdpa"]
    assert 1 < records["scatter-sdpa"].details["ideal"] < trie.details["ideal"] < 4
    assert trie.details["share_of_ideal"] == pytest.approx(trie.value / trie.details["ideal"])
    assert 0 < trie.details["plan_share_of_forward"] < 1
    assert records["prefix-kv"].limit is None
    assert records["prefix-kv"].details["ideal"] is None


def test_the_value_is_over_the_faster_dense() -> None:
    plan = TriePlan.identity(RaggedBatch.from_sequences([[1, 2]]))
    seconds = {"dense-padded": [4.0, 9.0, 4.0], "dense-sdpa": [3.0, 2.0, 3.0], "trie-sdpa": [1.0, 1.0, 2.0]}
    comparison = speed.SpeedComparison(speed.Timings(seconds), plan, None, 0.0, {})
    assert comparison.fastest_dense == "dense-sdpa"
    assert comparison.speedup("trie-sdpa").median == 2.0


def test_a_slow_path_turns_red_and_was_measured_again(
    model: Any, slow_trie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "JUDGED_SECONDS", 0.0)
    record = measure(model, workload(24, 8, 4), [slow_trie])[slow_trie]
    assert not record.passed
    assert record.limit is not None
    assert record.value < record.limit
    assert record.details["rounds"] == 2 + 4 + 8


def test_calls_of_a_few_milliseconds_are_reported_not_judged(model: Any, slow_trie: str) -> None:
    record = measure(model, workload(8, 4, 2), [slow_trie])[slow_trie]
    assert record.limit is None
    assert record.passed
    assert record.details["judged"] is False


@pytest.mark.parametrize(
    ("ideal", "r", "limit"),
    [(6.0, 7.0, 3.0), (2.9, 3.0, 1.45), (1.4, 3.5, 0.9), (2.5, 2.9, 0.9), (None, 9.0, 0.9), (1.0, 1.0, 0.9)],
)
def test_limits(ideal: float | None, r: float, limit: float) -> None:
    assert speed_limit(ideal, r) == pytest.approx(limit)


def test_only_backends_that_share_prefixes_promise_speed() -> None:
    promised = {name for name in [*ATTENTIONS, "dense-padded", "prefix-kv", "auto"] if promises_speed(name)}
    assert promised == {"scatter-sdpa", "trie-sdpa", "auto"}


def test_the_warm_up_can_pick_the_dense_to_time(model: Any) -> None:
    batch = workload(24, 8, 4).batch
    comparison = speed.compare(model, batch, ["trie-sdpa"], rounds=2, screen_dense=True)
    assert set(comparison.timings.seconds) == {comparison.fastest_dense, "trie-sdpa"}
    assert set(comparison.outputs) == {"dense-padded", "dense-sdpa", "trie-sdpa"}
    dense, trie = comparison.outputs["dense-padded"], comparison.outputs["trie-sdpa"]
    assert torch.allclose(dense, trie, atol=1e-4)


def test_an_empty_sequence_is_refused(model: Any) -> None:
    load = Workload("edges", RaggedBatch.from_sequences([[1], []]))
    with pytest.raises(ValueError, match="row 1 is empty"):
        measure_speed(model, "tiny", load, ATTENTIONS, "float32", "cpu", 1)


def test_index_records() -> None:
    large, small = measure_index(workload(256, 64, 8)), measure_index(workload(4, 4, 2))
    assert [record.metric for record in large] == ["build_speedup_trie", "build_speedup_input"]
    for record in large:
        assert record.kind == "index"
        assert record.limit == 1.0
        assert record.passed == (record.value >= 1.0)
        expected = record.details["tokens"] / record.details["fast_ms"] / 1e3
        assert record.details["mtok_per_s"] == pytest.approx(expected)
    assert all(record.limit is None for record in small)


def test_a_slow_index_builder_turns_red(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = radixmlp.build_plan

    def slow(batch: RaggedBatch, order: Any = "trie") -> TriePlan:
        time.sleep(0.05)
        return honest(batch, order=order)

    monkeypatch.setattr(radixmlp, "build_plan", slow)
    assert not any(record.passed for record in measure_index(workload(256, 64, 8)))
