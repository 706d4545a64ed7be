"""The trie of some sequences as segments: runs of rows that the same sequences pass through."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from radixmlp.optimized.engine.batching import Walk
from radixmlp.optimized.index import build_plan
from radixmlp.verify.inspect.ragged import Int32Array, Int64Array, Tokens


@dataclass(frozen=True)
class Tree:
    """S segments in depth-first order, siblings in order of first occurrence.

    A segment ends where sequences part, and where one ends that others continue.

    Args:
        ids: [N'] token ids of the trie's rows, in depth-first order.
        start, rows: [S] first row and number of rows of each segment.
        parent: [S] the segment above, -1 at a root.
        depth: [S] tokens before it.
        sequences: [S] how many sequences pass through it.
        first: [S] place in `order` of the first of them; they are order[first : first + sequences].
        ending: [S] how many end with its last row.
        order: [B] the sequences' indices, depth-first.
    """

    ids: Int32Array
    start: Int64Array
    rows: Int64Array
    parent: Int64Array
    depth: Int64Array
    sequences: Int64Array
    first: Int64Array
    ending: Int64Array
    order: Int64Array

    @classmethod
    def of(cls, tokens: Tokens) -> Tree:
        """The tree of these sequences; time linear in the tokens, whatever its depth."""
        plan = build_plan(tokens.batch())
        parent = plan.parent.numpy().astype(np.int64)
        nodes = parent.size
        lengths = tokens.lengths
        filled = lengths > 0
        last = plan.scatter.numpy()[(lengths.cumsum() - 1)[filled]]
        ends = np.bincount(last, minlength=nodes)
        children = np.bincount(parent[parent >= 0], minlength=nodes)
        begins = (parent < 0) | (children[parent] > 1) | (ends[parent] > 0)
        start = begins.nonzero()[0]
        rows = np.diff(np.append(start, nodes))
        number = begins.cumsum() - 1
        above = parent[start]
        passed = np.concatenate([[0], ends.cumsum()])
        empty = int((~filled).sum())  # they come first in the walk
        return cls(
            ids=plan.input_ids.numpy(),
            start=start,
            rows=rows,
            parent=np.where(above < 0, -1, number[above]),
            depth=plan.depth.numpy().astype(np.int64)[start],
            sequences=passed[plan.subtree_end.numpy()[start]] - passed[start],
            first=passed[start] + empty,
            ending=ends[start + rows - 1],
            order=np.asarray(Walk.of(plan).order, np.int64),
        )

    @property
    def num_segments(self) -> int:
        """S."""
        return self.start.size

    @property
    def num_rows(self) -> int:
        """N'."""
        return self.ids.size

    @property
    def num_tokens(self) -> int:
        """N."""
        return int((self.rows * self.sequences).sum())

    @cached_property
    def subtree_rows(self) -> Int64Array:
        """[S] rows of a segment and of everything below it."""
        return self._summed(self.rows)

    @cached_property
    def subtree_tokens(self) -> Int64Array:
        """[S] tokens of the sequences through a segment, from its first row on."""
        return self._summed(self.rows * self.sequences)

    @cached_property
    def children(self) -> list[list[int]]:
        """The segments right below each; the last list holds the roots."""
        below: list[list[int]] = [[] for _ in range(self.num_segments + 1)]
        for segment, parent in enumerate(self.parent.tolist()):
            below[parent].append(segment)
        return below

    @property
    def roots(self) -> list[int]:
        """The segments that sequences begin with."""
        return self.children[-1]

    def segment_ids(self, segment: int) -> list[int]:
        """The token ids of one segment."""
        start = int(self.start[segment])
        return self.ids[start : start + int(self.rows[segment])].tolist()

    def through(self, segment: int) -> list[int]:
        """The indices of the sequences that pass through a segment."""
        first = int(self.first[segment])
        return self.order[first : first + int(self.sequences[segment])].tolist()

    def first_through(self, segment: int) -> int:
        """The index of the first sequence of `through`."""
        return int(self.order[self.first[segment]])

    def last_id(self, segment: int) -> int | None:
        """The token before a segment, None at a root."""
        parent = int(self.parent[segment])
        return None if parent < 0 else int(self.ids[self.start[parent] + self.rows[parent] - 1])

    def largest(self, count: int) -> set[int]:
        """At most `count` segments, those with most tokens below them, never one without its parent."""
        shown: set[int] = set()
        waiting = [(-int(self.subtree_tokens[root]), root) for root in self.roots]
        heapq.heapify(waiting)
        while waiting and len(shown) < count:
            segment = heapq.heappop(waiting)[1]
            shown.add(segment)
            for child in self.children[segment]:
                heapq.heappush(waiting, (-int(self.subtree_tokens[child]), child))
        return shown

    def _summed(self, values: NDArray[np.int64]) -> Int64Array:
        """Each segment's value and those of its descendants, which follow it without a gap."""
        end = list(range(1, self.num_segments + 1))
        parents = self.parent.tolist()
        for segment in range(self.num_segments - 1, -1, -1):
            if parents[segment] >= 0:
                end[parents[segment]] = max(end[parents[segment]], end[segment])
        before = np.concatenate([[0], values.cumsum()])
        return before[end] - before[:-1]
