"""Figure 5: against vLLM: published latencies, and what attention inside the trie would make of the paper's."""

from __future__ import annotations

from typing import Any

import torch

from radixmlp.reference import RaggedBatch

from ..data import Data, Drawing, Point
from ..data_models import QWEN3, TITLES
from ..published import latencies
from ..roofline import DEVICES, Work, predict
from ..style import LOOKS, bar, key, legend_below, new_figure

RUNS = {"query_first_vs_vllm": "query first", "document_first_vs_vllm": "document first"}
ENGINES = {
    "tei": ("dense", "published: dense (TEI)"),
    "tei+radixmlp": ("scatter", "published: the paper's path (TEI + RadixMLP)"),
    "vllm": ("prefix-kv", "published: vLLM"),
}
LENGTH, PASSAGES, TOKENS = 150, 10, 16_384  # of the batch that the prediction assumes
WIDTH = 0.2


def main(data: Data) -> Drawing:
    """Two panels, by the order of query and document: P50 as bars, whiskers up to P90."""
    figure, [panels] = new_figure(2, size=(10.4, 4.7))
    for axes, (run, title) in zip(panels, RUNS.items(), strict=True):
        _panel(axes, run)
        axes.set_title(title)
    panels[0].set_ylabel("latency of a request (s); bar: P50, whisker: P90")
    legend_below(figure, panels, columns=2)
    caption = (
        "Published: H100, float16, batches of up to 16,384 tokens, recomputed from the paper's raw timing "
        "files. Dashed and hollow: predicted, not measured: the published time of the paper's path, times "
        f"what the roofline gives for the trie over the paper's path on batches of {TOKENS:,} tokens, "
        f"{PASSAGES} passages a query, {LENGTH} tokens each (assumed), sharing as much as the published "
        "gain over dense says. On sequences this short the trie saves mostly the copies to the ragged "
        f"layout and back. vLLM was not run by this project. {data.provenance()}"
    )
    return Drawing(5, "vllm", "Against vLLM's prefix cache", caption, figure)


def _panel(axes: Any, run: str) -> None:
    facts = {(f.engine, _model(f.model)): f for f in latencies() if f.run == run}
    for x, model in enumerate(QWEN3):
        for offset, (engine, (path, _)) in enumerate(ENGINES.items()):
            fact = facts[engine, model]
            place = x + (offset - 1.5) * WIDTH
            bar(axes, place, Point("", "", x, fact.p50_s, "s", ""), path, WIDTH * 0.9, "published")
            _whisker(axes, place, fact.p50_s, fact.p90_s)
        ours = facts["tei+radixmlp", model]
        share = _trie_share(model, facts["tei", model].p50_s / ours.p50_s)
        place = x + 1.5 * WIDTH
        bar(axes, place, Point("", "", x, share * ours.p50_s, "s", ""), "trie", WIDTH * 0.9, "predicted")
        _whisker(axes, place, share * ours.p50_s, share * ours.p90_s)
    for path, label in ENGINES.values():
        key(axes, path, label, "published")
    key(axes, "trie", "predicted: attention inside the trie, H100", "predicted")
    axes.set_xticks(range(len(QWEN3)), [TITLES[model] for model in QWEN3])
    axes.grid(visible=False, axis="x")


def _whisker(axes: Any, x: float, p50: float, p90: float) -> None:
    axes.errorbar([x], [p50], yerr=[[0], [p90 - p50]], color=LOOKS["dense"].color, capsize=2, elinewidth=1)


def _trie_share(model: str, r: float) -> float:
    """Predicted seconds of the trie over the paper's path, on batches that share as `r` says."""
    work = Work.of(_batch(r)).without_head()
    trie, scatter = (
        predict(DEVICES["h100"], QWEN3[model], work, path).seconds for path in ("trie", "scatter")
    )
    return trie / scatter


def _batch(r: float) -> RaggedBatch:
    """Queries of `PASSAGES` sequences of `LENGTH` tokens; each query's share a prefix, so that N / N' is `r`.

    A query has prefix + PASSAGES x own = PASSAGES x LENGTH / r rows, and prefix + own = LENGTH.
    """
    own = round((PASSAGES * LENGTH / r - LENGTH) / (PASSAGES - 1))
    queries = TOKENS // (PASSAGES * LENGTH)
    sequences = torch.arange(queries * PASSAGES)[:, None]
    columns = torch.arange(LENGTH)
    ids = torch.where(columns < LENGTH - own, sequences // PASSAGES, sequences + queries)
    return RaggedBatch.from_sequences(list(ids))


def _model(name: str) -> str:
    """ "Qwen3-Embedding-0.6B" -> "0.6b"."""
    return name.rsplit("-", 1)[1].lower()
