"""Hugging Face models on the trie, through transformers' attention interface and without touching their code."""

from radixmlp.optimized.integration.compact import forward
from radixmlp.optimized.integration.output import RaggedOutput
from radixmlp.optimized.integration.settings import disable, enable

__all__ = ["RaggedOutput", "disable", "enable", "forward"]
