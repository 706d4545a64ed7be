"""The fast trie builder: time linear in the tokens, one CPU thread, without the GIL."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixmlp.optimized._index_match import match_sequences
from radixmlp.optimized._index_write import write_plan
from radixmlp.reference.plan import Order, TriePlan
from radixmlp.reference.ragged import RaggedBatch

Int32Array = NDArray[np.int32]

_ORDERS = get_args(Order)
# Drawn anew in each process, so that no batch is slow by design. The plan does not depend on them.
_MULTIPLIERS = np.frombuffer(os.urandom(24), np.uint64) | np.uint64(1)
_WORDS_OF_HUGE_PAGES = 1 << 20
_CACHE_LINE = 16  # words
_NO_KEYS = np.empty(0, np.int64)


@dataclass(frozen=True)
class IndexWork:
    """What one build looked at.

    Args:
        probes: hash-table slots, and tail owners passed when an edge was split.
        compares: tokens compared with tokens of an earlier sequence.
    """

    probes: int
    compares: int

    @property
    def total(self) -> int:
        """Probes plus compares."""
        return self.probes + self.compares


class _Matched(NamedTuple):
    """What `match_sequences` was given and what it found."""

    tokens: tuple[
        Int32Array, int, Int32Array, int
    ]  # the words of the ids and of the positions, with their shifts
    cu_seqlens: Int32Array
    prefixes: Int32Array
    num_nodes: int
    work: NDArray[np.int64]


def build_plan(batch: RaggedBatch, order: Order = "trie") -> TriePlan:
    """The prefix trie of `batch` as index maps; a node is unique by (parent, (token id, position id)).

    A batch on another device is brought to the CPU for it.

    Args:
        batch: N tokens in B sequences. Not written to, and not kept except for `cu_seqlens`.
        order: "trie" is depth-first, siblings in order of first occurrence; "input" is order of first
            occurrence, as the published Rust package numbers nodes.

    Returns:
        The plan, on the batch's device.

    Raises:
        ValueError: an unknown order; `cu_seqlens` changed since the batch checked it.

    Source: arXiv 2601.15013, section 3.
    """
    if order not in _ORDERS:
        raise ValueError(f"order is {order!r}: expected 'trie' or 'input'")
    tokens, cu_seqlens, prefixes, num_nodes, _ = _match(batch)
    ids, id_shift, _, position_shift = tokens
    num_tokens = ids.size >> id_shift
    compact_ids, compact_positions, scatter, gather, parent, subtree_end = _allocate(
        num_nodes << id_shift, num_nodes << position_shift, num_tokens, num_nodes, num_nodes, num_nodes
    )
    write_plan(
        order == "trie",
        *tokens,
        cu_seqlens,
        prefixes,
        scatter,
        gather,
        parent,
        subtree_end,
        compact_ids,
        compact_positions,
    )
    plan = TriePlan(
        torch.from_numpy(gather),
        torch.from_numpy(scatter),
        torch.from_numpy(parent),
        torch.from_numpy(subtree_end),
        _values(compact_ids, id_shift, batch.input_ids),
        _values(compact_positions, position_shift, batch.position_ids),
        batch.cu_seqlens,
        order,
    )
    return plan if batch.input_ids.is_cpu else plan.to(batch.input_ids.device)


def count_work(batch: RaggedBatch) -> IndexWork:
    """Build the trie of `batch`, with the kernel of `build_plan`, and return what it looked at."""
    probes, compares = _match(batch).work.tolist()
    return IndexWork(probes, compares)


def _match(batch: RaggedBatch) -> _Matched:
    tokens = (*_words(batch.input_ids), *_words(batch.position_ids))
    cu_seqlens, _ = _words(batch.cu_seqlens)
    keys = _NO_KEYS if batch.sharing_keys is None else _small_keys(batch.sharing_keys)
    prefixes = np.empty((2, cu_seqlens.size), np.int32)
    work = np.empty(2, np.int64)
    num_nodes = match_sequences(*tokens, cu_seqlens, keys, _MULTIPLIERS, prefixes, work)
    if num_nodes < 0:
        row = -1 - num_nodes
        raise ValueError(
            f"cu_seqlens row {row} is {cu_seqlens[row : row + 2].tolist()} of {batch.num_tokens} tokens: "
            "it changed after the batch was made; build a new RaggedBatch"
        )
    return _Matched(tokens, cu_seqlens, prefixes, num_nodes, work)


def _words(values: Tensor) -> tuple[Int32Array, int]:
    """The values' own memory as 32-bit words, and the shift from an index of theirs to one of words.

    Copied only where they are on another device, not contiguous or shorter than 32 bits.
    """
    if not (values.is_cpu and values.is_contiguous()):
        values = values.cpu().contiguous()
    array = values.numpy()
    if array.itemsize == 8:
        return array.view(np.int32), 1
    return (array if array.itemsize == 4 else array.astype(np.int32)), 0


def _allocate(*sizes: int) -> list[Int32Array]:
    """Arrays of so many words. Large ones share a block: NumPy asks for huge pages from 4 MiB on.

    Most of the time of a batch of a million tokens would otherwise go into page faults.
    """
    if sum(sizes) < _WORDS_OF_HUGE_PAGES:
        return [np.empty(size, np.int32) for size in sizes]
    starts = [0, *accumulate(-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes)]
    block = np.empty(starts[-1], np.int32)
    return [block[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _values(words: Int32Array, shift: int, like: Tensor) -> Tensor:
    """The tensor that `_words` would take apart into these words."""
    tensor = torch.from_numpy(words.view(np.int64) if shift else words)
    return tensor if tensor.dtype == like.dtype else tensor.to(like.dtype)


def _small_keys(sharing_keys: Tensor) -> NDArray[np.int64]:
    """[B] sharing keys as numbers in 0 .. B-1, equal where the keys are."""
    keys = sharing_keys.cpu().numpy()
    if keys.size and keys.dtype == np.int64 and keys.min() >= 0 and keys.max() < keys.size:
        return np.ascontiguousarray(keys)
    numbers = np.unique(keys, return_inverse=True)[1]
    return np.ascontiguousarray(numbers, np.int64)
