"""`radixmlp bench`: exit codes, what is written and when, and bars that cannot pass on wrong results."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify import bars as bars_module
from radixmlp.verify import bench, figures
from radixmlp.verify.bars import Bar, bar_of_record, wrong_outputs
from radixmlp.verify.oracle import Outputs
from radixmlp.verify.records import Record
from radixmlp.verify.speed import SpeedComparison, compare
from radixmlp.verify.timing import Timings

OLD = '{"old": true}'


def bar(name: str = "fast", value: float = 7.0, limit: float | None = 6.5, **more: Any) -> Bar:
    return Bar(name, value, limit, more.pop("better", "higher"), "a shape", **more)


def use(monkeypatch: pytest.MonkeyPatch, **groups: Callable[[Any], list[Bar]]) -> None:
    for group in groups.values():
        group.__doc__ = "What it measures."
    monkeypatch.setattr(bench, "GROUPS", groups)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose file of this machine exists already."""
    monkeypatch.setattr(bench, "find_checkout", lambda: tmp_path)
    where = {"device": "Abacus, 2 cores", "torch": "2.13.0", "threads": 2}
    monkeypatch.setattr(bench, "environment", lambda device: where)
    file = tmp_path / "paper_figures" / "measured" / "abacus-2-cores.json"
    bench.write_atomically(file, json.loads(OLD))
    return file


def test_all_bars_reached(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    good = bar(quantiles=(6.8, 7.2), ideal=10.0)
    use(monkeypatch, first=lambda progress: [good], second=lambda progress: [bar("info", limit=None)])
    assert bench.main([]) == 0
    document = json.loads(checkout.read_text())
    assert set(document) == {"environment", "bars"}
    assert document["environment"]["device"] == "Abacus, 2 cores"
    row = document["bars"][0]
    needed = {"name", "value", "limit", "passed", "quantiles", "shape", "ideal", "share_of_ideal"}
    assert needed <= set(row)
    assert row["share_of_ideal"] == pytest.approx(0.7)
    assert row["quantiles"] == [6.8, 7.2]
    assert row["passed"] is True
    printed = capsys.readouterr().out
    assert "fast" in printed
    assert "1 of 1 bars reached" in printed


@pytest.mark.parametrize(
    "bad",
    [
        bar(value=6.4),
        bar(value=math.nan),
        bar(value=0.3, limit=0.25, better="lower"),
        bar(value=math.nan, limit=0.25, better="lower"),
        bar(wrong="RMS error too large"),
        bar(limit=None, wrong="wrong output"),
    ],
)
def test_a_missed_bar_fails_and_is_still_written(
    bad: Bar, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, first=lambda progress: [bar(), bad])
    assert bench.main([]) == 1
    rows = json.loads(checkout.read_text())["bars"]
    assert [row["passed"] for row in rows] == [True, False]


def test_interrupted_leaves_the_old_file(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(progress: Any) -> list[Bar]:
        raise KeyboardInterrupt

    use(monkeypatch, first=lambda progress: [bar()], second=interrupted)
    assert bench.main([]) == 130
    assert json.loads(checkout.read_text()) == json.loads(OLD)
    assert list(checkout.parent.iterdir()) == [checkout]


def test_a_group_that_raises_fails_and_the_others_still_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    ran: list[str] = []

    def broken(progress: Any) -> list[Bar]:
        raise ImportError("no radix-mlp: pip install 'radixmlp[bench]'")

    def sound(progress: Any) -> list[Bar]:
        ran.append("sound")
        return [bar()]

    use(monkeypatch, broken=broken, sound=sound)
    assert bench.main([]) == 1
    assert ran == ["sound"]
    assert "Not written: a group did not run" in capsys.readouterr().out
    assert json.loads(checkout.read_text()) == json.loads(OLD)
    asked = tmp_path / "asked.json"
    assert bench.main(["--out", str(asked)]) == 1
    row = json.loads(asked.read_text())["bars"][0]
    assert row["value"] is None
    assert "radix-mlp" in row["wrong"]


def test_a_part_is_written_only_where_asked(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, first=lambda progress: [bar("one")], second=lambda progress: [bar("two")])
    assert bench.main(["--only", "second"]) == 0
    assert json.loads(checkout.read_text()) == json.loads(OLD)
    asked = tmp_path / "new" / "part.json"
    assert bench.main(["--only", "second", "--out", str(asked)]) == 0
    assert [row["name"] for row in json.loads(asked.read_text())["bars"]] == ["two"]


def test_a_part_replaces_its_own_bars_of_the_same_machine(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = {"device": "Abacus, 2 cores", "torch": "2.13.0", "threads": 2, "commit": "old", "dirty": False}
    monkeypatch.setattr(bench, "environment", lambda device: where)
    use(monkeypatch, first=lambda _: [bar("first: one")], second=lambda _: [bar("second: two")])
    assert bench.main([]) == 0
    use(monkeypatch, first=lambda _: [bar("first: one")], second=lambda _: [bar("second: two", 8.0)])
    for changed in ({"dirty": True}, {"torch": "2.14.0"}):
        monkeypatch.setattr(bench, "environment", lambda device, changed=changed: where | changed)
        assert bench.main(["--only", "second"]) == 0
        assert [row["value"] for row in json.loads(checkout.read_text())["bars"]] == [7.0, 7.0]
    monkeypatch.setattr(bench, "environment", lambda device: where | {"commit": "new"})
    assert bench.main(["--only", "second"]) == 0
    document = json.loads(checkout.read_text())
    assert [(row["name"], row["value"], row.get("commit")) for row in document["bars"]] == [
        ("first: one", 7.0, None),
        ("second: two", 8.0, "new"),
    ]
    assert document["environment"]["commit"] == "old"


def test_outside_a_checkout_out_is_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "find_checkout", lambda: None)
    ran: list[str] = []

    def group(progress: Any) -> list[Bar]:
        ran.append("ran")
        return [bar()]

    use(monkeypatch, only=group)
    assert bench.main([]) == 2
    assert not ran
    assert bench.main(["--out", str(tmp_path / "x.json")]) == 0


def test_nothing_measured_is_no_success(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, empty=lambda progress: [])
    assert bench.main([]) == 1
    use(monkeypatch, unjudged=lambda progress: [bar(limit=None)])
    assert bench.main([]) == 1


def test_unknown_group_is_a_usage_error(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--only", "fastest"])
    assert stopped.value.code == 2
    assert "qwen3-0.6b" in capsys.readouterr().err


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text(OLD)
    with pytest.raises(ValueError, match="not JSON compliant"):
        bench.write_atomically(file, {"value": math.nan})
    assert file.read_text() == OLD
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture(scope="module")
def case() -> tuple[Any, RaggedBatch, SpeedComparison]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    stem = torch.arange(20)
    batch = RaggedBatch.from_sequences([torch.cat([stem, torch.tensor([30 + b, 40, 50])]) for b in range(6)])
    return model, batch, compare(model, batch, ["scatter-sdpa", "trie-sdpa", "prefix-kv"], rounds=1)


def test_right_outputs_pass(case: tuple[Any, RaggedBatch, SpeedComparison]) -> None:
    model, batch, comparison = case
    assert wrong_outputs(model, batch, comparison.outputs, list(range(6))) == {}


@pytest.mark.parametrize("plant", ["zero", "rows shifted", "one row off", "not a number"])
def test_a_planted_wrong_output_makes_its_bars_red(
    case: tuple[Any, RaggedBatch, SpeedComparison], plant: str
) -> None:
    model, batch, comparison = case
    good = comparison.outputs["trie-sdpa"]
    bad = good.clone()
    if plant == "zero":
        bad.zero_()
    elif plant == "rows shifted":
        bad = bad.roll(1, 0)
    elif plant == "one row off":
        bad[2] *= 1.1
    else:
        bad[0, 0] = math.nan
    outputs = {**comparison.outputs, "trie-sdpa": bad}
    wrong = wrong_outputs(model, batch, outputs, list(range(6)))
    assert set(wrong) == {"trie-sdpa"}
    over_dense = bars_module.over_dense("trie", comparison, "trie-sdpa", 0.0, "shape", wrong)
    over_kv = bars_module.over_prefix_kv("trie", comparison, 0.0, "shape", wrong)
    scatter = bars_module.over_dense("scatter", comparison, "scatter-sdpa", 0.0, "shape", wrong)
    assert not over_dense.passed
    assert not over_kv.passed
    assert scatter.passed


def test_a_bar_against_a_wrong_rival_is_red(case: tuple[Any, RaggedBatch, SpeedComparison]) -> None:
    comparison = case[2]
    against_kv = bars_module.over_prefix_kv("x", comparison, 0.0, "shape", {"prefix-kv": "wrong"})
    against_dense = bars_module.over_dense(
        "x", comparison, "trie-sdpa", 0.0, "shape", {comparison.fastest_dense: "wrong"}
    )
    assert not against_kv.passed
    assert not against_dense.passed


def test_speed_bars_take_the_fastest_dense_and_the_right_rival() -> None:
    seconds = {
        "dense-padded": [8.0, 8.0], "dense-sdpa": [6.0, 6.0], "scatter-sdpa": [2.0, 2.0],
        "trie-sdpa": [1.0, 1.0], "prefix-kv": [1.5, 1.5],
    }  # fmt: skip
    plan = TriePlan.identity(RaggedBatch.from_sequences([[1, 2]]))
    ideal = {"dense": 1.0, "scatter": 4.0, "trie": 8.0}
    comparison = SpeedComparison(Timings(seconds), plan, ideal, 0.001, {})
    trie = bars_module.over_dense("t", comparison, "trie-sdpa", 6.5, "shape", {})
    scatter = bars_module.over_dense("s", comparison, "scatter-sdpa", 3.0, "shape", {})
    kv = bars_module.over_prefix_kv("k", comparison, 1.25, "shape", {})
    assert (trie.value, trie.passed, trie.ideal) == (6.0, False, 8.0)
    assert (scatter.value, scatter.passed, scatter.row()["share_of_ideal"]) == (3.0, True, 0.75)
    assert (kv.value, kv.passed, kv.ideal) == (1.5, True, None)


def test_the_memory_bar_divides_by_the_leaner_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {"dense-padded": 400.0, "dense-sdpa": 200.0, "trie-sdpa": 60.0}
    monkeypatch.setattr(bars_module, "peak_megabytes", lambda *args, **kwargs: peaks)
    batch = RaggedBatch.from_sequences([[1, 2]])
    comparison = SpeedComparison(Timings({"dense-sdpa": [1.0]}), TriePlan.identity(batch), None, 0.0, {})
    memory = bars_module.memory_bar("m", "any", batch, "shape", comparison, print)
    assert memory.value == pytest.approx(0.3)
    assert not memory.passed


def test_records_of_the_index_benchmark_become_bars() -> None:
    labels = ("none", "32 x 512", "none", "int64", "cpu")
    fast = Record("index", *labels, "speedup", 9.0, 1.5, True, {"q20": 8.5, "q80": 9.5, "order": "input"})
    growth = Record("index", *labels, "growth", 2.1, 2.05, False, {"better": "lower"})
    unequal = Record("index", *labels, "speedup", 0.0, 1.5, False, {"wrong": "scatter differs"})
    assert bar_of_record(fast).passed
    assert bar_of_record(fast).quantiles == (8.5, 9.5)
    assert not bar_of_record(growth).passed
    assert bar_of_record(unequal).wrong == "scatter differs"
    assert not bar_of_record(unequal).passed


@pytest.mark.parametrize(("moved", "judged"), [(1e-6, True), (1.0, False)])
def test_embeddings_are_judged_where_dense_itself_stays(
    case: tuple[Any, RaggedBatch, SpeedComparison],
    monkeypatch: pytest.MonkeyPatch,
    moved: float,
    judged: bool,
) -> None:
    model, batch, _ = case
    width = model.config.hidden_size
    alone = torch.zeros(batch.num_tokens, width)
    alone[:, 0] = 1.0
    dense = torch.zeros(batch.num_sequences, width)
    dense[:, 0], dense[:, 1] = 1.0, moved
    wrong = dense.roll(2, 1)
    monkeypatch.setattr(bars_module, "each_alone", lambda *args: Outputs(alone, None))
    outputs = {"dense-padded": dense, "dense-sdpa": dense, "trie-sdpa": wrong}
    calls = {name: (lambda value=value: value) for name, value in outputs.items()}
    monkeypatch.setattr(bars_module, "build_variants", lambda *args: calls)
    embeddings = bars_module.embedding_bar("any", model.base_model, batch)
    assert embeddings.value == pytest.approx(1.0)
    assert (embeddings.limit is not None) == judged
    assert embeddings.passed != judged


def test_embeddings_of_a_real_model_are_close(case: tuple[Any, RaggedBatch, SpeedComparison]) -> None:
    model, batch, _ = case
    embeddings = bars_module.embedding_bar("tiny", model.base_model.float(), batch)
    model.to(torch.bfloat16)
    assert embeddings.limit == 1e-4
    assert embeddings.passed


def test_without_ms_marco_the_bar_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "msmarco_is_local", lambda: False)
    entries, source = figures._rerank_entries()
    assert "NOT MS MARCO" in source
    assert entries[0].passages
