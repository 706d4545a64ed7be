"""The published numbers are complete, sourced, and those that were published."""

from __future__ import annotations

import csv
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from radixmlp.verify.checkout import load_module

ROOT = Path(__file__).resolve().parents[2]
published: Any = load_module(ROOT / "paper_figures", "radixmlp_paper_figures", "published")
FILES = sorted((ROOT / "paper_figures" / "published").glob("*.csv"))
UNITS = ("_s", "_us", "_gb", "_percent", "_tokens")
WITHOUT_UNIT = {
    "rows",
    "width",
    "sequences",
    "tokens_per_sequence",
    "tokens",
    "requests",
    "batch",
    "r",
    "speedup",
}


def all_rows() -> list[Any]:
    readers = (
        published.latencies,
        published.row_copies,
        published.index_times,
        published.reranking,
        published.synthetic,
        published.against_vllm,
        lambda: list(published.claims().values()),
    )
    return [row for reader in readers for row in reader()]


def test_every_file_has_a_reader() -> None:
    lines = sum(len(list(csv.DictReader(path.open(encoding="utf-8")))) for path in FILES)
    assert lines == len(all_rows())


@pytest.mark.parametrize("row", all_rows(), ids=lambda row: type(row).__name__)
def test_every_number_has_a_unit_and_a_source(row: Any) -> None:
    assert row.source.startswith("arXiv 2601.15013: ")
    for field in fields(row):
        value = getattr(row, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        assert math.isfinite(value)
        assert value > 0
        named = field.name.endswith(UNITS) or field.name in WITHOUT_UNIT or field.name.endswith("per_s")
        assert named or (field.name == "value" and row.unit)


def test_the_kernel_table() -> None:
    rows = {row.shape: row for row in published.row_copies()}
    assert {shape: (row.native_us, row.kernel_us, row.speedup) for shape, row in rows.items()} == {
        "16000 x 1024": (106, 28, 3.75),
        "100000 x 2048": (33_700, 1_470, 22.9),
        "2000 x 64 x 256": (2_880, 211, 13.6),
    }
    for row in rows.values():
        assert row.native_us / row.kernel_us == pytest.approx(row.speedup, rel=0.02)
        assert (row.device, row.dtype) == ("H100", "float16")


def test_the_index_times() -> None:
    rows = published.index_times()
    assert [(row.sequences, row.tokens, row.time_us, row.at_most) for row in rows] == [
        (32, 16_384, 576, False),
        (2_048, 1_048_576, 60_750, False),
        (None, 16_384, 750, True),
    ]
    assert [row.throughput_mtok_per_s for row in rows] == [28.4, 17.3, None]
    for row in rows[:2]:
        assert row.tokens / row.time_us == pytest.approx(row.throughput_mtok_per_s, rel=0.01)
        assert row.tokens == row.sequences * row.tokens_per_sequence


def test_the_reranking_table() -> None:
    rows = [
        (row.model, row.dense_s, row.radix_s, row.speedup, row.memory_percent)
        for row in published.reranking()
    ]
    assert rows == [
        ("Qwen3-0.6B", 0.78, 0.54, 1.44, 35),
        ("Qwen3-4B", 3.76, 2.42, 1.56, 42),
        ("Qwen3-8B", 5.96, 3.74, 1.59, 48),
    ]
    assert {row.max_batch_tokens for row in published.reranking()} == {65_536}


def test_the_synthetic_speedups() -> None:
    rows = published.synthetic()
    assert [(row.model, row.speedup) for row in rows] == [
        ("Qwen3-0.6B", 2.7),
        ("Qwen3-4B", 4.1),
        ("Qwen3-8B", 5.0),
    ]
    for row in rows:
        assert (row.prefix_tokens, row.suffix_tokens, row.batch, row.at_most) == (2048, 256, 32, True)
        tokens, nodes = row.batch * (2048 + 256), 2048 + row.batch * 256
        assert row.r == pytest.approx(tokens / nodes)


def test_the_comparison_with_vllm() -> None:
    query_first, document_first = published.against_vllm()
    assert (query_first.dataset, query_first.statistic) == ("b", "p50")
    assert (query_first.radix_s, query_first.vllm_s) == (0.55, 0.71)
    assert (query_first.radix_memory_gb, query_first.vllm_memory_gb) == (17, 79)
    assert (document_first.dataset, document_first.statistic) == ("c", "p90")
    assert (document_first.radix_s, document_first.vllm_s) == (4.28, 3.91)


def test_settings_and_limits() -> None:
    assert {name: claim.value for name, claim in published.claims().items()} == {
        "radix_mlp_threshold": 0.9,
        "max_batch_tokens": 65_536,
        "fp16_embedding_difference": 1e-4,
        "attention_dominates_beyond": 32_768,
    }


def test_the_raw_timings_agree_with_the_tables() -> None:
    """Two sources of the same runs: rounded to what the tables print, they are equal."""
    timed = {(row.run, row.engine, row.model, row.max_batch_tokens): row for row in published.latencies()}
    assert len(timed) == len(published.latencies()) == 30
    for row in published.reranking():
        model = row.model.replace("Qwen3-", "Qwen3-Embedding-")
        for engine, seconds in (("tei", row.dense_s), ("tei+radixmlp", row.radix_s)):
            assert timed["msmarco_v1.1_validation", engine, model, 65_536].p50_s == pytest.approx(
                seconds, abs=0.006
            )
    query_first, document_first = published.against_vllm()
    small = timed["query_first_vs_vllm", "vllm", "Qwen3-Embedding-0.6B", 16_384]
    assert small.p50_s == pytest.approx(query_first.vllm_s, abs=0.006)
    large = timed["document_first_vs_vllm", "tei+radixmlp", "Qwen3-Embedding-8B", 16_384]
    assert large.p90_s == pytest.approx(document_first.radix_s, abs=0.006)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,value,unit\na,1,x\n", "expected"),
        ("name,value,unit,source\na,fast,x,y\n", "line 2, value: 'fast' is not a float"),
        ("name,value,unit,source\na,1,x,\n", "line 2, source: '' is not a str"),
        ("name,value,unit,source\na,1,x\n", "line 2: expected 4 cells"),
        ("name,value,unit,source\na,1,x,y,z\n", "line 2: expected 4 cells"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "claims.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message) as error:
        published.read_rows(path, published.Claim)
    assert "claims.csv" in str(error.value)
