"""`radixmlp embed`, `radixmlp rerank`, `radixmlp score`: a request file in, results out, resumable."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from radixmlp.optimized.engine import Engine, EngineConfig
from radixmlp.optimized.jobs.identity import tokenizer_digest, weights_digest
from radixmlp.optimized.jobs.journal import Journal, JournalError
from radixmlp.optimized.jobs.outputs import OutputError, check_output, part_of
from radixmlp.optimized.jobs.requests import RequestFileError
from radixmlp.optimized.jobs.run import InputFile, Outcome, UnitError, run_job
from radixmlp.optimized.jobs.tasks import Task, embed_task, rerank_task, score_task

INTERRUPTED = 130
_SHOWN_BAD_LINES = 20


def embed(argv: Sequence[str] | None = None) -> int:
    """Embed the text of each request: `{"text"}` a line."""
    parser = _parser("embed", embed.__doc__)
    parser.add_argument("--prompt", help="put before each text")
    parser.add_argument("--pooling", choices=("last", "mean"), default="last")
    parser.add_argument("--no-normalize", action="store_true", help="leave embeddings at their own length")
    given = parser.parse_args(argv)
    task = embed_task(given.prompt, given.pooling, not given.no_normalize)
    options = {"prompt": given.prompt, "pooling": given.pooling, "normalize": not given.no_normalize}
    return _run(task, given, options)


def rerank(argv: Sequence[str] | None = None) -> int:
    """Score each request's passages for its query: `{"query", "passages"}` a line."""
    parser = _parser("rerank", rerank.__doc__)
    parser.add_argument("--instruction", help="what makes a passage relevant (the model's default otherwise)")
    given = parser.parse_args(argv)
    return _run(rerank_task(given.instruction), given, {"instruction": given.instruction})


def score(argv: Sequence[str] | None = None) -> int:
    """Log-probability of each request's continuation: `{"prompt", "continuation"}` a line."""
    given = _parser("score", score.__doc__).parse_args(argv)
    return _run(score_task(), given, {})


def _parser(name: str, what: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"radixmlp {name}",
        description=what,
        epilog="Interrupted or killed, run it again: it goes on from the last finished batch. Exit status: 0 done; "
        "1 done, but some lines were no requests; 2 wrong use or input; 130 interrupted.",
    )
    parser.add_argument("requests", type=Path, help="JSONL file, one request a line")
    parser.add_argument("--model", required=True, help="hub name or folder")
    parser.add_argument("--gguf-file", help="the GGUF file in it to load")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="FILE.jsonl or .parquet, rows with line and id; or .npy (embed, score), one row a good line",
    )
    parser.add_argument(
        "--restart", action="store_true", help="forget an interrupted run, replace the output"
    )
    model = parser.add_argument_group("how it runs")
    model.add_argument("--model-impl", choices=("radix", "dense"), default="radix")
    model.add_argument("--dtype", help="float32, bfloat16, ... (default: the checkpoint's)")
    model.add_argument("--device", help="cpu, cuda, cuda:1, ...")
    model.add_argument("--attention", default="auto", help="a backend's name (default: auto)")
    model.add_argument("--max-batch-tokens", type=int, default=65_536, help="rows computed in one batch")
    model.add_argument("--max-length", type=int, help="longest request in tokens")
    model.add_argument("--truncate", action="store_true", help="cut longer ones instead of refusing them")
    return parser


def _run(task: Task, given: argparse.Namespace, options: dict[str, Any]) -> int:
    journal_path = given.out.with_name(f"{given.out.name}.job")
    try:
        config = EngineConfig(
            model_impl=given.model_impl,
            attention=given.attention,
            max_batch_tokens=given.max_batch_tokens,
            max_length=given.max_length,
            truncate=given.truncate,
        )
        check_output(given.out, task)
        _refuse_own_input(given, journal_path)
        source = InputFile.read(given.requests)
        _refuse_finished(given, journal_path)
        model = {"model": given.model, "gguf_file": given.gguf_file, "dtype": given.dtype}
        job = {"command": task.name, "input": source.sha256, **model, **options, **asdict(config)}
        journal = Journal(journal_path, job, given.restart)
    except (ValueError, TypeError) as error:
        return _fail(task, str(error))
    try:
        with _bar(source) as bar:
            outcome = run_job(
                task, _engine(given, config, journal), source, given.out, journal, _progress(bar)
            )
    except KeyboardInterrupt:
        journal.close()
        print(
            f"Interrupted: {journal_path} keeps what is done; run the same command to go on.", file=sys.stderr
        )
        return INTERRUPTED
    except (UnitError, RequestFileError, OutputError, JournalError, ValueError, OSError) as error:
        journal.close()
        return _fail(task, str(error))
    journal.remove()
    return _say(outcome, given)


def _refuse_own_input(given: argparse.Namespace, journal_path: Path) -> None:
    """The output, or what is written on the way to it, must not be the input by another name."""
    for path in (given.out, journal_path, part_of(given.out)):
        if path.exists() and given.requests.exists() and path.samefile(given.requests):
            raise OutputError(f"{given.requests} is the input and would be overwritten: choose another --out")


def _refuse_finished(given: argparse.Namespace, journal_path: Path) -> None:
    """Refuse to overwrite a finished output.

    A journal beside an output is of a run that was killed while it finished, or while it replaced an older output.
    """
    if given.out.exists() and not journal_path.exists() and not given.restart:
        raise OutputError(f"{given.out} exists: choose another --out, or replace it with --restart")


def _engine(given: argparse.Namespace, config: EngineConfig, journal: Journal) -> Callable[[], Engine]:
    def load() -> Engine:
        engine = Engine.from_pretrained(
            given.model, gguf_file=given.gguf_file, dtype=given.dtype, device=given.device, config=config
        )
        journal.pin("weights", weights_digest(engine.model))
        journal.pin("tokenizer", tokenizer_digest(engine.tokenizer))
        return engine

    return load


def _bar(source: InputFile) -> Any:
    return tqdm(total=source.lines, unit="line", disable=None, file=sys.stderr)


def _progress(bar: Any) -> Callable[[int, int], None]:
    return lambda done, _total: bar.update(max(0, done - bar.n))


def _say(outcome: Outcome, given: argparse.Namespace) -> int:
    resumed = f", {outcome.known} parts of them from an earlier run" if outcome.known else ""
    print(f"{outcome.requests} requests{resumed}: {given.out}", file=sys.stderr)
    for bad in outcome.bad_lines[:_SHOWN_BAD_LINES]:
        print(f"{given.requests}, line {bad.line}: {bad.reason}", file=sys.stderr)
    if outcome.bad_lines and given.out.suffix == ".npy":
        print(f"{given.out} has no row for these lines: rows after them have moved up", file=sys.stderr)
    more = len(outcome.bad_lines) - _SHOWN_BAD_LINES
    if more > 0:
        print(f"... and {more} more lines that are no requests", file=sys.stderr)
    return 1 if outcome.bad_lines else 0


def _fail(task: Task, message: str) -> int:
    print(f"radixmlp {task.name}: {message}", file=sys.stderr)
    return 2
