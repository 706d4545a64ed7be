"""The readable implementation every other path is judged against (PyTorch and standard library only).

`ragged` and `plan` hold the vocabulary the whole project speaks; `trie`, `attention` and `model` are the
mathematics, written for a reader.
"""

from radixmlp.reference import attention, model, trie
from radixmlp.reference.plan import AttentionSpec, Order, TriePlan
from radixmlp.reference.ragged import RaggedBatch

__all__ = ["AttentionSpec", "Order", "RaggedBatch", "TriePlan", "attention", "model", "trie"]
