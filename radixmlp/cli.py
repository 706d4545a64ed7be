"""The `radixmlp` command: each subcommand hands its arguments to the module that owns it."""

from __future__ import annotations

import importlib
import sys

_JOBS = "radixmlp.optimized.jobs.command"

# name -> (module[:function], what it does)
_COMMANDS = {
    "inspect": (
        "radixmlp.verify.inspect.command",
        "say what a request file would gain, before a GPU is rented",
    ),
    "embed": (f"{_JOBS}:embed", "embed a request file; resumable"),
    "rerank": (f"{_JOBS}:rerank", "score passages for their queries; resumable"),
    "score": (f"{_JOBS}:score", "log-probabilities of continuations; resumable"),
    "verify": ("radixmlp.verify.run", "check parity, compression, speed, memory and index; write a report"),
    "models": ("radixmlp.verify.support", "say which of transformers' causal model types run on the trie"),
    "bench": ("radixmlp.verify.bench", "measure the figures of the README on this machine"),
    "figures": (
        "radixmlp.verify.figures_command",
        "draw the paper's figures: published, predicted, measured",
    ),
    "experiment": ("radixmlp.verify.experiments.command", "make, run or list experiments"),
    "gpu": ("radixmlp.verify.gpu", "measure kernels and models on one GPU; --dry: run the same on the CPU"),
    "kernels": ("radixmlp.verify.kernels", "compile the GPU kernels, without a GPU, and judge the code"),
}


def main(argv: list[str] | None = None) -> int:
    """Run `radixmlp SUBCOMMAND ...`; returns the exit status (2: a wrong command line)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from radixmlp import __version__

        print(__version__)
        return 0
    if arguments[0] not in _COMMANDS:
        print(f"radixmlp: there is no command {arguments[0]!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    name, _, function = _COMMANDS[arguments[0]][0].partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("radixmlp"):
            raise
        print(
            f"radixmlp {arguments[0]} needs the package {missing.name!r}: pip install 'radixmlp[verify]'",
            file=sys.stderr,
        )
        return 2
    return int(getattr(module, function or "main")(arguments[1:]))


def _usage() -> str:
    lines = [f"  {name:10} {what}" for name, (_, what) in _COMMANDS.items()]
    return "usage: radixmlp COMMAND ...\n\n" + "\n".join(lines) + "\n\nradixmlp COMMAND --help tells more."


if __name__ == "__main__":
    sys.exit(main())
