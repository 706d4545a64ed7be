"""Batches with one level of sharing, with three, with the shipped texts' and with one level a sequence."""

from __future__ import annotations

from radixmlp import RaggedBatch
from radixmlp.verify import smollm2
from radixmlp.verify.workloads import make_workload

_VOCABULARY = 49_152


def comb(sequences: int) -> RaggedBatch:
    """Sequence i shares i tokens with the next one and then ends: as many levels as sequences."""
    return RaggedBatch.from_sequences([[*range(i), _VOCABULARY - 1 - i] for i in range(1, sequences + 1)])


def batches(quick: bool) -> dict[str, RaggedBatch]:
    """What is counted and timed, by name."""
    if quick:
        sizes = {"prefix_length": 12, "suffix_length": 4, "batch_size": 2}
        return {
            "synthetic:24+8x4": make_workload("synthetic:24+8x4", None, 512).batch,
            "three levels, small": make_workload("tree", None, 512, **sizes).batch,
            "comb of 12": comb(12),
        }
    tokenizer = smollm2.load_tokenizer()
    sizes = {"prefix_length": 256, "suffix_length": 64, "batch_size": 3}
    return {
        "synthetic:512+64x16": make_workload("synthetic:512+64x16", None, _VOCABULARY).batch,
        "three levels, 256 + 3 x 64, 27 rollouts": make_workload("tree", None, _VOCABULARY, **sizes).batch,
        "rerank-query-first (4 queries x 20)": make_workload(
            "rerank-query-first", tokenizer, _VOCABULARY, queries=4
        ).batch,
        "few-shot (16 texts)": make_workload("few-shot", tokenizer, _VOCABULARY).batch,
        "comb of 300": comb(300),
    }
