"""Training on the trie: losses and log-probabilities whose gradients equal the unshared ones."""

from radixmlp.optimized.training.logprobs import SequenceLogprobs, sequence_logprobs
from radixmlp.optimized.training.loss import causal_lm_loss

__all__ = ["SequenceLogprobs", "causal_lm_loss", "sequence_logprobs"]
