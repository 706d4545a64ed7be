"""Ahead-of-time compilation: what the shipped copies compile to, and that a bad kernel is seen.

Triton compiles only where it does not interpret, so everything here is compiled in another process.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from radixmlp.kernels import rope_kernel, row_copy, segments
from radixmlp.kernels.aot import SHARED_LIMIT_KIB, capability, compile_kernel, count_opcodes, tally
from radixmlp.kernels.config import KernelConfig, shipped

PLANTED = """
import triton
import triton.language as tl

from radixmlp.kernels.config import KernelConfig


@triton.jit
def narrow_copy(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + row * stride + cols, tl.load(x_ptr + row * stride + cols))


@triton.jit
def narrow_store(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64) * BLOCK
    tl.store(out_ptr + row + cols, tl.load(x_ptr + row + cols))
    tl.store(out_ptr + row + cols * 2, tl.load(x_ptr + row + cols))


@triton.jit
def wrapping_copy(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, BLOCK)
    offsets = (rows * stride)[:, None] * BLOCK + cols[None, :]
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def spilling(x_ptr, out_ptr, stride, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, x / tl.sum(x, 0)[None, :] + tl.sum(x, 1)[:, None])


@triton.jit
def product(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(steps):
        a, b = tl.load(x_ptr + i * BLOCK * BLOCK + offsets), tl.load(out_ptr + i * BLOCK * BLOCK + offsets)
        total = tl.dot(a, b, total)
    tl.store(out_ptr + offsets, total.to(tl.float16))


def config(name, kind, kernel, block, aligned=("x_ptr", "out_ptr"), dtype="*fp16", warps=4, stages=3):
    third = kernel.arg_names[2]
    signature = {"x_ptr": dtype, "out_ptr": dtype, third: "i32", "BLOCK": "constexpr"}
    return KernelConfig(name, kind, lambda: kernel, signature, {"BLOCK": block}, warps, stages, aligned)


configs = [
    config("aligned copy", "copy", narrow_copy, 1024, ("x_ptr", "out_ptr", "stride")),
    config("narrow copy", "copy", narrow_copy, 1024),
    config("narrow store", "copy", narrow_store, 1024),
    config("wrapping copy", "copy", wrapping_copy, 1024),
    config("spilling", "reduce", spilling, 128, dtype="*fp32", warps=1),
    config("product", "matrix", product, 128),
    config("too many stages", "matrix", product, 128, stages=6),
    config("a copy called matrix", "matrix", narrow_copy, 1024, ("x_ptr", "out_ptr", "stride")),
    config("a type that is none", "copy", narrow_copy, 1024, dtype="*fp17"),
]
"""
COMPILE = """
import json, sys
from radixmlp.kernels.aot import compile_kernel
from radixmlp.kernels.config import shipped
from radixmlp.verify import kernels as judge

ttir = {}

def recorded(config, arch):
    compiled = compile_kernel(config, arch)
    ttir[config.name, arch] = compiled.ttir
    return compiled

judge.compile_kernel = recorded
names = json.loads(sys.argv[2])
planted = []
if sys.argv[1]:
    sys.path.insert(0, sys.argv[1])
    from planted import configs as planted
work = [
    (config, arch)
    for arch in sys.argv[3:]
    for config in [*shipped(arch), *planted]
    if names is None or config.name in names or config in planted
]
rows = judge.judge(work)
print(json.dumps([{**row, "ttir": ttir.get((row["name"], row["arch"]))} for row in rows]))
"""
SAMPLE = (
    "gather_rows i32",
    "scatter_rows",
    "gather_rows i32, 4-byte rows",
    "gather_rows by segments, heads of 128",
    "segment_sum bf16",
    "segment_sum long bf16",
    "rope_scatter d128 bf16 8 heads",
)


def compiled(folder: str, names, *archs: str):
    """[row] as `radixmlp kernels` judges them, with `ttir`: of `names` (None: all) and those planted in `folder`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-c", COMPILE, folder, json.dumps(names), *archs]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """{name: row} of the sample and of what is planted, for sm_90."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.py").write_text(PLANTED)
    return {row["name"]: row for row in compiled(str(folder), SAMPLE, "sm_90")}


def wrapping_products(ttir: str) -> list[str]:
    """Products of whole tensors of rows in 32 bits: what an offset must not be made of."""
    return [line for line in ttir.splitlines() if re.search(r"arith\.muli .*: tensor<.*i32>", line)]


@pytest.mark.parametrize("name", SAMPLE)
def test_shipped_copies_are_as_they_should_be(rows, name):
    row = rows[name]
    assert row["faults"] == []
    assert row["spills"] == 0
    assert 16 <= row["registers"] <= 128
    if row["kind"] != "unaligned":
        assert row["wide_loads"] > 0
        assert row["wide_stores"] > 0
        assert row["narrow_stores"] == 0
    else:
        assert row["wide_stores"] == 0
        assert row["narrow_stores"] > 0


@pytest.mark.parametrize("name", SAMPLE)
def test_offsets_of_rows_are_64_bit(rows, name):
    ttir = rows[name]["ttir"]
    assert re.search(r"arith\.muli .*: tensor<.*i64>", ttir)
    assert not wrapping_products(ttir)


def test_a_wrapping_offset_is_seen(rows):
    assert rows["wrapping copy"]["faults"] == []  # its instructions are wide enough; its arithmetic is not
    assert wrapping_products(rows["wrapping copy"]["ttir"])


FAULTS = {
    "aligned copy": None,
    "narrow copy": "a copy kernel without 128-bit loads",
    "narrow store": r"\d+ stores of a copy kernel move fewer than 128 bits",
    "spilling": r"\d+ instructions spill registers",
    "product": None,
    "too many stages": "bytes of shared memory, a block has 232448",
    "a copy called matrix": "a matrix kernel without wgmma",
    "a type that is none": "does not compile for sm_90",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_kernel_is_seen_and_a_good_one_is_not(rows, name):
    faults, wanted = rows[name]["faults"], FAULTS[name]
    if wanted is None:
        assert faults == []
    else:
        assert any(re.search(wanted, fault) for fault in faults), faults


def test_counts_tell_the_kernels_apart(rows):
    assert rows["product"]["wgmma"] > 0
    assert rows["product"]["shared_bytes"] >= 2 * 128 * 128 * 2
    assert rows["aligned copy"]["wide_loads"] == rows["aligned copy"]["wide_stores"] == 1
    assert rows["narrow copy"]["narrow_stores"] > 1
    assert rows["spilling"]["spills"] > 1000


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_configuration_compiles_as_it_should(arch, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    report = tmp_path / "kernels.json"
    command = [sys.executable, "-P", "-m", "radixmlp.cli", "kernels", "--arch", arch, "--json", str(report)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    rows = json.loads(report.read_text())["kernels"]
    assert [row["name"] for row in rows] == [config.name for config in shipped(arch)]
    assert not [(row["name"], row["faults"]) for row in rows if row["faults"]]
    assert run.returncode == 0


@pytest.mark.slow
def test_every_offset_of_a_row_is_64_bit():
    copies = [
        config.name
        for config in (*row_copy.configurations(), *segments.configurations(), *rope_kernel.configurations())
    ]
    rows = compiled("", copies, "sm_90")
    assert len(rows) == len(copies)
    assert not [row["name"] for row in rows if wrapping_products(row["ttir"])]


LISTING = """
        /*0120*/              @!P0 LDG.E R7, desc[UR24][R2.64] ;
        /*0130*/               @P0 LDG.E.128 R8, desc[UR24][R20.64] ;
        /*0140*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0150*/              @UP1 UTMALDG.2D [UR8], [UR4] ;
        /*0ef0*/               @P6 STG.E.128 desc[UR24][R36.64], R8 ;
        /*0f00*/                   STG.E.64 desc[UR24][R36.64], R8 ;
        /*0f10*/                   STL [R1], R5 ;
        /*0f20*/                   LDL.64 R4, [R1+0x8] ;
        /*1230*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*1240*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*12340*/                  UTCHMMA gdesc[UR6], gdesc[UR8], tmem[UR10] ;
"""


def test_a_listing_is_counted():
    opcodes = count_opcodes(LISTING)
    assert sum(opcodes.values()) == 11
    assert tally(opcodes) == {
        "spills": 2,
        "wgmma": 1,
        "other_mma": 2,
        "wide_loads": 2,
        "wide_stores": 1,
        "narrow_stores": 1,
        "tma": 1,
    }
    assert tally(Counter()) == dict.fromkeys(tally(opcodes), 0)


def test_architectures():
    assert capability("sm_90") == 90
    assert SHARED_LIMIT_KIB["sm_90"] == 227
    with pytest.raises(ValueError, match=r"unknown architecture 'sm_91': expected one of sm_80, .*sm_100"):
        capability("sm_91")


@pytest.mark.parametrize("arch", SHARED_LIMIT_KIB)
def test_configurations_have_names_of_their_own_and_fit_their_kernels(arch):
    for config in shipped(arch):
        assert config.kind in ("copy", "matrix", "reduce", "unaligned", "scalar")
        arguments = config.kernel().arg_names
        assert list(config.signature) == list(arguments)
        constexprs = {name for name, kind in config.signature.items() if kind == "constexpr"}
        assert constexprs == set(config.constexprs)
        assert set(config.divisible_by_16) <= set(arguments) - constexprs


def test_an_interpreted_kernel_cannot_be_compiled():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_kernel(shipped("sm_90")[0], "sm_90")


class Kernel:
    arg_names = ("x", "BLOCK")


@pytest.mark.parametrize(
    ("signature", "constexprs", "aligned", "message"),
    [
        (
            {"BLOCK": "constexpr", "x": "*fp16"},
            {"BLOCK": 1},
            (),
            "the signature names BLOCK, x, but the kernel",
        ),
        ({"x": "*fp16", "BLOCK": "constexpr"}, {}, (), "BLOCK must be both in constexprs"),
        ({"x": "*fp16", "BLOCK": "constexpr"}, {"BLOCK": 1}, ("y",), "y in divisible_by_16 is no argument"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(monkeypatch, signature, constexprs, aligned, message):
    monkeypatch.setattr("triton.JITFunction", Kernel)
    config = KernelConfig("it", "copy", Kernel, signature, constexprs, divisible_by_16=aligned)
    with pytest.raises(ValueError, match=message):
        compile_kernel(config, "sm_90")
