"""radixmlp: compute every shared prefix of a batch once."""

from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan

__all__ = ["AttentionSpec", "RaggedBatch", "TriePlan"]
