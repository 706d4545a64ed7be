"""Trees of random prompts and completions, and groups of sequences with the same prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from radixmlp.reference import RaggedBatch


def tree_batch(widths: Sequence[int], leaves: Sequence[int], vocabulary: int, fan: int = 4) -> RaggedBatch:
    """A prompt tree: a trunk of `widths[0]` tokens, `fan` branches into each further level, then completions.

    Args:
        widths: tokens of each shared level.
        leaves: tokens of each completion below one branch.
    """
    rng = random.Random(0)
    paths = [_ids(rng, widths[0], vocabulary)]
    for width in widths[1:]:
        paths = [path + own for path in paths for own in _siblings(rng, [width] * fan, vocabulary)]
    return RaggedBatch.from_sequences(
        [path + own for path in paths for own in _siblings(rng, leaves, vocabulary)]
    )


def prompt_keys(batch: RaggedBatch, prompt: int) -> Tensor:
    """[B] int64, equal for sequences whose first `prompt` tokens are equal."""
    rows = batch.input_ids.split(batch.lengths.tolist())
    prompts = [tuple(row[:prompt].tolist()) for row in rows]
    number = {tokens: index for index, tokens in enumerate(dict.fromkeys(prompts))}
    return torch.tensor([number[tokens] for tokens in prompts])


def measured_batches(vocabulary: int, shrink: int) -> dict[str, tuple[RaggedBatch, int]]:
    """{level: (batch, prompt tokens)}, of equal size.

    Three levels: a system prompt, four questions, four answers to each.
    """
    one = tree_batch([512 // shrink], [64 // shrink] * 16, vocabulary)
    three = tree_batch([256 // shrink, 256 // shrink], [64 // shrink] * 4, vocabulary)
    return {"one_level": (one, 512 // shrink), "three_levels": (three, 512 // shrink)}


def _ids(rng: random.Random, count: int, vocabulary: int) -> list[int]:
    return [rng.randrange(vocabulary) for _ in range(count)]


def _siblings(rng: random.Random, lengths: Sequence[int], vocabulary: int) -> list[list[int]]:
    """Token lists of the given lengths with different first tokens."""
    firsts = rng.sample(range(vocabulary), len(lengths))
    return [
        [first, *_ids(rng, length - 1, vocabulary)] for first, length in zip(firsts, lengths, strict=True)
    ]
