"""What `forward` returns: compact results, laid out ragged where they are read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from radixmlp.optimized.cost.model import Choice
from radixmlp.reference import TriePlan


@dataclass(frozen=True, eq=False)
class RaggedOutput:
    """A forward's results in the layout of the ragged batch.

    Args:
        plan: the plan the model ran on (the identity plan for a dense run).
        compact_hidden_state: [N', hidden], one row a trie node.
        compact_logits: [R, V], or None for a model without a head.
        logit_rows: [M] int64, the row of `compact_logits` of each returned logit.
        attention: the backend that ran; "auto" where the trie's rows ran by choice.
        choice: what "auto" chose and why; None where a backend was named.
    """

    plan: TriePlan
    compact_hidden_state: Tensor
    compact_logits: Tensor | None
    logit_rows: Tensor | None
    attention: str
    choice: Choice | None = None

    @cached_property
    def last_hidden_state(self) -> Tensor:
        """[N, hidden]: the final hidden state of every token."""
        return self.compact_hidden_state.index_select(0, self.plan.scatter)

    @cached_property
    def logits(self) -> Tensor | None:
        """[N, V]; with `logits_to_keep=k` the last k tokens of each sequence, in order ([B, V] for k = 1)."""
        if self.compact_logits is None or self.logit_rows is None:
            return None
        return self.compact_logits.index_select(0, self.logit_rows)
