"""Compile a kernel for a GPU that need not be there, and count what the machine code holds.

Triton compiles for any architecture and brings ptxas, cuobjdump and nvdisasm with it. Counts are static: of
instructions in the code, not of executions.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixmlp.kernels.config import KernelConfig

# Shared memory one block may use, in KiB (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMIT_KIB = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_120": 99,
}
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?\w+\s+)?([A-Z][\w.]*)")
_WARP_GROUP = re.compile(r"[HIQB]GMMA")
_OTHER_TENSOR = re.compile(r"[HIDQO]MMA|UTC[A-Z]*MMA")
_WIDE = re.compile(r"\.(128|256)\b")


class CannotCompileError(RuntimeError):
    """Why nothing can be compiled here, or this kernel cannot."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel became.

    Args:
        arch: "sm_90".
        registers: of a thread.
        spills: instructions that load from or store to local memory.
        shared_bytes: of a block.
        wgmma: warp-group matrix instructions (sm_90).
        other_mma: matrix instructions of other kinds (mma.sync, tcgen05).
        wide_loads, wide_stores: global accesses of 16 bytes (or more) a thread, asynchronous copies included.
        narrow_stores: global stores of fewer.
        tma: bulk copies by the tensor memory accelerator.
        ttir: Triton's own intermediate code, before any lowering.
    """

    config: KernelConfig
    arch: str
    registers: int
    spills: int
    shared_bytes: int
    wgmma: int
    other_mma: int
    wide_loads: int
    wide_stores: int
    narrow_stores: int
    tma: int
    ttir: str


def capability(arch: str) -> int:
    """90 of "sm_90".

    Raises:
        ValueError: an architecture whose limits are not known here.
    """
    if arch not in SHARED_LIMIT_KIB:
        raise ValueError(f"unknown architecture {arch!r}: expected one of {', '.join(SHARED_LIMIT_KIB)}")
    return int(arch.removeprefix("sm_"))


def compile_kernel(config: KernelConfig, arch: str) -> Compiled:
    """Compile `config` for `arch` and read the machine code. No GPU is needed; Triton caches what it compiled.

    Raises:
        ValueError: an unknown architecture, or a configuration that does not fit its kernel's arguments.
        CannotCompileError: Triton runs as an interpreter, or the compiler refuses the kernel.
    """
    number = capability(arch)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = config.kernel()
    if not isinstance(kernel, triton.JITFunction):
        raise CannotCompileError(
            "TRITON_INTERPRET is set, so there is no compiler: unset it in the environment and start again"
        )
    _check_signature(config, kernel.arg_names)
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in config.divisible_by_16
    }
    source = ASTSource(kernel, config.signature, config.constexprs, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    except Exception as error:  # Triton's compiler has no base class of its own
        raise CannotCompileError(f"{config.name} does not compile for {arch}: {error}") from error
    return _read(config, arch, compiled)


def _check_signature(config: KernelConfig, arguments: list[str]) -> None:
    if list(config.signature) != list(arguments):
        raise ValueError(
            f"{config.name}: the signature names {', '.join(config.signature)}, but the kernel takes "
            f"{', '.join(arguments)}"
        )
    constexprs = {name for name, kind in config.signature.items() if kind == "constexpr"}
    if constexprs != set(config.constexprs):
        wrong = ", ".join(sorted(constexprs ^ set(config.constexprs)))
        raise ValueError(
            f"{config.name}: {wrong} must be both in constexprs and a constexpr in the signature"
        )
    unknown = set(config.divisible_by_16) - set(arguments)
    if unknown:
        raise ValueError(f"{config.name}: {', '.join(sorted(unknown))} in divisible_by_16 is no argument")


def _read(config: KernelConfig, arch: str, compiled: Any) -> Compiled:
    import triton

    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _run(tools.cuobjdump.path, "-res-usage", str(cubin))
        code = _run(tools.nvdisasm.path, "-c", str(cubin))
    registers = re.search(r"REG:(\d+)", usage)
    opcodes = count_opcodes(code)
    if registers is None or not opcodes:
        raise CannotCompileError(f"{config.name}: the disassembly for {arch} is empty or of an unknown form")
    return Compiled(
        config=config,
        arch=arch,
        registers=int(registers[1]),
        shared_bytes=int(compiled.metadata.shared),
        ttir=str(compiled.asm["ttir"]),
        **tally(opcodes),
    )


def _run(*command: str) -> str:
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise CannotCompileError(f"{Path(command[0]).name} failed: {run.stderr.strip()}")
    return run.stdout


def count_opcodes(code: str) -> Counter[str]:
    """{"LDG.E.128": 8, ...} of an nvdisasm listing."""
    return Counter(found[1] for line in code.splitlines() if (found := _INSTRUCTION.search(line)))


def tally(opcodes: Counter[str]) -> dict[str, int]:
    """The counts of `Compiled` that are instructions."""

    def count(*names: str, wide: bool | None = None) -> int:
        return sum(
            n
            for opcode, n in opcodes.items()
            if opcode.split(".")[0] in names and (wide is None or bool(_WIDE.search(opcode)) == wide)
        )

    def matching(pattern: re.Pattern[str]) -> int:
        return sum(n for opcode, n in opcodes.items() if pattern.fullmatch(opcode.split(".")[0]))

    return {
        "spills": count("LDL", "STL"),
        "wgmma": matching(_WARP_GROUP),
        "other_mma": matching(_OTHER_TENSOR),
        "wide_loads": count("LDG", "LDGSTS", wide=True),
        "wide_stores": count("STG", wide=True),
        "narrow_stores": count("STG", wide=False),
        "tma": count("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP"),
    }
