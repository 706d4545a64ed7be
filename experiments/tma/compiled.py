"""Compiled evidence: what the kernels become for sm_90, without a GPU, and why some do not compile."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from radixmlp.kernels.aot import CannotCompileError, compile_kernel
from radixmlp.kernels.config import KernelConfig
from radixmlp.kernels.trie_attention import configurations
from radixmlp.kernels.trie_launch import EXTRAS, config_name
from radixmlp.kernels.trie_tiles import Tile

from .launch import PLAIN, SPECIALISED, SPECIALISED_TILE, Variant, config_of

ARCH = "sm_90"
SHAPES = ((64, 64), (128, 128), (192, 128), (256, 256))
COUNTS = ("registers", "spills", "shared_bytes", "wgmma", "wide_loads", "tma")
# One change at a time from the kernel that warp specialisation was first asked of to the one it works on.
TRIED = (
    Variant("the shipped tile (128 x 64, 8 warps)", None, specialise=True),
    Variant("128 x 64, 4 warps", Tile(128, 64, 4, 2), specialise=True),
    Variant("64 x 64, 4 warps, Q through pointers", SPECIALISED_TILE, describe_q=False, specialise=True),
    Variant("64 x 64, 4 warps, Q through a descriptor", SPECIALISED_TILE, specialise=True),
    Variant("... and block numbers read when needed", SPECIALISED_TILE, prefetch=False, specialise=True),
    Variant("... and 128 keys", Tile(64, 128, 4, 2), prefetch=False, specialise=True),
    Variant("... and 3 stages", Tile(64, 64, 4, 3), prefetch=False, specialise=True),
)
_FAILED_PASS = re.compile(r"Pipeline failed while executing \[`(\w+)`")
_REGISTERS = re.compile(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32\s+(\d+)")


def evidence(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """{"kernels": shipped and descriptor kernels side by side, "tried": what warp specialisation needs}."""
    shapes = SHAPES[:1] if quick else SHAPES
    dtype = torch.bfloat16
    shipped = {config.name: config for config in configurations(ARCH)}
    kernels = []
    for shape in shapes:
        for extras in EXTRAS[:1] if quick else (EXTRAS[0], EXTRAS[-1]):
            name = config_name("trie_attention_forward", *shape, dtype, extras)
            rows = [("shipped", shipped[name])]
            rows += [(each.name, config_of(each, shape, dtype, extras)) for each in (PLAIN, SPECIALISED)]
            for kind, config in rows:
                progress(f"compiling {config.name}")
                labels = {"heads": list(shape), "extras": list(extras), "kernel": kind}
                kernels.append({**labels, "warps": config.num_warps, **compiled(config)})
    tried = []
    for variant in TRIED[3:5] if quick else TRIED:
        progress(f"compiling {variant.name}")
        tried.append({"tried": variant.name, **compiled(config_of(variant, (128, 128), dtype))})
    return {"arch": ARCH, "kernels": kernels, "tried": tried}


def compiled(config: KernelConfig) -> dict[str, Any]:
    """Counts of one kernel's machine code, whether its warps have different tasks, or why it does not compile."""
    with _captured_stderr() as read:
        try:
            found = compile_kernel(config, ARCH)
        except CannotCompileError as error:
            failed = _FAILED_PASS.search(read())
            reason = f"the compiler's pass {failed[1]} fails" if failed else str(error)
            return {**dict.fromkeys((*COUNTS, "instructions")), "specialised": False, "reason": reason}
    texts = _texts(config)
    return {
        **{name: getattr(found, name) for name in COUNTS},
        "instructions": len(re.findall(r"cp\.async\.bulk\.tensor", texts["ptx"])),
        "specialised": "ttg.warp_specialize" in texts["ttgir"],
        "registers_of_tasks": [int(count) for _, count in _REGISTERS.findall(texts["ptx"])],
        "reason": "",
    }


def _texts(config: KernelConfig) -> dict[str, str]:
    """The intermediate code of a kernel that was just compiled, from Triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = config.kernel()
    attributes = {
        (kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in config.divisible_by_16
    }
    source = ASTSource(kernel, config.signature, config.constexprs, attributes)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    asm = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    return {"ptx": str(asm["ptx"]), "ttgir": str(asm["ttgir"])}


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """What is written to file descriptor 2 within the block: the compiler's passes write their errors there."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def read() -> str:
            file.seek(0)
            return file.read().decode("utf-8", "replace")

        try:
            yield read
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def main() -> int:
    """For a process without the interpreter: print `evidence` as JSON; `quick` is the last argument."""
    print(json.dumps(evidence(sys.argv[-1] == "quick", lambda _: None)))
    return 0
