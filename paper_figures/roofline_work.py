"""What one batch asks of a decoder, in numbers that no device changes: rows, pairs, and heads' rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import radixmlp
from radixmlp.optimized.attention.schedule import Call, schedule_of
from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.verify.ideal import visible_pairs

# How the CPU's attention cuts a causal chain: one chunk up to `WHOLE_CHAIN` rows, else `CAUSAL_ROWS` at a time.
WHOLE_CHAIN = 128
CAUSAL_ROWS = 64


@dataclass(frozen=True)
class Attended:
    """Attention of one layer on one path; every head does the same.

    Args:
        pairs: visible (query, key) pairs.
        rows: distinct queries.
        first_rows, first_pairs: queries, and pairs computed, of the calls that write a row for the first time, with
            their padding and what their masks hide.
        merged_rows, merged_pairs: of the calls without a mask, whose result is merged into an earlier one.
    """

    pairs: int
    rows: int
    first_rows: int
    first_pairs: int
    merged_rows: int
    merged_pairs: int


@dataclass(frozen=True)
class Work:
    """One batch.

    Args:
        rows, compact_rows: N and N'.
        dense, trie: attention with a row a token (dense and the paper's path), and inside the trie.
        sequences: B.
        longest: tokens of the longest sequence.
        logits_rows: rows of the head in a prefill: B for last-token logits, 0 for none.
        targets, compact_targets: rows of the head in a training step, a row a token and a row a trie node.
    """

    rows: int
    compact_rows: int
    dense: Attended
    trie: Attended
    sequences: int
    longest: int
    logits_rows: int
    targets: int
    compact_targets: int

    def head_rows(self, path: str, training: bool) -> int:
        """Rows that the head makes logits for."""
        if not training:
            return self.logits_rows
        return self.targets if path == "dense" else self.compact_targets

    @property
    def r(self) -> float:
        """N / N', the compression ratio."""
        return self.rows / self.compact_rows if self.compact_rows else 1.0

    @classmethod
    def of(cls, batch: RaggedBatch, plan: TriePlan | None = None, labels: torch.Tensor | None = None) -> Work:
        """Count a batch of N tokens.

        Args:
            batch: at least one token.
            plan: its plan in depth-first order; built where omitted.
            labels: [N], -100 leaves a target out of the training step; every token but each sequence's first is
                one where omitted.

        Raises:
            ValueError: the batch has no tokens, or the plan is not in depth-first order.
        """
        if batch.num_tokens == 0:
            raise ValueError("the batch has no tokens: there is no work to predict")
        plan = radixmlp.build_plan(batch) if plan is None else plan
        if plan.order != "trie":
            raise ValueError(f"the plan is in order={plan.order!r}: the roofline needs order='trie'")
        sources = _source_rows(batch, labels)
        return cls(
            rows=plan.num_tokens,
            compact_rows=plan.num_nodes,
            dense=attended_of(TriePlan.identity(batch)),
            trie=attended_of(plan),
            sequences=batch.num_sequences,
            longest=int(batch.lengths.max()),
            logits_rows=batch.num_sequences,
            targets=sources.numel(),
            compact_targets=int(plan.scatter.long()[sources].unique().numel()),
        )

    @classmethod
    def shared_prefix(cls, prefix: int, suffix: int, batch: int) -> Work:
        """`batch` sequences of `prefix` tokens in common and `suffix` of their own each, the synthetic workload.

        Raises:
            ValueError: a negative prefix, or no suffix or sequence.
        """
        if prefix < 0 or suffix < 1 or batch < 1:
            raise ValueError(
                f"prefix {prefix}, suffix {suffix}, batch {batch}: expected at least 0, 1 and 1 tokens or sequences"
            )
        shared = torch.zeros(batch, prefix, dtype=torch.int32)
        own = torch.arange(1, batch + 1, dtype=torch.int32)[:, None].expand(batch, suffix)
        rows = torch.cat([shared, own], 1)
        length = prefix + suffix
        ragged = RaggedBatch(
            rows.flatten(),
            torch.arange(length, dtype=torch.int32).repeat(batch),
            torch.arange(batch + 1, dtype=torch.int32) * length,
        )
        return cls.of(ragged)

    @classmethod
    def mean(cls, works: Sequence[Work]) -> Work:
        """The mean of several batches, count by count."""
        return _combined(works, lambda counts: round(sum(counts) / len(counts)))

    def repeated(self, times: int) -> Work:
        """A batch of `times` such batches that share nothing with each other."""
        many = _combined([self], lambda counts: counts[0] * times)
        return replace(many, longest=self.longest)

    def to_dict(self) -> dict[str, Any]:
        """Counts by name, for a JSON file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, counts: Mapping[str, Any]) -> Work:
        """The work that `to_dict` wrote."""
        attended = {name: Attended(**counts[name]) for name in ("dense", "trie")}
        return cls(**{**counts, **attended})

    def without_head(self) -> Work:
        """The same work for a model that ends in hidden states."""
        return replace(self, logits_rows=0)


def _combined(works: Sequence[Work], combine: Callable[[list[int]], int]) -> Work:
    def combined(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: combined([value[name] for value in values]) for name in values[0]}
        return combine(values)

    return Work.from_dict(combined([work.to_dict() for work in works]))


def attended_of(plan: TriePlan) -> Attended:
    """Count the attention of a plan in depth-first order."""
    schedule = schedule_of(plan)
    return Attended(
        pairs=visible_pairs(plan.depth),
        rows=plan.num_nodes,
        first_rows=sum(_rows(call) for call in schedule.first),
        first_pairs=sum(_computed_pairs(call) for call in schedule.first),
        merged_rows=sum(_rows(call) for call in schedule.merged),
        merged_pairs=sum(_computed_pairs(call) for call in schedule.merged),
    )


def _rows(call: Call) -> int:
    return call.queries.n * call.queries.length


def _computed_pairs(call: Call) -> int:
    """A causal chunk computes up to its last row's keys; every other call computes all of its keys."""
    length = call.queries.length
    if not call.causal or length <= WHOLE_CHAIN:
        return _rows(call) * call.keys.length
    ends = [*range(CAUSAL_ROWS, length, CAUSAL_ROWS), length]
    starts = range(0, length, CAUSAL_ROWS)
    computed = sum((end - start) * (call.lead + end) for start, end in zip(starts, ends, strict=True))
    return call.queries.n * computed


def _source_rows(batch: RaggedBatch, labels: torch.Tensor | None) -> torch.Tensor:
    """Ragged rows that predict a target: those before a token that is one."""
    target = torch.ones(batch.num_tokens, dtype=torch.bool) if labels is None else labels != -100
    starts = batch.cu_seqlens[:-1].long()
    target = target.clone()
    target[starts[batch.lengths > 0]] = False
    return target.nonzero()[:, 0] - 1
