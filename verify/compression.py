"""The index maps: bit-equal to the readable builder, walkable back to every sequence, as small as can be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from radixmlp.reference import RaggedBatch, TriePlan
from radixmlp.reference import trie as reference_trie
from radixmlp.verify.records import Kind, Record, Workload
from radixmlp.verify.subject import Subject

MAPS = ("gather", "scatter", "parent", "subtree_end", "input_ids", "position_ids", "cu_seqlens")
ORDERS = ("trie", "input")


def check_index(workload: Workload, subject: Subject) -> list[Record]:
    """Judge the fast builder on one workload.

    Records: the compression ratio against a brute-force count; per order, the share of maps equal to the
    reference builder's, and the share of sequences that walking `parent` from the last row gives back.
    """
    batch = workload.batch
    records = []
    for order in ORDERS:
        plan = subject.build_plan(batch, order=order)
        if order == "trie":
            records.append(_compression(workload, plan))
        records += [_maps_equal(workload, plan, order), _walks_back(workload, plan, order)]
    return records


def count_distinct_prefixes(batch: RaggedBatch) -> int:
    """N' without a trie: sort the sequences; each adds what it does not share with the one before it.

    A token is (token id, position id); sequences with different sharing keys share nothing.
    """
    keys = [0] * batch.num_sequences if batch.sharing_keys is None else batch.sharing_keys.tolist()
    tokens = list(zip(batch.input_ids.tolist(), batch.position_ids.tolist(), strict=True))
    rows = [(key, tokens[a:b]) for key, (a, b) in zip(keys, pairwise(batch.cu_seqlens.tolist()), strict=True)]
    count = 0
    before: tuple[int, list[tuple[int, int]]] = (-1, [])
    for key, row in sorted(rows):
        common = 0
        if key == before[0]:
            pairs = zip(row, before[1], strict=False)
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(row), len(before[1])))
        count += len(row) - common
        before = (key, row)
    return count


def _compression(workload: Workload, plan: TriePlan) -> Record:
    batch = workload.batch
    nodes = count_distinct_prefixes(batch)
    expected = batch.num_tokens / nodes if nodes else 1.0
    details = {
        "tokens": batch.num_tokens,
        "nodes": plan.num_nodes,
        "distinct_prefixes": nodes,
        "gamma": plan.gamma,
    }
    if workload.prefix_length is not None:
        details["prefix_length"] = workload.prefix_length
    passed = plan.num_nodes == nodes and plan.num_tokens == batch.num_tokens
    return _record(
        "compression", workload, "compression_ratio", plan.compression_ratio, expected, passed, details
    )


def _maps_equal(workload: Workload, plan: TriePlan, order: str) -> Record:
    expected = reference_trie.build_plan(workload.batch, order=order)  # type: ignore[arg-type]
    unequal = [name for name in MAPS if not _equal(getattr(plan, name), getattr(expected, name))]
    share = 1 - len(unequal) / len(MAPS)
    details = {"unequal": ", ".join(unequal)} if unequal else {}
    return _record("index", workload, f"maps_equal_{order}", share, 1.0, not unequal, details)


def _equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """The same dtype, shape and values."""
    return got.dtype == expected.dtype and torch.equal(got, expected)


def _walks_back(workload: Workload, plan: TriePlan, order: str) -> Record:
    """Ids and positions alone also agree after a false merge; the walk from the last row does not."""
    batch = workload.batch
    parent, bounds = plan.parent.tolist(), pairwise(batch.cu_seqlens.tolist())
    wrong = [b for b, (start, end) in enumerate(bounds) if not _walk(batch, plan, parent, start, end)]
    share = 1 - len(wrong) / batch.num_sequences if batch.num_sequences else 1.0
    details = {"first_wrong_sequence": wrong[0]} if wrong else {}
    return _record("index", workload, f"sequences_walked_back_{order}", share, 1.0, not wrong, details)


def _walk(batch: RaggedBatch, plan: TriePlan, parent: list[int], start: int, end: int) -> bool:
    """From the last row's node up to a root: exactly this sequence's ids, positions and nodes, in reverse."""
    if end == start:
        return True
    nodes: list[int] = []
    node = int(plan.scatter[end - 1])
    while node >= 0 and len(nodes) <= end - start:
        nodes.append(node)
        node = parent[node]
    path = torch.tensor(nodes[::-1])
    return (
        len(nodes) == end - start
        and torch.equal(path, plan.scatter[start:end].long())
        and torch.equal(plan.input_ids[path].long(), batch.input_ids[start:end].long())
        and torch.equal(plan.position_ids[path].long(), batch.position_ids[start:end].long())
    )


def _record(
    kind: Kind,
    workload: Workload,
    metric: str,
    value: float,
    limit: float,
    passed: bool,
    details: dict[str, Any],
) -> Record:
    return Record(kind, "none", workload.name, "none", "int32", "cpu", metric, value, limit, passed, details)
