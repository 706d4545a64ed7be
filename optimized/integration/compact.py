"""`forward`: a ragged batch through an unmodified Hugging Face model, one row per trie node."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from radixmlp.optimized.attention import get_attention, shares_prefixes
from radixmlp.optimized.cost.choice import choose_attention, dense_choice
from radixmlp.optimized.cost.model import Choice
from radixmlp.optimized.cost.work import DENSE
from radixmlp.optimized.errors import UnsupportedModelError
from radixmlp.optimized.index import build_plan
from radixmlp.optimized.integration.checks import check_call
from radixmlp.optimized.integration.enabling import settings_of
from radixmlp.optimized.integration.models import (
    Head,
    backbone_of,
    head_of,
    refuse_virtual_tokens,
    unwrapped,
)
from radixmlp.optimized.integration.output import RaggedOutput
from radixmlp.optimized.integration.probe import ensure_verified
from radixmlp.optimized.integration.randomness import RefuseRandomness
from radixmlp.optimized.integration.switch import CompactCall, compact_call
from radixmlp.reference import RaggedBatch, TriePlan


def forward(
    model: Any,
    batch: RaggedBatch,
    attention: str | None = None,
    *,
    plan: TriePlan | None = None,
    threshold: float | None = None,
    logits_to_keep: int | Tensor = 0,
) -> RaggedOutput:
    """Run `model` on `batch`, computing every shared prefix once (arXiv 2601.15013, section 3).

    Args:
        model: an unmodified transformers causal LM, base decoder, or sequence classifier. Its first use runs a
            small probe of the compact forward against the model's own.
        batch: N tokens in B sequences; moved to the model's device where needed.
        attention: a name of `attention_backends()`, or "auto" (the default unless `enable` said otherwise): dense
            ragged rows where gamma > `threshold`; else what a short calibration of the model on its device predicts
            to be fastest (`radixmlp.optimized.cost`), inside the trie for small batches and where there is none.
        plan: the batch's plan in depth-first order, where it was built ahead of time.
        threshold: for "auto": the largest gamma worth compacting (default 0.9). A named backend always runs.
        logits_to_keep: 0: logits for every token; k: for the last k tokens of each sequence; [B] integers: for so
            many of each. The head runs on distinct rows only. (A sequence classifier always scores last tokens.)

    Returns:
        `RaggedOutput`: `last_hidden_state` [N, hidden], `logits` [N, V] ([B, V] for `logits_to_keep=1`; sequence by
        sequence for other counts), or None; `choice` says what "auto" chose and why.

    Raises:
        UnsupportedModelError: the model mixes rows otherwise than by causal attention.
        UnsupportedAttentionError: the named backend does not exist or cannot serve a layer.
        ValueError: a token id beyond the vocabulary, an empty sequence with `logits_to_keep`, a foreign plan.
    """
    refuse_virtual_tokens(model)
    model = unwrapped(model)
    chosen = settings_of(model)
    attention = attention or chosen.attention
    threshold = chosen.threshold if threshold is None else threshold
    if attention != "auto":
        get_attention(attention)
    _check_tokens(model, batch, logits_to_keep)
    facts = ensure_verified(model)
    choice: Choice | None = None
    if attention == "auto":
        plan = _plan_for(batch, plan)
        too_much = plan.gamma > threshold
        choice = dense_choice(plan, threshold) if too_much else choose_attention(model, plan)
        if not choice.shares:
            attention, plan = DENSE, None
    return run_compact(
        model,
        batch,
        attention,
        plan=plan,
        logits_to_keep=logits_to_keep,
        max_rows=facts.max_rows,
        choice=choice,
    )


def run_compact(
    model: Any,
    batch: RaggedBatch,
    attention: str,
    *,
    plan: TriePlan | None = None,
    logits_to_keep: int | Tensor = 0,
    max_rows: int | None = None,
    choice: Choice | None = None,
) -> RaggedOutput:
    """`forward` without the choice, which it is given, and the checks of the model."""
    dense = attention != "auto" and not shares_prefixes(get_attention(attention))
    device = model.get_input_embeddings().weight.device
    plan = (TriePlan.identity(batch) if dense else _plan_for(batch, plan)).to(device)
    call = CompactCall.on(model, plan, attention, None if choice is None else choice.attention)
    wanted = _wanted_rows(plan, _kept(model, logits_to_keep))
    if plan.num_nodes == 0:
        return _empty_output(model, plan, attention, choice)
    check_call(model, plan, max_rows)
    drawing = not dense and any(part.training for part in model.modules())
    with compact_call(model, call), RefuseRandomness() if drawing else nullcontext():
        hidden, logits, logit_rows = _run_rows(model, plan, wanted)
    return RaggedOutput(plan, hidden, logits, logit_rows, attention, choice)


def _kept(model: Any, logits_to_keep: int | Tensor) -> int | Tensor:
    """Last tokens of each sequence that get logits, 0 for all: a sequence classifier scores the last one."""
    return 1 if head_of(model) is Head.SEQUENCE else logits_to_keep


def _plan_for(batch: RaggedBatch, plan: TriePlan | None) -> TriePlan:
    if plan is None:
        return build_plan(batch)
    if plan.order != "trie":
        raise ValueError(
            f"the plan is in order={plan.order!r}: a forward needs depth-first order, order='trie'"
        )
    device = batch.input_ids.device
    if plan.num_tokens == batch.num_tokens and torch.equal(plan.cu_seqlens.to(device), batch.cu_seqlens):
        rows = plan.scatter.to(device)
        pairs = ((plan.input_ids, batch.input_ids), (plan.position_ids, batch.position_ids))
        if all(bool((compact.to(device)[rows] == ragged).all()) for compact, ragged in pairs):
            return plan
    raise ValueError(
        f"the plan is of another batch: it is of {plan.num_tokens} tokens in {plan.cu_seqlens.numel() - 1} "
        f"sequences, the batch has {batch.num_tokens} in {batch.num_sequences}, or their tokens differ"
    )


def _wanted_rows(plan: TriePlan, logits_to_keep: int | Tensor) -> Tensor | None:
    """[M] compact rows whose logits are returned; None: every token's."""
    if isinstance(logits_to_keep, int) and logits_to_keep == 0:
        return None
    ends = plan.cu_seqlens[1:].long()
    lengths = plan.cu_seqlens.diff().long()
    kept = lengths.minimum(torch.as_tensor(logits_to_keep, device=lengths.device))
    last = ends.repeat_interleave(kept)
    back = kept.cumsum(0).repeat_interleave(kept) - torch.arange(last.numel(), device=last.device)
    return plan.scatter[last - back].long()


def _run_rows(
    model: Any, plan: TriePlan, wanted: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(hidden [N', d], logits [R, V] or None, the row of `logits` of each wanted one)."""
    inputs = {
        "input_ids": plan.input_ids.long()[None],
        "position_ids": plan.position_ids.long()[None],
        # Given, so that transformers does not take jumps in position_ids for packed sequences.
        "attention_mask": torch.ones(1, plan.num_nodes, dtype=torch.int64, device=plan.gather.device),
        "use_cache": False,
    }
    head = head_of(model)
    if head is Head.NONE:
        return backbone_of(model)(**inputs)[0][0], None, None
    if head is Head.OTHER:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a head that is none of a language model's, a sequence classifier's or a "
            "token classifier's: run its base_model and apply the head to last_hidden_state"
        )
    rows: Tensor | None = None
    logit_rows = plan.scatter.long()
    if wanted is not None:
        rows, logit_rows = wanted.unique(return_inverse=True)
    if head is Head.SEQUENCE:
        hidden = backbone_of(model)(**inputs)[0][0]
        return hidden, model.score(hidden[rows]), logit_rows
    keep = {} if rows is None else {"logits_to_keep": rows}
    if wanted is not None and "logits_to_keep" not in inspect.signature(model.forward).parameters:
        keep, logit_rows = {}, wanted
    captured: list[Tensor] = []
    handle = backbone_of(model).register_forward_hook(
        lambda _module, _args, output: captured.append(output[0])
    )
    try:
        logits = model(**inputs, **keep).logits
    finally:
        handle.remove()
    return captured[0][0], logits[0], logit_rows


def _empty_output(model: Any, plan: TriePlan, attention: str, choice: Choice | None) -> RaggedOutput:
    """No tokens: outputs of the right widths and no rows, without running the model."""
    embedding = model.get_input_embeddings().weight
    hidden = embedding.new_zeros(0, model.config.get_text_config().hidden_size)
    head = head_of(model)
    if head is Head.NONE:
        return RaggedOutput(plan, hidden, None, None, attention, choice)
    width = model.config.num_labels if head is Head.SEQUENCE else embedding.shape[0]
    return RaggedOutput(plan, hidden, embedding.new_zeros(0, width), plan.scatter.long(), attention, choice)


def _check_tokens(model: Any, batch: RaggedBatch, logits_to_keep: int | Tensor) -> None:
    _check_kept(batch, logits_to_keep)
    if batch.num_tokens:
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if int(batch.input_ids.max()) >= vocabulary:
            row, offset, value = _locate(batch, int((batch.input_ids >= vocabulary).nonzero()[0]))
            raise ValueError(
                f"input_ids row {row}, offset {offset} is {value}, but the model has {vocabulary} token embeddings"
            )
    kept = _kept(model, logits_to_keep)
    if isinstance(kept, int) and kept and bool((batch.lengths == 0).any()):
        row = int((batch.lengths == 0).nonzero()[0])
        raise ValueError(f"sequence {row} is empty: it has no last token to give logits for; leave it out")


def _check_kept(batch: RaggedBatch, logits_to_keep: int | Tensor) -> None:
    if isinstance(logits_to_keep, int):
        if logits_to_keep < 0:
            raise ValueError(
                f"logits_to_keep is {logits_to_keep}: expected 0 (all) or the number of last tokens"
            )
        return
    if logits_to_keep.shape != (batch.num_sequences,) or logits_to_keep.is_floating_point():
        raise ValueError(
            f"logits_to_keep has shape {tuple(logits_to_keep.shape)} and dtype {logits_to_keep.dtype}: expected an "
            f"int, or one integer for each of the {batch.num_sequences} sequences"
        )
    if bool((logits_to_keep < 0).any()):
        row = int((logits_to_keep < 0).nonzero()[0])
        raise ValueError(f"logits_to_keep row {row} is {int(logits_to_keep[row])}: expected 0 or more")


def _locate(batch: RaggedBatch, index: int) -> tuple[int, int, int]:
    row = int(torch.searchsorted(batch.cu_seqlens[1:].contiguous(), index, right=True))
    return row, index - int(batch.cu_seqlens[row]), int(batch.input_ids[index])
