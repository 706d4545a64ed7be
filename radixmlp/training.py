"""Losses on the trie: `radixmlp.training.causal_lm_loss`, `radixmlp.training.sequence_logprobs`."""

from radixmlp.optimized.training import SequenceLogprobs, causal_lm_loss, sequence_logprobs

__all__ = ["SequenceLogprobs", "causal_lm_loss", "sequence_logprobs"]
