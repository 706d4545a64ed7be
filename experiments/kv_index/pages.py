"""What pages cost: rows of K and V that a paged attention holds, where only full and equal pages are shared."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixmlp import TriePlan

PAGE_SIZES = (1, 16, 64, 128, 256)


@dataclass(frozen=True)
class Pages:
    """The pages of one batch.

    Args:
        shared: distinct full pages (a page in the block tables of several sequences counts once).
        own: partly filled last pages, one for each sequence whose length is no multiple of the page.
        entries: entries of all block tables.
        rows: rows of all pages, filled or not.
        filled: rows of them that hold a token.
    """

    shared: int
    own: int
    entries: int
    rows: int
    filled: int


def pages_of(plan: TriePlan, page: int) -> Pages:
    """Lay a batch out in pages of `page` tokens, counted from each sequence's start.

    Two sequences have a full page in common iff they have its last trie node in common. A last page that is not full
    belongs to its sequence alone: the next token would be written there.
    """
    if page < 1:
        raise ValueError(f"a page of {page} tokens holds nothing: give at least 1")
    starts, lengths = plan.cu_seqlens[:-1].long(), plan.cu_seqlens.diff().long()
    full = lengths // page
    within = torch.arange(int(full.sum())) - (full.cumsum(0) - full).repeat_interleave(full)
    last = starts.repeat_interleave(full) + (within + 1) * page - 1  # ragged row that ends each full page
    shared = int(plan.scatter[last].unique().numel())
    rest = lengths % page
    own = int((rest > 0).sum())
    rows = (shared + own) * page
    return Pages(shared, own, int(full.sum()) + own, rows, shared * page + int(rest.sum()))
