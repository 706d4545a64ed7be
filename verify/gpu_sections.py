"""The sections of `radixmlp gpu`, and the process that runs some of them and writes each bar as it is measured.

Each section runs in a process of its own: a crashed kernel, a hang or a lost CUDA context takes nothing else along.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from radixmlp.verify.bars import Bar


class Section(NamedTuple):
    """`run(setting)` measures; `seconds`: what it may take of the budget at most; `shows`: one line for people."""

    run: Callable[[Any], None]
    seconds: float
    shows: str


def _run(module: str, setting: Any, *arguments: str) -> None:
    importlib.import_module(f"radixmlp.verify.{module}").run(setting, *arguments)


def _model(name: str) -> Callable[[Any], None]:
    return lambda setting: _run("gpu_models", setting, name)


SECTIONS = {
    "values": Section(partial(_run, "gpu_values"), 90, "every kernel against fp64"),
    "copies": Section(partial(_run, "gpu_copies"), 45, "the paper's gather/scatter shapes"),
    "attention": Section(partial(_run, "gpu_attention"), 110, "one layer of trie attention against others"),
    "qwen3-8b": Section(_model("qwen3-8b"), 160, "Qwen3-8B: dense, the paper's path, the trie's"),
    "qwen3-0.6b": Section(_model("qwen3-0.6b"), 70, "Qwen3-0.6B, the same"),
    "qwen3-4b": Section(_model("qwen3-4b"), 110, "Qwen3-4B, the same"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named sections in turn, appending one line of JSON an event to a file."""
    parser = argparse.ArgumentParser(prog="radixmlp.verify.gpu_sections")
    parser.add_argument("--events", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("sections", nargs="+", choices=list(SECTIONS))
    arguments = parser.parse_args(argv)
    deadline = time.monotonic() + arguments.seconds
    with arguments.events.open("a", encoding="utf-8") as file:

        def write(**event: Any) -> None:
            file.write(json.dumps(event, default=str) + "\n")
            file.flush()

        for name in arguments.sections:
            started = time.monotonic()
            write(section=name, event="start")
            error = _guarded(name, arguments.dry, deadline, partial(write, section=name, event="bar"))
            write(section=name, event="end", seconds=time.monotonic() - started, error=error)
    return 0


def _guarded(name: str, dry: bool, deadline: float, write: Callable[..., None]) -> str | None:
    """Run one section; what it raised, or None."""
    from radixmlp.verify.gpu_setting import Setting, use_backends

    def emit(bar: Bar) -> None:
        write(row=bar.row(), broken=bar.broken)

    try:
        use_backends(dry)
        SECTIONS[name].run(Setting(dry, deadline, emit))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:2000]
    return None


if __name__ == "__main__":
    sys.exit(main())
