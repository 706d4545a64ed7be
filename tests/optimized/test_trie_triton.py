"""What `trie-triton` refuses, that it needs no Triton to be imported, and that no batch is compiled for.

Its values are checked with the kernels (`tests/kernels/test_trie_attention_kernel.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from radixmlp import AttentionSpec, RaggedBatch, UnsupportedAttentionError, build_plan
from radixmlp.optimized.attention import AttentionBackend
from radixmlp.optimized.attention import trie_triton as module
from radixmlp.optimized.attention.trie_triton import TrieTriton

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN = AttentionSpec(0.1)


def reason(
    spec: AttentionSpec = PLAIN,
    device: torch.device = GPU,
    dtype: torch.dtype = torch.bfloat16,
    training: bool = False,
) -> str:
    return TrieTriton().unsupported(spec, device, dtype, training) or ""


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(module, "shared_memory", lambda device: 227 * 1024)
    return monkeypatch


def test_it_is_a_backend() -> None:
    assert isinstance(TrieTriton(), AttentionBackend)
    assert TrieTriton.name == "trie-triton"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_serves_a_gpu(hopper: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    spec = AttentionSpec(0.1, sliding_window=7, softcap=2.0, sinks=torch.zeros(4), dropout=0.1)
    assert reason(spec, dtype=dtype) == ""


def test_says_why_not(hopper: pytest.MonkeyPatch) -> None:
    assert "dropout" in reason(AttentionSpec(0.1, dropout=0.1), training=True)
    assert "float64" in reason(dtype=torch.float64)
    assert "softmax_scale" in reason(AttentionSpec(-1.0))
    assert "cuda" in reason(device=torch.device("meta")).lower()
    hopper.setattr(module, "shared_memory", lambda device: 99 * 1024)
    assert "99 KiB" in reason()
    hopper.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "sm_75" in reason()
    hopper.setattr(module, "find_spec", lambda name: None)
    assert "not installed" in reason()


def test_needs_the_interpreter_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET" in reason(device=CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert reason(device=CPU) == ""


def test_input_order_is_refused() -> None:
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3], [1, 4], [1, 2, 5]]), order="input")
    with pytest.raises(ValueError, match="depth-first"):
        TrieTriton()(*(torch.zeros(plan.num_nodes, 2, 64) for _ in range(3)), plan, PLAIN)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"),
    [(80, 80, torch.float16), (128, 64, torch.bfloat16), (256, 256, torch.float32)],
)
def test_head_dimensions_that_are_not_shipped_are_refused(
    head_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    plan = build_plan(RaggedBatch.from_sequences([[1, 2, 3], [1, 4]]))
    q, v = (torch.zeros(plan.num_nodes, 2, width, dtype=dtype) for width in (head_dim, value_dim))
    with pytest.raises(UnsupportedAttentionError, match=rf"head_dim {head_dim} .* not among .*use trie-sdpa"):
        TrieTriton()(q, q, v, plan, PLAIN)


def run(script: str) -> str:
    """Run Python code in a process of its own, without the interpreter of Triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", script], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_imports_without_triton() -> None:
    script = """
import sys, torch
sys.modules["triton"] = None
from radixmlp import AttentionSpec
from radixmlp.optimized.attention import trie_triton
trie_triton.find_spec = lambda name: None
print(trie_triton.TrieTriton().unsupported(AttentionSpec(0.1), torch.device("cuda"), torch.bfloat16, False))
"""
    assert "not installed" in run(script)


COUNT_VARIANTS = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from radixmlp import AttentionSpec, RaggedBatch, build_plan
from radixmlp.kernels import trie_attention_backward as backward
from radixmlp.kernels.trie_attention import trie_attention, trie_attention_forward


class NoDevice:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0


driver.set_active(NoDevice())
launch, compiled = JITFunction.run, {}


def compile_only(self, *arguments, grid, warmup, **options):
    kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
    compiled.setdefault(self.__name__, set()).add(kernel.hash)


JITFunction.run = compile_only
for size in SIZES:
    prefix = list(range(size // 2))
    plan = build_plan(RaggedBatch.from_sequences([[*prefix, *range(1000, 999 + size - size // 2)], [*prefix, 7]]))
    n = plan.num_nodes
    assert n == size
    for outside in (False, True):  # heads inside or outside of nodes
        q, k, v = (torch.zeros(h, n, 64, dtype=torch.float16).transpose(0, 1) for h in (4, 2, 2))
        if not outside:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        spec = AttentionSpec(0.1, sliding_window=size + 3, sinks=torch.zeros(4))
        out, lse = trie_attention(q, k, v, plan, spec)
        backward.trie_attention_backward(torch.ones_like(out), q, k, v, out, lse, plan, spec)
print({name: len(kinds) for name, kinds in sorted(compiled.items())})
"""


def test_no_batch_is_compiled_for() -> None:
    """Ten sizes of batch, among them 1 and multiples of 16: one compilation of each kernel."""
    sizes = [1, 2, 16, 17, 100, 128, 333, 512, 2000, 4096]
    counts = run(COUNT_VARIANTS.replace("SIZES", repr(sizes)))
    assert counts == str(
        {"add_parts": 1, "trie_attention_dkv": 1, "trie_attention_dq": 1, "trie_attention_forward": 1}
    )
