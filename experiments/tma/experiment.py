"""Hopper's bulk copies and warp specialisation in the trie kernel: values, machine code, and time on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import radixmlp
from radixmlp import AttentionSpec
from radixmlp.kernels.aot import SHARED_LIMIT_KIB
from radixmlp.verify.experiments.result import table
from radixmlp.verify.gpu_setting import attention_truth, random_qkv, share_of_allowed
from radixmlp.verify.gpu_timing import time_kernels
from radixmlp.verify.workloads import make_workload

QUESTION = "do tensor-descriptor loads and warp specialisation make the trie kernel better on Hopper?"
TIMED = (("synthetic:2048+256x32", (32, 8), 128), ("synthetic:512+64x16", (16, 8), 128))
SHIPPED = "shipped"
_SHARED_KIB = SHARED_LIMIT_KIB["sm_90"]
_CHILD = (
    "import sys; from radixmlp.verify.experiments import load_experiment; "
    "sys.exit(load_experiment('tma', '{module}').main())"
)


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Values in the interpreter, compiled evidence for sm_90, and times where there is such a GPU."""
    progress("values in Triton's interpreter")
    values = _in_process("values", quick, TRITON_INTERPRET="1")
    wrong = [case for case in values if not case["error"] <= case["limit"]]
    if wrong:
        raise ValueError(f"the kernel is wrong, nothing is compiled or timed: {wrong[0]}")
    progress("compiling for sm_90")
    compiled = _in_process("compiled", quick)
    return {"values": values, **compiled, "timed": _timed(quick, progress), "why_not_timed": _why_not_timed()}


def report(measured: dict[str, Any]) -> str:
    """Tables of values, machine code, attempts and times."""
    lines = [
        "## Values",
        "",
        "Triton's interpreter against the reference in fp64, 4 query heads to one KV head; errors over max|truth|.",
        "",
    ]
    rows = [
        [each[key] for key in ("kernel", "trie", "spec", "heads", "dtype", "error", "limit")]
        for each in measured["values"]
    ]
    lines += table(["kernel", "trie", "layer", "D", "dtype", "largest error", "limit"], rows)
    lines += [
        f"## Machine code for {measured['arch']}",
        "",
        "bfloat16, 4 heads to a tile. Counts of instructions in the code; `bulk copies`: UTMALDG in SASS and "
        "cp.async.bulk.tensor in PTX; `wide loads`: global loads of 16 bytes a thread, cp.async among them.",
        "",
    ]
    lines += table(
        ["D, Dv", "layer", "kernel", "warps", *_CODE_HEADINGS],
        [
            [
                ", ".join(map(str, each["heads"])),
                ", ".join(each["extras"]) or "plain",
                each["kernel"],
                each["warps"],
                *_code_cells(each),
            ]
            for each in measured["kernels"]
        ],
    )
    lines += ["## What warp specialisation takes", "", "The kernel of D = Dv = 128, plain.", ""]
    lines += table(
        ["tried", *_CODE_HEADINGS], [[each["tried"], *_code_cells(each)] for each in measured["tried"]]
    )
    lines += ["## Time", ""]
    if not measured["timed"]:
        return "\n".join([*lines, f"Not timed: {measured['why_not_timed']}.", ""])
    rows = [
        [
            each[key]
            for key in ("batch", "kernel", "ms", "over_shipped", "q20", "q80", "share_of_allowed_error")
        ]
        for each in measured["timed"]
    ]
    headings = ["batch", "kernel", "ms", "times the shipped one's speed", "20%", "80%", "error over allowed"]
    return "\n".join(lines + table(headings, rows))


_CODE_HEADINGS = ("registers", "spills", "shared KiB", "wgmma", "wide loads", "bulk copies", "outcome")


def _code_cells(row: dict[str, Any]) -> list[Any]:
    if row["reason"]:
        return [None] * 6 + [row["reason"]]
    outcome = "all warps alike"
    if row["specialised"]:
        tasks = ", ".join(map(str, sorted(set(row["registers_of_tasks"]))))
        outcome = "producer and consumer warps" + (f" (setmaxnreg {tasks})" if tasks else "")
    if row["shared_bytes"] > _SHARED_KIB * 1024:
        outcome += f"; does not fit: a block has {_SHARED_KIB} KiB of shared memory"
    copies = f"{row['tma']} and {row['instructions']}"
    numbers = [row["registers"], row["spills"], row["shared_bytes"] / 1024, row["wgmma"], row["wide_loads"]]
    return [*numbers, copies, outcome]


def _in_process(module: str, quick: bool, **environment: str) -> Any:
    """What a module's `main` prints, in a process that has, or has not, Triton's interpreter."""
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", _CHILD.format(module=module), "quick" if quick else "whole"]
    done = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise RuntimeError(f"{module} failed: {(done.stderr or done.stdout)[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _why_not_timed() -> str:
    if not torch.cuda.is_available():
        return "no CUDA GPU here, and descriptors are for sm_90 and newer"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 9 else f"the GPU is sm_{major}{minor}, and descriptors are for sm_90 and newer"


def _timed(quick: bool, progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Each kernel on each batch against the shipped one; a wrong result has no time."""
    if _why_not_timed():
        return []
    return [
        row
        for name, heads, width in (TIMED[1:] if quick else TIMED)
        for row in times(
            name, heads, width, torch.bfloat16, torch.device("cuda"), 5 if quick else 20, progress
        )
    ]


def times(
    name: str,
    heads: tuple[int, int],
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    rounds: int,
    progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Milliseconds of each kernel on one batch, interleaved."""
    from radixmlp.kernels.trie_attention import trie_attention

    from .launch import PLAIN, SPECIALISED, descriptor_attention

    progress(f"timing {name}")
    plan = radixmlp.build_plan(make_workload(name, None, 10_000).batch).to(device)
    q, k, v = random_qkv(plan, heads, width, dtype)
    spec = AttentionSpec(width**-0.5)
    calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        SHIPPED: partial(trie_attention, q, k, v, plan, spec),
        **{
            variant.name: partial(descriptor_attention, q, k, v, plan, spec, variant)
            for variant in (PLAIN, SPECIALISED)
        },
    }
    truth, rounded = attention_truth(q, k, v, plan, spec)
    shares = {kernel: share_of_allowed(call()[0], truth, [rounded])[0] for kernel, call in calls.items()}
    timings = time_kernels({kernel: calls[kernel] for kernel in calls if shares[kernel] <= 1}, rounds, device)
    rows = []
    for kernel, share in shares.items():
        row: dict[str, Any] = {"batch": name, "kernel": kernel, "share_of_allowed_error": share}
        row |= dict.fromkeys(("ms", "over_shipped", "q20", "q80"))
        if kernel in timings.seconds:
            row["ms"] = timings.median(kernel) * 1e3
            if SHIPPED in timings.seconds:
                ratio = timings.ratio(SHIPPED, kernel)
                row |= {"over_shipped": ratio.median, "q20": ratio.q20, "q80": ratio.q80}
        rows.append(row)
    return rows
