"""What an engine returns besides plain tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Classification(NamedTuple):
    """What `classify` returns.

    Args:
        labels: the likeliest label of each text.
        logprobs: [n, L] fp32, log p of each label's tokens after the prompt.
    """

    labels: list[str]
    logprobs: Tensor


class Scores(NamedTuple):
    """What `score` returns.

    Args:
        logprobs: [n] fp32, log p of each continuation, summed over its tokens.
        num_tokens: [n] int64 tokens of each continuation.
    """

    logprobs: Tensor
    num_tokens: Tensor
