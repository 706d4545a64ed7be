"""The figures to reach, in groups that can be run alone: models, batches and limits."""

from __future__ import annotations

from collections.abc import Callable

from radixmlp.verify.auto_bars import auto_bars
from radixmlp.verify.bars import (
    SCATTER,
    TIMED,
    TRIE,
    Bar,
    Progress,
    bar_of_record,
    embedding_bar,
    memory_bar,
    over_dense,
    over_prefix_kv,
    rerank_bar,
    wrong_outputs,
)
from radixmlp.verify.dropin_bars import dropin_rerank_bar, overhead_bar
from radixmlp.verify.engine_bars import engine_bars
from radixmlp.verify.index_bench import run_index_bench
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.passages import (
    MSMARCO_FILE,
    SHIPPED_FILE,
    RankedPassages,
    load_passages,
    msmarco_is_local,
)
from radixmlp.verify.speed import SpeedComparison, compare
from radixmlp.verify.training_bars import training_bars
from radixmlp.verify.variants import PREFIX_KV
from radixmlp.verify.workloads import make_workload


def small_model_bars(progress: Progress) -> list[Bar]:
    """Qwen3-0.6B's width, 4 layers, 512 + 64 tokens, 16 sequences, bf16."""
    loaded = load_model("qwen3-0.6b-width:4", "bfloat16", "cpu")
    batch = make_workload("synthetic:512+64x16", loaded.tokenizer, loaded.vocab_size).batch
    comparison = compare(loaded.model, batch, [SCATTER, TRIE, PREFIX_KV], rounds=7, progress=progress)
    wrong = wrong_outputs(loaded.model, batch, comparison.outputs, list(range(0, 16, 4)))
    shape = _shape("Qwen3-0.6B width, 4 layers, 512 + 64 tokens x 16", loaded, comparison)
    return [
        over_dense("qwen3-0.6b: trie over dense", comparison, TRIE, 6.5, shape, wrong),
        over_dense("qwen3-0.6b: scatter over dense", comparison, SCATTER, 3.5, shape, wrong),
        over_prefix_kv("qwen3-0.6b: trie over prefix KV-cache reuse", comparison, 1.25, shape, wrong),
    ]


def large_model_bars(progress: Progress) -> list[Bar]:
    """The paper's headline shape: Qwen3-8B's width, 1 layer, 2,048 + 256 tokens, 32 sequences, bf16."""
    name, workload_name = "qwen3-8b-width:1", "synthetic:2048+256x32"
    loaded = load_model(name, "bfloat16", "cpu")
    batch = make_workload(workload_name, loaded.tokenizer, loaded.vocab_size).batch
    comparison = compare(loaded.model, batch, [TRIE, PREFIX_KV], 2, progress, screen_dense=True)
    wrong = wrong_outputs(loaded.model, batch, comparison.outputs, [0, 17])
    shape = _shape("Qwen3-8B width, 1 layer, 2048 + 256 tokens x 32", loaded, comparison)
    del loaded
    return [
        over_dense("qwen3-8b: trie over dense", comparison, TRIE, 6.0, shape, wrong),
        over_prefix_kv("qwen3-8b: trie over prefix KV-cache reuse", comparison, 1.1, shape, wrong),
        memory_bar("qwen3-8b: trie's peak memory over dense", name, batch, shape, comparison, progress),
    ]


def rerank_bars(progress: Progress) -> list[Bar]:
    """SmolLM2-135M reranks MS MARCO, query first, 20 passages a query; the speed-up as a share of r."""
    entries, source = _rerank_entries()
    bars = []
    for dtype, every, rounds, limit in (("bfloat16", 2, 2, 0.9), ("float32", 15, 1, None)):
        loaded = load_model("smollm2-135m", dtype, "cpu")
        sample = entries[::every]
        bars.append(rerank_bar(loaded, sample, source, dtype, rounds, limit, progress))
    return bars


def embedding_bars(progress: Progress) -> list[Bar]:
    """fp16 last-token embeddings at Qwen3 widths, L2-normalised: the largest difference from dense.

    Judged where dense itself moves by less than the limit between "alone" and "in the batch"; where it does not,
    both differences are reported.
    """
    bars = []
    for name in ("qwen3-0.6b-width:4", "qwen3-4b-width:1", "qwen3-8b-width:1"):
        progress(f"fp16 embeddings of {name}")
        loaded = load_model(name, "float16", "cpu")
        batch = make_workload("embed-system-prompt", loaded.tokenizer, loaded.vocab_size, passages=6).batch
        bars.append(embedding_bar(name, loaded.model.base_model, batch))
    return bars


def dropin_bars(progress: Progress) -> list[Bar]:
    """Ordinary calls of an enabled model: their cost where nothing is shared, their gain in reranking."""
    entries, source = _rerank_entries()
    loaded = load_model("smollm2-135m", "bfloat16", "cpu")
    return [
        overhead_bar(loaded, progress),
        dropin_rerank_bar(loaded, entries[::6], source, 3, progress),
    ]


def lm_eval_bars(progress: Progress) -> list[Bar]:
    """lm-evaluation-harness, five shots, SmolLM2-135M in fp32: `HFLM` as it is, and our subclass."""
    # lm-eval is an extra.
    from radixmlp.verify.lm_eval_bench import bars_of, run_lm_eval_bench

    return bars_of(run_lm_eval_bench(progress=progress))


def index_bars(progress: Progress) -> list[Bar]:
    """The index builder against the published Rust package, in one process."""
    return [bar_of_record(record) for record in run_index_bench(progress)]


def _rerank_entries() -> tuple[list[RankedPassages], str]:
    """MS MARCO from beside the checkout, or the shipped passages; and which of the two it was."""
    if msmarco_is_local():
        return load_passages(MSMARCO_FILE), "MS MARCO (TREC DL 2019, BM25)"
    return load_passages(SHIPPED_FILE), "shipped passages, NOT MS MARCO (its file is not beside the checkout)"


def _shape(text: str, loaded: LoadedModel, comparison: SpeedComparison) -> str:
    r = comparison.plan.compression_ratio
    return f"{text}, bf16, r = {r:.1f}; {TIMED} (head of {loaded.vocab_size:,} rows)"


GROUPS: dict[str, Callable[[Progress], list[Bar]]] = {
    "qwen3-0.6b": small_model_bars,
    "qwen3-8b": large_model_bars,
    "rerank": rerank_bars,
    "embeddings": embedding_bars,
    "drop-in": dropin_bars,
    "lm-eval": lm_eval_bars,
    "training": training_bars,
    "engine": engine_bars,
    "auto": auto_bars,
    "index": index_bars,
}
