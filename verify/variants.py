"""The alternatives a user has for one batch, as calls that all return the same thing.

Each computes the whole backbone and then only what a reranker, classifier or embedder reads: the last token's
logits [B, vocab] where the model has a head, its hidden state [B, hidden] where it has none.

- `dense-padded`: the untouched model on the right-padded batch with its mask; without a mask where all
  lengths are equal, so that SDPA takes its causal kernel.
- `dense-sdpa`, `scatter-sdpa`, `trie-sdpa`, ...: `radixmlp.forward` with that backend. Building the plan is
  part of the call, because it is part of what a user waits for.
- `prefix-kv`: Hugging Face's own reuse of one common prefix. The prefix runs once into a `DynamicCache`, the
  cache is repeated for every sequence, and the suffixes run as one padded batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

import radixmlp
from radixmlp.reference import RaggedBatch

DENSE_PADDED = "dense-padded"
DENSE_RAGGED = "dense-sdpa"
PREFIX_KV = "prefix-kv"
DENSE = (DENSE_PADDED, DENSE_RAGGED)

Variant = Callable[[], Tensor]


@dataclass(frozen=True)
class PaddedRows:
    """A right-padded slice of a batch: the rows from `start` on of each sequence.

    `input_ids`, `position_ids`: [B, L]. `attention_mask`: [B, start + L], None where nothing is padded.
    `last`: [B], the column of each sequence's last token. `counted`: positions are start, start + 1, ...
    """

    input_ids: Tensor
    position_ids: Tensor
    attention_mask: Tensor | None
    last: Tensor
    counted: bool


def build_variants(model: Any, batch: RaggedBatch, names: Sequence[str]) -> dict[str, Variant]:
    """One callable per name, ready to time.

    Args:
        model: a Hugging Face causal LM or AutoModel in eval mode.
        batch: no empty sequence; moved to the model's device here, outside the timed calls.
        names: `dense-padded`, `prefix-kv` or any registered attention backend. `prefix-kv` is left out where
            the sequences have no token in common to start with.

    Raises:
        ValueError: a sequence is empty (it has no last token), or a name is unknown.
    """
    _check_no_empty_sequence(batch)
    batch = batch.to(next(model.parameters()).device)
    known = radixmlp.attention_backends()
    variants: dict[str, Variant] = {}
    for name in names:
        if name == DENSE_PADDED:
            variants[name] = _dense_padded(model, batch)
        elif name == PREFIX_KV:
            prefix = common_prefix_length(batch)
            if prefix:
                variants[name] = _prefix_kv(model, batch, prefix)
        elif name in known or name == "auto":
            variants[name] = _ragged(model, batch, name)
        else:
            choices = ", ".join([DENSE_PADDED, PREFIX_KV, "auto", *known])
            raise ValueError(f"unknown variant {name!r}: choose from {choices}")
    return variants


def warm_up(model: Any, names: Sequence[str]) -> None:
    """Run each variant once on a tiny batch: the checks of a model's first use, and code compiled on demand."""
    tiny = RaggedBatch.from_sequences([[1, 2, 3, 4], [1, 2, 3, 5]])
    for call in build_variants(model, tiny, names).values():
        call()


def common_prefix_length(batch: RaggedBatch) -> int:
    """Tokens that all sequences start with, short of the shortest's last: every suffix keeps one."""
    _check_no_empty_sequence(batch)
    limit = int(batch.lengths.min()) - 1
    rows = batch.cu_seqlens[:-1, None].to(torch.int64) + torch.arange(limit, device=batch.cu_seqlens.device)
    same = torch.ones(limit, dtype=torch.bool, device=batch.input_ids.device)
    for values in (batch.input_ids, batch.position_ids):
        columns = values[rows]  # [B, limit]
        same &= (columns == columns[:1]).all(0)
    return int(same.to(torch.int64).cumprod(0).sum())


def pad_rows(batch: RaggedBatch, start: int = 0) -> PaddedRows:
    """Right-pad the rows from offset `start` on of every sequence (each must be longer than `start`)."""
    lengths = batch.lengths.to(torch.int64) - start
    width = int(lengths.max())
    columns = torch.arange(width, device=lengths.device)
    real = columns < lengths[:, None]  # [B, L]
    rows = (batch.cu_seqlens[:-1, None].to(torch.int64) + start + columns).clamp(max=batch.num_tokens - 1)
    input_ids = torch.where(real, batch.input_ids[rows].to(torch.int64), 0)
    position_ids = torch.where(real, batch.position_ids[rows].to(torch.int64), 0)
    mask = None
    if not bool(real.all()):
        mask = torch.cat([real.new_ones(real.shape[0], start), real], 1).to(torch.int64)
    counted = bool(((position_ids == start + columns) | ~real).all())
    return PaddedRows(input_ids, position_ids, mask, lengths - 1, counted)


@contextmanager
def only_last_token(model: Any, last: Tensor) -> Iterator[None]:
    """Within the block the model's head computes one row per sequence: column `last[b]` of sequence b.

    `logits_to_keep` cannot say this for a padded batch of unequal lengths. A hook can, and the model's own
    scaling and soft-capping of logits still run.
    """
    head = output_head(model)
    if head is None:
        yield
        return

    def keep_last(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_take_last(args[0], last)[:, None], *args[1:])

    handle = head.register_forward_pre_hook(keep_last)
    try:
        yield
    finally:
        handle.remove()


def output_head(model: Any) -> nn.Module | None:
    """The layer that makes logits, None for a model that ends in hidden states."""
    getter = getattr(model, "get_output_embeddings", None)
    return getter() if getter is not None else None


def _dense_padded(model: Any, batch: RaggedBatch) -> Variant:
    padded = pad_rows(batch)
    kwargs: dict[str, Any] = {"attention_mask": padded.attention_mask, "use_cache": False}
    if not padded.counted:
        kwargs["position_ids"] = padded.position_ids
        if padded.attention_mask is None:  # else transformers takes a gap for the start of another sequence
            kwargs["attention_mask"] = torch.ones_like(padded.input_ids)

    def call() -> Tensor:
        with torch.no_grad(), only_last_token(model, padded.last):
            return _last_token(model(input_ids=padded.input_ids, **kwargs), padded.last)

    return call


def _ragged(model: Any, batch: RaggedBatch, attention: str) -> Variant:
    ends = batch.cu_seqlens[1:].to(torch.int64) - 1
    has_head = output_head(model) is not None

    def call() -> Tensor:
        with torch.no_grad():
            out = radixmlp.forward(model, batch, attention=attention, logits_to_keep=1)
            if has_head:
                assert out.logits is not None
                return out.logits
            return out.last_hidden_state[ends]

    return call


def _prefix_kv(model: Any, batch: RaggedBatch, prefix: int) -> Variant:
    shared = batch.input_ids[None, :prefix].to(torch.int64)
    shared_positions = batch.position_ids[None, :prefix].to(torch.int64)
    suffixes = pad_rows(batch, start=prefix)
    backbone = model.base_model
    prefix_argument, suffix_argument = cache_argument(backbone), cache_argument(model)
    default_prefix = bool((shared_positions == torch.arange(prefix, device=shared.device)).all())
    prefix_kwargs = {} if default_prefix else {"position_ids": shared_positions}
    suffix_kwargs = {} if suffixes.counted else {"position_ids": suffixes.position_ids}

    def call() -> Tensor:
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            backbone(input_ids=shared, use_cache=True, **{prefix_argument: cache}, **prefix_kwargs)
            cache.batch_repeat_interleave(batch.num_sequences)
            with only_last_token(model, suffixes.last):
                out = model(
                    input_ids=suffixes.input_ids,
                    attention_mask=suffixes.attention_mask,
                    use_cache=True,
                    **{suffix_argument: cache},
                    **suffix_kwargs,
                )
            return _last_token(out, suffixes.last)

    return call


def cache_argument(model: Any) -> str:
    """The name of the KV-cache argument, which transformers renamed from `past_key_values` to `cache`."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise ValueError(
        f"{type(model).__name__}.forward takes no KV cache: it has neither `cache` nor `past_key_values`"
    )


def _last_token(out: Any, last: Tensor) -> Tensor:
    """[B, vocab] logits that the head made of the last tokens, or their [B, hidden] hidden states."""
    logits = getattr(out, "logits", None)
    if logits is not None:
        return logits[:, 0]
    return _take_last(out.last_hidden_state, last)


def _take_last(values: Tensor, last: Tensor) -> Tensor:
    """[B, L, width] -> [B, width]."""
    return values[torch.arange(last.shape[0], device=values.device), last]


def _check_no_empty_sequence(batch: RaggedBatch) -> None:
    empty = (batch.lengths == 0).nonzero()
    if batch.num_sequences == 0 or empty.numel():
        which = f"row {int(empty[0])} is empty" if empty.numel() else "the batch has no sequence"
        raise ValueError(f"{which}: it has no last token to compute; leave it out of the workload")
