"""`radixmlp inspect`: what a file of requests shares, and whether sharing is worth it, without a model or a GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from radixmlp.optimized.jobs.requests import read_requests
from radixmlp.verify.inspect.counting import inspect_requests
from radixmlp.verify.inspect.inspection import Inspection, Options
from radixmlp.verify.inspect.numbers import document
from radixmlp.verify.inspect.page import write_page
from radixmlp.verify.inspect.predictions import (
    DEFAULT_MODELS,
    SHAPES,
    Prediction,
    find_shape,
    predict,
    windows_of,
)
from radixmlp.verify.inspect.printable import printable
from radixmlp.verify.inspect.templates import find_templates, template_names
from radixmlp.verify.inspect.terminal import show
from radixmlp.verify.inspect.tokenizing import load_tokenizer

EXIT_USAGE, EXIT_INTERRUPTED = 2, 130
_PIPE_WIDTH = 140  # columns where there is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """Inspect a file.

    Args:
        argv: command line without the program's name; None: the process's own.

    Returns:
        0: inspected, bad lines reported; 2: nothing to inspect, or an unknown name; 130: interrupted.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return _run(arguments)
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            # The reader went away, as `head` does; Python would complain once more on its way out.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return _refuse(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """The options of `radixmlp inspect`."""
    parser = argparse.ArgumentParser(
        prog="radixmlp inspect",
        description="Say what a file of requests shares, where its sequences part, and what sharing would gain.",
    )
    parser.add_argument(
        "requests",
        metavar="FILE.jsonl",
        help="one object a line: text, messages, query + passages, or prompt + continuation; - reads standard input",
    )
    parser.add_argument(
        "--tokenizer",
        default="smollm2",
        metavar="NAME",
        help="a Hugging Face name, a local folder, smollm2 (the default) or bytes; those two need no network",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help=f"shape to predict for: {', '.join(SHAPES)}, a local folder or a Hugging Face name; may be repeated",
    )
    parser.add_argument(
        "--template",
        metavar="NAME",
        help=f"{', '.join(template_names())}, or a format string such as 'Query: {{query}}\\nPassage: {{passage}}'",
    )
    parser.add_argument(
        "--max-batch-tokens", type=int, default=65_536, metavar="N", help="computed rows a batch (65536)"
    )
    parser.add_argument("--threshold", type=float, default=0.9, help="largest gamma worth compacting (0.9)")
    parser.add_argument(
        "--order",
        choices=("prefix", "fifo"),
        default="prefix",
        help="order of requests the verdict speaks of: along the trie (the engine's), or as they come",
    )
    parser.add_argument(
        "--tree-lines", type=int, default=24, metavar="N", help="lines of the tree (24; 0: none)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a zoomable picture of the trie")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    options, shapes = _options(arguments)
    _check_outputs(arguments)
    lines = read_requests(arguments.requests)
    tokenizer = load_tokenizer(arguments.tokenizer)
    templates = find_templates(arguments.template, tokenizer)
    with _ProgressLine() as progress:
        found = inspect_requests(lines, tokenizer, templates, options, progress.show)
    source = "standard input" if arguments.requests == "-" else printable(arguments.requests)
    _report_bad_lines(found)
    if not found.requests:
        reason = "no line of it is a request" if found.bad_lines else "it holds no requests"
        return _refuse(f"nothing to inspect in {source}: {reason}")
    predictions = _predictions(found, shapes)
    if arguments.json is not None:
        text = json.dumps(document(source, found, predictions, tokenizer), indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    if arguments.html is not None:
        write_page(arguments.html, source, found, predictions, tokenizer)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # where the terminal cannot show all characters
    console = _Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    show(console, source, found, predictions, tokenizer, arguments.tree_lines)
    return 0


def _options(arguments: argparse.Namespace) -> tuple[Options, dict[str, Any]]:
    """Check every value before anything is read."""
    if arguments.max_batch_tokens < 1:
        raise ValueError(f"--max-batch-tokens is {arguments.max_batch_tokens}: expected 1 or more")
    if not 0 < arguments.threshold <= 1:
        raise ValueError(f"--threshold is {arguments.threshold:g}: expected a share, above 0 and at most 1")
    if arguments.tree_lines < 0:
        raise ValueError(f"--tree-lines is {arguments.tree_lines}: expected 0 or more")
    shapes = {name: find_shape(name) for name in arguments.model or DEFAULT_MODELS}
    options = Options(
        arguments.max_batch_tokens, arguments.threshold, arguments.order, windows_of(shapes.values())
    )
    return options, shapes


class _Console(Console):
    """One whose reader may go away, as `head` does: that is no failure."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _check_outputs(arguments: argparse.Namespace) -> None:
    written = [path.resolve() for path in (arguments.html, arguments.json) if path is not None]
    if len(set(written)) < len(written):
        raise ValueError(f"--html and --json are both {arguments.html}: give two names")
    for option, path in (("--html", arguments.html), ("--json", arguments.json)):
        if path is None:
            continue
        if path.is_dir():
            raise ValueError(f"{option} {path} is a folder: give a file")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")
        if arguments.requests != "-" and path.resolve() == Path(arguments.requests).resolve():
            raise ValueError(f"{option} {path} is the file of requests itself: give another name")


def _predictions(found: Inspection, shapes: dict[str, Any]) -> list[Prediction]:
    batches = [batch for batch in found.survey.batches if batch.tokens]
    if not batches:
        return []
    return [predict(name, shape, batches, found.options.threshold) for name, shape in shapes.items()]


def _report_bad_lines(found: Inspection) -> None:
    for bad in found.bad:
        print(f"line {bad.line}: {printable(bad.reason)}", file=sys.stderr)
    if found.bad_lines > len(found.bad):
        print(f"... and {found.bad_lines - len(found.bad):,} more bad lines", file=sys.stderr)
    if found.bad_lines and found.requests:
        print(f"{found.bad_lines:,} bad lines left out", file=sys.stderr)


def _refuse(reason: str) -> int:
    print(f"radixmlp inspect: {reason}", file=sys.stderr)
    return EXIT_USAGE


class _ProgressLine:
    """One line on a terminal's standard error, gone when the work is done."""

    def __init__(self) -> None:
        self._shows = sys.stderr.isatty()
        self._last = 0.0

    def __enter__(self) -> _ProgressLine:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._last:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, requests: int, tokens: int) -> None:
        """Requests and tokens read so far, twice a second."""
        if self._shows and time.monotonic() - self._last > 0.5:
            self._last = time.monotonic()
            print(f"\r\x1b[K{requests:,} requests, {tokens:,} tokens", end="", file=sys.stderr, flush=True)
