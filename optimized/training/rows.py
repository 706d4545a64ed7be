"""A batch's distinct rows through the decoder, with gradients."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.attention import get_attention, shares_prefixes
from radixmlp.optimized.errors import UnsupportedModelError
from radixmlp.optimized.index import build_plan
from radixmlp.optimized.integration.checks import check_call
from radixmlp.optimized.integration.enabling import settings_of
from radixmlp.optimized.integration.models import (
    Head,
    embedding_of,
    head_of,
    refuse_virtual_tokens,
    unwrapped,
)
from radixmlp.optimized.integration.probe import ensure_verified
from radixmlp.optimized.integration.randomness import RefuseRandomness
from radixmlp.optimized.integration.switch import CompactCall, compact_call
from radixmlp.reference import RaggedBatch, TriePlan


@dataclass(frozen=True, eq=False)
class CompactRows:
    """What a decoder made of a batch.

    Args:
        model: the transformers model, without its wrappers.
        decoder: the name of its submodule that ran.
        plan: on the model's device.
        output: what the decoder returned, of one compact row of tokens.
    """

    model: Any
    decoder: str
    plan: TriePlan
    output: Any

    @property
    def hidden(self) -> Tensor:
        """[N', d] the last hidden states."""
        hidden: Tensor = self.output[0][0]
        return hidden


def run_decoder(
    model: Any, batch: RaggedBatch, attention: str | None = None, plan: TriePlan | None = None
) -> CompactRows:
    """Run the decoder of a causal LM on one row per trie node, keeping the graph for the backward.

    Args:
        model: an (enabled or plain) causal LM, or a wrapper of one (PEFT, a compiled module).
        attention: a name of `attention_backends()` or "auto"; what `enable` set where omitted, else "auto", which
            here always means the trie's rows: the cost model knows nothing of a backward.
        plan: the batch's, in depth-first order, where it was built ahead of time.

    Raises:
        UnsupportedModelError: no causal LM, one whose rows may not be shared, dropout in training, a router loss.
    """
    refuse_virtual_tokens(model)
    model = unwrapped(model)
    attention = settings_of(model).attention if attention is None else attention
    if head_of(model) is not Head.LANGUAGE:
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head to score tokens with")
    _refuse_router_loss(model)
    facts = ensure_verified(model)
    dense = attention != "auto" and not shares_prefixes(get_attention(attention))
    if plan is None:
        plan = TriePlan.identity(batch) if dense else build_plan(batch)
    plan = plan.to(embedding_of(model).device)
    if plan.num_nodes == 0:
        raise ValueError("the batch has no tokens: nothing to train on")
    check_call(model, plan, facts.max_rows)
    inputs = {
        "input_ids": plan.input_ids.long()[None],
        "position_ids": plan.position_ids.long()[None],
        "attention_mask": torch.ones(1, plan.num_nodes, dtype=torch.int64, device=plan.gather.device),
        "use_cache": False,
    }
    drawing = not dense and any(part.training for part in model.modules())
    with (
        compact_call(model, CompactCall.on(model, plan, attention)),
        RefuseRandomness() if drawing else nullcontext(),
    ):
        output = model.get_submodule(facts.decoder)(**inputs)
    return CompactRows(model, facts.decoder, plan, output)


def _refuse_router_loss(model: Any) -> None:
    config = model.config.get_text_config()
    if getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0):
        raise UnsupportedModelError(
            f"{type(model).__name__} adds a router loss over all tokens: call the enabled model with labels (it "
            "counts every token), or set config.output_router_logits = False"
        )
