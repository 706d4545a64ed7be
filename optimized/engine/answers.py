"""What is read off a batch's rows: embeddings, the probability of one of two tokens, log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from radixmlp.optimized.engine.encoders import Entry
from radixmlp.optimized.engine.rows import Ran, Runner
from radixmlp.optimized.training.chunked import Logprobs
from radixmlp.optimized.training.edges import Edges

Pooling = Literal["last", "mean"]


@dataclass(frozen=True)
class Reader:
    """What to read off a batch.

    Args:
        read: given what ran, its runner and its entries: [B, width], a row for each entry, or [T, 1], a value for
            each target of the entries.
        width: values of a request.
        by_target: which of the two `read` gives.
    """

    read: Callable[[Ran, Runner, list[Entry]], Tensor]
    width: int
    by_target: bool = False


def read_embeddings(pooling: Pooling, normalize: bool, hidden_size: int) -> Reader:
    """Embeddings, [B, hidden]."""
    return Reader(lambda ran, *_: embeddings(ran, pooling, normalize), hidden_size)


def read_answers(yes: int, no: int) -> Reader:
    """The probability of one token against another, [B, 1]."""
    return Reader(lambda ran, runner, _: probabilities(ran, runner, yes, no), 1)


def read_classifier() -> Reader:
    """A sequence classifier's score as it is, [B, 1]."""

    def read(ran: Ran, *_: object) -> Tensor:
        assert ran.scores is not None
        return ran.scores

    return Reader(read, 1)


def read_columns(count: int) -> Reader:
    """Log-probabilities, [T, 1]: one for each target, in its column of `count`."""

    def read(ran: Ran, runner: Runner, entries: list[Entry]) -> Tensor:
        return continuation_logprobs(ran, runner, entries)[:, None]

    return Reader(read, count, by_target=True)


def read_scores() -> Reader:
    """The log-probability of each entry's one target and how many tokens that is, [B, 2]."""

    def read(ran: Ran, runner: Runner, entries: list[Entry]) -> Tensor:
        counts = torch.tensor([float(len(entry.targets[0].tokens)) for entry in entries])
        return torch.stack([continuation_logprobs(ran, runner, entries).float(), counts], 1)

    return Reader(read, 2)


def embeddings(ran: Ran, pooling: Pooling, normalize: bool) -> Tensor:
    """[B, hidden] fp32: the last token's state of each sequence, or the mean over its tokens."""
    wide = torch.promote_types(ran.hidden.dtype, torch.float32)
    if pooling == "last":
        pooled = ran.hidden[ran.last].to(wide)
    else:  # the rows of a path are summed where they lie: nothing is [N, hidden]
        starts = ran.plan.cu_seqlens[:-1].long()
        pooled = nn.functional.embedding_bag(
            ran.plan.scatter.long(), ran.hidden.to(wide), starts, mode="mean"
        )
    if normalize:
        pooled = nn.functional.normalize(pooled, dim=-1)
    return pooled.float()


def probabilities(ran: Ran, runner: Runner, yes: int, no: int) -> Tensor:
    """[B, 1] fp32: p(yes) / (p(yes) + p(no)) of the token after each sequence."""
    rows, places = ran.last.unique(return_inverse=True)
    logits = runner.columns(ran, rows, (yes, no))
    return logits.softmax(-1)[places, :1].float()


def continuation_logprobs(ran: Ran, runner: Runner, entries: list[Entry]) -> Tensor:
    """[T] fp64 on the CPU: log p of each target of the entries, in their order, summed over its tokens."""
    device = ran.plan.scatter.device
    ends = ran.plan.cu_seqlens[1:].tolist()
    asked = [
        (end, target.tokens) for end, entry in zip(ends, entries, strict=True) for target in entry.targets
    ]
    places = torch.tensor([row for end, tokens in asked for row in range(end - len(tokens), end)])
    tokens = torch.tensor([token for _, tokens in asked for token in tokens], device=device)
    nodes, source = ran.plan.scatter[places.to(device)].long().unique(return_inverse=True)
    head = runner.head(ran)
    edges = Edges(nodes, source, tokens, places)
    values: Tensor = Logprobs.apply(ran.hidden.index_select(0, nodes), head, edges, *head.parameters)
    owner = torch.arange(len(asked)).repeat_interleave(torch.tensor([len(tokens) for _, tokens in asked]))
    return torch.zeros(len(asked), dtype=torch.float64).index_add_(0, owner, values.cpu().double())
