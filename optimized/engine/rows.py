"""A prepared batch through the model: hidden states of its rows, and a head to read them with."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from radixmlp.optimized.attention.schedule import schedule_of
from radixmlp.optimized.cost.choice import choose_attention, fixed_rule
from radixmlp.optimized.cost.work import DENSE, TRIE
from radixmlp.optimized.engine.config import EngineConfig
from radixmlp.optimized.integration.compact import forward
from radixmlp.optimized.integration.models import (
    Head,
    backbone_of,
    embedding_of,
    head_module,
    head_of,
)
from radixmlp.optimized.training.head import ChunkedHead, LinearHead, head_for
from radixmlp.optimized.training.rows import CompactRows, run_decoder
from radixmlp.reference import RaggedBatch, TriePlan


@dataclass(frozen=True, eq=False)
class Ran:
    """What a batch came to.

    Args:
        plan: the plan it ran on, on the model's device.
        hidden: [N', hidden] the last hidden states of its rows.
        attention: the backend that ran.
        scores: [B, num_labels] of a sequence classifier, else None.
        compact: what the language model's head needs, where there is one.
    """

    plan: TriePlan
    hidden: Tensor
    attention: str
    scores: Tensor | None = None
    compact: CompactRows | None = None

    @property
    def last(self) -> Tensor:
        """[B] int64 the row of each sequence's last token, found from its length."""
        return self.plan.scatter[self.plan.cu_seqlens[1:].long() - 1].long()


@dataclass(frozen=True, eq=False)
class Route:
    """How a batch runs.

    Args:
        attention: a backend's name, or "auto" for the trie's with whatever else a layer needs.
        plan: None: on one row per token.
        chosen: the backend that "auto" stands for.
    """

    attention: str
    plan: TriePlan | None
    chosen: str | None = None

    @property
    def name(self) -> str:
        """The backend, for people."""
        return self.chosen or self.attention


@dataclass
class Runner:
    """Runs batches of one call.

    Args:
        model: the transformers model.
        config: of the engine.
        linear: whether the head is one matrix product, once that has been compared with the model's own.
    """

    model: Any
    config: EngineConfig
    linear: bool | None = None

    def choose(self, plan: TriePlan | None) -> Route:
        """How to run a batch with this plan (None: densely)."""
        asked = self.config.attention
        if plan is None:
            return Route(DENSE if asked == "auto" else asked, None)
        if asked != "auto":
            return Route(asked, plan)
        if plan.gamma > self.config.radix_mlp_threshold:
            return Route(DENSE, None)
        with fixed_rule() if self.config.deterministic else nullcontext():
            choice = choose_attention(self.model, plan)
        if not choice.shares:
            return Route(DENSE, None)
        # Left "auto", layers that the trie's attention cannot serve may take another.
        return Route("auto" if choice.attention == TRIE else choice.attention, plan, choice.attention)

    def ready(self, plan: TriePlan) -> TriePlan:
        """The plan on the model's device, with what the trie's attention derives from it: work that is done ahead."""
        plan = plan.to(embedding_of(self.model).device)
        if self.config.attention in ("auto", TRIE) and plan.gamma <= self.config.radix_mlp_threshold:
            schedule_of(plan)
        return plan

    def run(self, batch: RaggedBatch, route: Route) -> Ran:
        """One batch."""
        kind = head_of(self.model)
        if kind is Head.LANGUAGE:
            compact = run_decoder(self.model, batch, route.attention, route.plan)
            return Ran(compact.plan, compact.hidden, route.name, compact=compact)
        model = self.model if kind in (Head.NONE, Head.SEQUENCE) else backbone_of(self.model)
        threshold = self.config.radix_mlp_threshold
        with fixed_rule():
            out = forward(model, batch, route.attention, plan=route.plan, threshold=threshold)
        scores = out.logits if kind is Head.SEQUENCE else None
        return Ran(out.plan, out.compact_hidden_state, route.name, scores)

    def head(self, ran: Ran) -> ChunkedHead:
        """The language model's head for the rows of `ran`."""
        assert ran.compact is not None
        module = head_module(self.model)
        if self.linear and isinstance(module, nn.Linear):
            return LinearHead(module)
        head = head_for(ran.compact)
        self.linear = isinstance(head, LinearHead)
        return head

    def columns(self, ran: Ran, rows: Tensor, tokens: tuple[int, ...]) -> Tensor:
        """[R, C] logits of a few tokens for some rows, in fp32 (fp64) from the model's hidden states on.

        Where the head is one matrix product, its own columns are taken in fp32: bf16 logits near 20 lie 0.125 apart,
        and documents would tie.
        """
        head = self.head(ran)
        hidden = ran.hidden[rows]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        picked = list(tokens)
        if isinstance(head, LinearHead):
            weight = head.weight[picked].to(wide)
            bias = None if head.bias is None else head.bias[picked].to(wide)
            with torch.autocast(hidden.device.type, enabled=False):
                return nn.functional.linear(hidden.to(wide), weight, bias)
        chunks = [head.logits(part)[:, picked].to(wide) for part in hidden.split(head.chunk)]
        return torch.cat(chunks)
