"""The engine: from a pile of texts to embeddings, scores and labels, every shared prefix computed once."""

from radixmlp.optimized.engine.batching import Batch, plan_batches, trie_order
from radixmlp.optimized.engine.config import EngineConfig
from radixmlp.optimized.engine.engine import Engine
from radixmlp.optimized.engine.errors import RequestError, SlowIndexWarning
from radixmlp.optimized.engine.results import Classification, Scores
from radixmlp.optimized.engine.stats import EngineStats
from radixmlp.optimized.engine.templates import QWEN3_RERANKER, Template

__all__ = [
    "QWEN3_RERANKER",
    "Batch",
    "Classification",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "RequestError",
    "Scores",
    "SlowIndexWarning",
    "Template",
    "plan_batches",
    "trie_order",
]
