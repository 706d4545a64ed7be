"""The calls by which a type is judged, and what the untouched model says to them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from radixmlp.verify import oracle

# Ids from here on are no special token of a small config; below the upper end even the smallest vocabulary has them.
_IDS = (10, 250)
PAD = 0


@dataclass(frozen=True, eq=False)
class Case:
    """One call of a model.

    Args:
        name: what is special about it.
        input_ids: [B, L].
        attention_mask: [B, L], or None: every column is a token.
        compact: whether it has to run on the trie; otherwise the model's own forward may serve it.
    """

    name: str
    input_ids: Tensor
    attention_mask: Tensor | None
    compact: bool = True

    @property
    def real(self) -> Tensor:
        """[B, L] bool, which slots hold tokens."""
        if self.attention_mask is None:
            return torch.ones_like(self.input_ids, dtype=torch.bool)
        return self.attention_mask.bool()

    def logits(self, model: Any) -> Tensor:
        """[tokens, V] of `model`'s answer to the call as it is."""
        given = {} if self.attention_mask is None else {"attention_mask": self.attention_mask}
        with torch.no_grad():
            out: Tensor = model(input_ids=self.input_ids, use_cache=False, **given).logits
        return out[self.real]


def cases() -> list[Case]:
    """Padding right, left and none; then paths longer than any chunk of attention, and more rows than positions.

    The first three have branches at two depths, duplicates and a sequence that ends inside another, and paths of
    about 30 tokens, which no sliding window of a small model reaches across.
    """
    trunk, twig = _ids(17, 0), _ids(7, 1)
    ragged = [
        [*trunk, *twig, *_ids(6, 2)],
        [*trunk, *twig, *_ids(3, 3)],
        [*trunk, *_ids(9, 4)],
        [*trunk, *twig, *_ids(6, 2)],
        trunk[:12],
        _ids(5, 5),
    ]
    even = [[*trunk, *_ids(11, part)][:28] for part in (2, 3, 2)] + [[*trunk[:9], *_ids(19, 4)]]
    far = [[*trunk, *_ids(61, part)] for part in (6, 7, 8, 9, 10, 6)] + [trunk]
    return [
        _padded("right padding", ragged, left=False),
        _padded("left padding", ragged, left=True, compact=False),
        Case("no padding", torch.tensor(even), None),
        _padded("long sequences", far, left=False, compact=False),
    ]


def truths(model: Any, calls: list[Case]) -> list[Tensor]:
    """[tokens, V] for each call: each sequence alone in fp64, through the model's own forward.

    Left-padded rows are the model's own batch in fp64: what positions it gives them is part of the answer. A model
    that does not run in fp64 is taken in fp32.
    """
    try:
        exact = oracle.truth_model(model)
        with oracle.lifted(exact):
            return [_truth(exact, call) for call in calls]
    except RuntimeError:  # a module that insists on fp32
        own = copy.deepcopy(model)
        return [_truth(own, call) for call in calls]


def _truth(model: Any, call: Case) -> Tensor:
    first = call.real[:, 0]
    if not bool(first.all()):
        return call.logits(model)
    rows = (ids[real][None] for ids, real in zip(call.input_ids, call.real, strict=True))
    return torch.cat([Case("alone", row, torch.ones_like(row)).logits(model) for row in rows])


def _ids(length: int, which: int) -> list[int]:
    """`length` token ids, other ones for each `which`; no id twice in a row."""
    low, high = _IDS
    return [low + (53 * which + 7 * place + place * place) % (high - low) for place in range(length)]


def _padded(name: str, sequences: list[list[int]], left: bool, compact: bool = True) -> Case:
    length = max(map(len, sequences)) + 1
    ids = torch.full((len(sequences), length), PAD)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        place = slice(length - len(sequence), length) if left else slice(len(sequence))
        ids[row, place], mask[row, place] = torch.tensor(sequence), 1
    return Case(name, ids, mask, compact)
