"""`radixmlp kernels`: compile every shipped kernel configuration ahead of time and judge the machine code.

No GPU is needed. Red: a spill, a matrix kernel off the tensor cores, a copy kernel without 16-byte accesses, more
shared memory than a block may have, a kernel that does not compile.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from radixmlp.kernels.aot import SHARED_LIMIT_KIB, CannotCompileError, Compiled, capability, compile_kernel
from radixmlp.kernels.config import KernelConfig, shipped

_WORTH_A_PROCESS = 16  # kernels: starting one takes some seconds
_COUNTS = (
    "registers",
    "spills",
    "shared_bytes",
    "wgmma",
    "other_mma",
    "wide_loads",
    "wide_stores",
    "narrow_stores",
    "tma",
)


def faults(compiled: Compiled) -> list[str]:
    """What is wrong with this machine code, one line each; empty: nothing."""
    found = []
    kind, arch = compiled.config.kind, compiled.arch
    if compiled.spills:
        found.append(f"{compiled.spills} instructions spill registers to local memory")
    if kind == "matrix" and arch == "sm_90" and not compiled.wgmma:
        found.append("a matrix kernel without wgmma")
    if kind == "matrix" and not (compiled.wgmma or compiled.other_mma):
        found.append("a matrix kernel without tensor-core instructions")
    if kind in ("copy", "reduce"):
        if not compiled.wide_loads and not compiled.tma:
            found.append(f"a {kind} kernel without 128-bit loads")
        if not compiled.wide_stores and not compiled.tma:
            found.append(f"a {kind} kernel without 128-bit stores")
        if compiled.narrow_stores:
            found.append(f"{compiled.narrow_stores} stores of a {kind} kernel move fewer than 128 bits")
    limit = SHARED_LIMIT_KIB[arch] * 1024
    if compiled.shared_bytes > limit:
        found.append(f"{compiled.shared_bytes} bytes of shared memory, a block has {limit}")
    return found


def row_of(config: KernelConfig, arch: str) -> dict[str, Any]:
    """Compile one configuration: its counts and faults, ready for JSON. Counts are None if it does not compile."""
    row: dict[str, Any] = {"name": config.name, "kind": config.kind, "arch": arch, "warps": config.num_warps}
    try:
        compiled = compile_kernel(config, arch)
    except (CannotCompileError, ValueError) as error:
        return {**row, **dict.fromkeys(_COUNTS), "faults": [str(error)]}
    return {**row, **{name: getattr(compiled, name) for name in _COUNTS}, "faults": faults(compiled)}


def judge(work: Sequence[tuple[KernelConfig, str]], jobs: int = 1) -> list[dict[str, Any]]:
    """One row for each configuration and the architecture to compile it for, in their order.

    Args:
        jobs: processes that compile at once. More than one find their configurations by name in `shipped(arch)`.
    """
    jobs = min(jobs, len(work) // _WORTH_A_PROCESS + 1)
    if jobs == 1:
        return list(_watched((row_of(*each) for each in work), len(work)))
    context = multiprocessing.get_context("spawn")  # a forked Triton shares its compiler's locks
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        rows = pool.map(_row_of_name, [config.name for config, _ in work], [arch for _, arch in work])
        return list(_watched(rows, len(work)))


def _row_of_name(name: str, arch: str) -> dict[str, Any]:
    (config,) = (config for config in shipped(arch) if config.name == name)
    return row_of(config, arch)


def _watched(rows: Iterable[dict[str, Any]], total: int) -> Iterable[dict[str, Any]]:
    """The same rows, with a bar on a terminal."""
    console = Console(stderr=True)
    return track(rows, "compiling", total, console=console, transient=True, disable=not console.is_terminal)


def table_of(rows: Sequence[dict[str, Any]], arch: str) -> Table:
    """The table a person sees."""
    table = Table(
        title=f"{arch}: a block may use {SHARED_LIMIT_KIB[arch]} KiB of shared memory", title_justify="left"
    )
    table.add_column("kernel")
    table.add_column("kind")
    heads = (
        "warps",
        "regs",
        "spills",
        "shared KiB",
        "wgmma",
        "mma",
        "128b ld",
        "128b st",
        "narrow st",
        "TMA",
    )
    for head in heads:
        table.add_column(head, justify="right")
    table.add_column("")
    for row in rows:
        if row["arch"] != arch:
            continue
        counts = {name: "-" if row[name] is None else str(row[name]) for name in _COUNTS}
        if row["shared_bytes"] is not None:
            counts["shared_bytes"] = f"{row['shared_bytes'] / 1024:.1f}"
        verdict = "[red]FAILED[/red]" if row["faults"] else "[green]ok[/green]"
        table.add_row(row["name"], row["kind"], str(row["warps"]), *counts.values(), verdict)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """0: every kernel is as it should be; 1: some is not; 2: a wrong command line or nothing to compile with."""
    arguments = _parser().parse_args(argv)
    archs = list(dict.fromkeys(arguments.arch or ["sm_90"]))
    try:
        for arch in archs:
            capability(arch)
        work = [
            (config, arch) for arch in archs for config in shipped(arch) if arguments.kernel in config.name
        ]
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "triton":
            raise
        return _refuse(
            "Triton is not installed, and it compiles the kernels: pip install 'triton>=3.6' (Linux)"
        )
    except ValueError as error:
        return _refuse(str(error))
    if not work:
        return _refuse(f"no kernel configuration has {arguments.kernel!r} in its name")
    if interpreted(work[0][0]):
        return _refuse("TRITON_INTERPRET is set, so there is no compiler: unset it in the environment")

    rows = judge(work, arguments.jobs)
    show(rows, archs)
    failed = [row for row in rows if row["faults"]]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"triton": _triton_version(), "passed": not failed, "kernels": rows}, indent=1)
        arguments.json.write_text(text + "\n")
    return 1 if failed else 0


def show(rows: Sequence[dict[str, Any]], archs: Sequence[str]) -> None:
    """Print a table an architecture, every fault, and the verdict."""
    console = Console() if sys.stdout.isatty() else Console(width=180)
    for arch in archs:
        console.print(table_of(rows, arch))
    failed = [row for row in rows if row["faults"]]
    for row in failed:
        for fault in row["faults"]:
            console.print(f"FAILED  {row['arch']}  {row['name']}: {fault}", markup=False, highlight=False)
    console.print(
        f"{len(rows) - len(failed)} of {len(rows)} kernels passed (Triton {_triton_version()}, {', '.join(archs)})"
    )


def interpreted(config: KernelConfig) -> bool:
    """Whether Triton runs kernels in its interpreter, so that it compiles none."""
    import triton

    return not isinstance(config.kernel(), triton.JITFunction)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


def _refuse(why: str) -> int:
    print(f"radixmlp kernels: {why}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixmlp kernels", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--arch",
        action="append",
        metavar="NAME",
        help=f"architecture, again for more (default sm_90): {', '.join(SHARED_LIMIT_KIB)}",
    )
    parser.add_argument("--kernel", default="", metavar="PART", help="only kernels with this in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here too")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes that compile at once"
    )
    return parser
