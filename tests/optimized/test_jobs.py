"""A job over a request file: stopped anywhere it goes on, computes nothing twice, and loses nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmlp.optimized.jobs.journal import Journal, JournalError
from radixmlp.optimized.jobs.outputs import OutputError, check_output
from radixmlp.optimized.jobs.requests import RequestFileError
from radixmlp.optimized.jobs.run import InputFile, Outcome, UnitError, run_job
from radixmlp.optimized.jobs.tasks import Keep, Task, embed_task, rerank_task, score_task


class _RefusedError(ValueError):
    def __init__(self, index: int) -> None:
        super().__init__(f"request {index} is too long")
        self.index = index


class FakeEngine:
    """Numbers made from the texts, in batches that take requests out of order; may stop before batch `dies_at`."""

    def __init__(self, batch: int = 3, dies_at: int | None = None) -> None:
        self.batch, self.dies_at = batch, dies_at
        self.seen: list[tuple[str, ...]] = []

    def _run(self, units: Sequence[tuple[str, ...]], width: int, on_batch: Keep) -> None:
        order = sorted(range(len(units)), key=lambda i: units[i])
        for number, start in enumerate(range(0, len(order), self.batch)):
            if number == self.dies_at:
                raise KeyboardInterrupt
            chosen = order[start : start + self.batch]
            for i in chosen:
                if "REFUSED" in units[i]:
                    raise _RefusedError(i)
            self.seen += [units[i] for i in chosen]
            rows = [[float(sum(map(len, units[i])) + k) for k in range(width)] for i in chosen]
            on_batch(chosen, torch.tensor(rows))

    def embed(self, texts: Sequence[str], *_options: Any, on_batch: Keep) -> None:
        self._run([(text,) for text in texts], 4, on_batch)

    def rerank_pairs(
        self, queries: Sequence[str], documents: Sequence[str], instruction: str | None, on_batch: Keep
    ) -> None:
        units = list(zip(queries, documents, strict=True))
        self._run(units, 1, lambda indices, values: on_batch(indices, values[:, 0]))

    def score(self, prompts: Sequence[str], continuations: Sequence[str], on_batch: Keep) -> None:
        self._run(list(zip(prompts, continuations, strict=True)), 2, on_batch)


def write(path: Path, lines: Sequence[Any]) -> Path:
    path.write_text(
        "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8"
    )
    return path


def run(
    task: Task,
    source: Path,
    output: Path,
    engine: FakeEngine | None = None,
    job: dict[str, Any] | None = None,
) -> Outcome:
    given = InputFile.read(source)
    journal = Journal(output.with_name(output.name + ".job"), job or {"input": given.sha256})
    try:
        outcome = run_job(task, lambda: engine or FakeEngine(), given, output, journal)
    except BaseException:
        journal.close()
        raise
    journal.remove()
    return outcome


TEXTS = [{"text": f"{'a' * (i % 5)}{i}", "id": f"t{i}"} for i in range(20)]
PAIRS = [{"query": f"q{i}", "passages": [f"p{j}" * (j + 1) for j in range(i % 3 + 1)]} for i in range(9)]
CONTINUATIONS = [{"prompt": "p" * i, "continuation": "c"} for i in range(1, 12)]
CASES = [(embed_task(), TEXTS), (rerank_task(), PAIRS), (score_task(), CONTINUATIONS)]


@pytest.mark.parametrize(("task", "lines"), CASES, ids=[task.name for task, _ in CASES])
def test_stopped_before_any_batch_it_goes_on(task: Task, lines: list[Any], tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", lines)
    whole = FakeEngine()
    run(task, source, tmp_path / "whole.jsonl", whole)
    batches = -(-len(whole.seen) // 3)
    for dies_at in range(batches):
        output = tmp_path / f"stopped-{dies_at}.jsonl"
        first, second = FakeEngine(dies_at=dies_at), FakeEngine()
        with pytest.raises(KeyboardInterrupt):
            run(task, source, output, first)
        assert not output.exists()
        outcome = run(task, source, output, second)
        assert outcome.known == len(first.seen)
        assert outcome.computed == len(second.seen)
        assert sorted(first.seen + second.seen) == sorted(whole.seen)
        assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".job") == []


def test_bad_lines_cost_only_themselves(tmp_path: Path) -> None:
    source = write(
        tmp_path / "in.jsonl", [TEXTS[0], "{broken", "", {"query": "q", "passages": ["p"]}, TEXTS[1]]
    )
    outcome = run(embed_task(), source, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [1, 5]
    assert [row["id"] for row in rows] == ["t0", "t1"]
    assert [bad.line for bad in outcome.bad_lines] == [2, 4]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.text(alphabet="ab\n\u00e9\U0001f600", max_size=6), max_size=12), st.integers(1, 5))
def test_any_texts_keep_their_order(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], batch: int
) -> None:
    folder = tmp_path_factory.mktemp("job")
    source = write(folder / "in.jsonl", [{"text": text} for text in texts])
    run(embed_task(), source, folder / "out.npy", FakeEngine(batch))
    values = np.load(folder / "out.npy")
    assert values.shape == (len(texts), 4 if texts else 0)
    assert values[:, 0].tolist() == [float(len(text)) for text in texts] if texts else True


def test_the_formats_say_the_same(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for task, lines in CASES:
        source = write(tmp_path / f"{task.name}.jsonl", lines)
        run(task, source, tmp_path / f"{task.name}-out.jsonl")
        run(task, source, tmp_path / f"{task.name}-out.parquet")
        rows = [json.loads(line) for line in (tmp_path / f"{task.name}-out.jsonl").read_text().splitlines()]
        table = parquet.read_table(tmp_path / f"{task.name}-out.parquet").to_pylist()
        for row, other in zip(rows, table, strict=True):
            row["ranking"] = [str(name) for name in row["ranking"]] if "ranking" in row else None
            assert {key: value for key, value in row.items() if value is not None or key == "id"} == other


def test_a_ranking_names_passages_by_their_ids_and_keeps_ties_in_order(tmp_path: Path) -> None:
    passages = [{"id": "x", "text": "b"}, {"id": "y", "text": "b"}, "ccc"]
    source = write(tmp_path / "in.jsonl", [{"query": "q", "passages": passages}])
    run(rerank_task(), source, tmp_path / "out.jsonl")
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert row["scores"] == [2.0, 2.0, 4.0]
    assert row["ranking"] == [2, "x", "y"]


def test_an_empty_file_gives_an_empty_output(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [])
    engine = FakeEngine()
    assert run(embed_task(), source, tmp_path / "out.jsonl", engine).requests == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert engine.seen == []


def test_another_job_does_not_go_on_with_these_results(tmp_path: Path) -> None:
    source, output = write(tmp_path / "in.jsonl", TEXTS), tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(embed_task(), source, output, FakeEngine(dies_at=2), {"model": "a", "input": 1})
    with pytest.raises(JournalError, match="model was 'a', is 'b'"):
        run(embed_task(), source, output, job={"model": "b", "input": 1})
    journal = Journal(tmp_path / "out.jsonl.job", {"model": "a", "input": 1})
    journal.pin("weights", "1")
    with pytest.raises(JournalError, match="weights"):
        journal.pin("weights", "2")
    for restart in (False, True):
        with pytest.raises(JournalError, match="in use"):
            Journal(tmp_path / "out.jsonl.job", {"model": "a", "input": 1}, restart)
    assert len(journal) > 0
    journal.close()
    anew = Journal(tmp_path / "out.jsonl.job", {"model": "b"}, restart=True)
    assert len(anew) == 0
    anew.pin("weights", "2")
    anew.close()
    (tmp_path / "other.job").write_text("this is no database, and long enough to be looked at as one" * 20)
    with pytest.raises(JournalError, match="no journal"):
        Journal(tmp_path / "other.job", {})


def test_a_journal_without_results_is_anybodys(tmp_path: Path) -> None:
    first = Journal(tmp_path / "job", {"model": "mistyped"})
    first.pin("weights", "1")
    first.close()
    second = Journal(tmp_path / "job", {"model": "right"})
    second.pin("weights", "2")
    second.add([(1, 0, np.zeros(2))])
    second.close()
    with pytest.raises(JournalError, match="model was 'right'"):
        Journal(tmp_path / "job", {"model": "mistyped"})


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job", {})
    journal.add([(1, 0, np.zeros(2))])
    pages = journal._connection.execute("PRAGMA page_count").fetchone()[0]
    journal._connection.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(JournalError, match="free space"):
        journal.add([(2, part, np.zeros(500)) for part in range(50)])
    assert len(journal) == 1
    journal._connection.execute("PRAGMA max_page_count=100000")
    journal.add([(2, 0, np.zeros(2))])
    journal.close()


def test_nothing_is_computed_twice_silently(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job", {})
    journal.add([(1, 0, np.zeros(2))])
    with pytest.raises(Exception, match="UNIQUE"):
        journal.add([(2, 0, np.zeros(2)), (1, 0, np.zeros(2))])
    assert len(journal) == 1
    journal.close()


def test_a_refused_request_is_named_by_its_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ["", {"text": "a"}, {"text": "REFUSED"}])
    with pytest.raises(UnitError, match="line 3: request 1 is too long"):
        run(embed_task(), source, tmp_path / "out.jsonl")


def test_what_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for name, reason in (("out.txt", "ends in"), ("out", "ends in"), ("none/out.jsonl", "no folder")):
        with pytest.raises(OutputError, match=reason):
            check_output(tmp_path / name, embed_task())
    with pytest.raises(OutputError, match="no array"):
        check_output(tmp_path / "out.npy", rerank_task())
    with pytest.raises(RequestFileError, match="standard input"):
        InputFile.read(Path("-"))
    with pytest.raises(RequestFileError, match="cannot read"):
        InputFile.read(tmp_path / "missing.jsonl")


def test_an_input_that_changes_is_noticed(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", TEXTS)

    class Meddler(FakeEngine):
        def embed(self, texts: Sequence[str], *options: Any, on_batch: Keep) -> None:
            super().embed(texts, on_batch=on_batch)
            write(source, TEXTS[:-1])

    with pytest.raises(RequestFileError, match="changed"):
        run(embed_task(), source, tmp_path / "out.jsonl", Meddler())
    assert not (tmp_path / "out.jsonl").exists()


class SlowEngine(FakeEngine):
    """Takes a moment for each batch, so that a kill may fall anywhere."""

    def _run(self, units: Sequence[tuple[str, ...]], width: int, on_batch: Keep) -> None:
        def slowly(indices: Sequence[int], values: torch.Tensor) -> None:
            time.sleep(0.004)
            on_batch(indices, values)

        super()._run(units, width, slowly)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    texts = [{"text": f"{i:03d}" * (i % 7), "id": i} for i in range(120)]
    source, output = write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl"
    run(embed_task(), source, tmp_path / "whole.jsonl")
    moments, kills = random.Random(0), 0
    while True:
        child = os.fork()
        if child == 0:
            try:
                run(embed_task(), source, output, SlowEngine())
            finally:
                os._exit(0)
        time.sleep(moments.uniform(0.0, 0.03 + 0.01 * kills))  # a busy machine gets on, too
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if output.exists():
            break
        kills += os.WIFSIGNALED(status)
        assert kills < 200
    assert kills >= 3
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
