"""Hugging Face models on the trie, through transformers' attention interface and without touching their code."""

from radixmlp.optimized.integration.compact import forward
from radixmlp.optimized.integration.enabling import disable, enable
from radixmlp.optimized.integration.output import RaggedOutput
from radixmlp.optimized.integration.settings import Settings
from radixmlp.optimized.integration.stats import Stats

__all__ = ["RaggedOutput", "Settings", "Stats", "disable", "enable", "forward"]
