"""What every section of `radixmlp gpu` is given: the device, the time it has, and where its bars go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from radixmlp.optimized.attention import attention_backends, register_attention, unregister_attention
from radixmlp.optimized.attention.flash import DenseFlash, ScatterFlash
from radixmlp.optimized.attention.flash_kernels import VarlenKernel
from radixmlp.optimized.attention.trie_flex import TrieFlex
from radixmlp.optimized.attention.varlen import sdpa_varlen
from radixmlp.reference import AttentionSpec, TriePlan
from radixmlp.reference.attention import trie_attention
from radixmlp.verify import rules
from radixmlp.verify.bars import Bar

TRIE, FLEX, SCATTER, DENSE_FLASH = "trie-triton", "trie-flex", "scatter-flash", "dense-flash"


@dataclass(frozen=True)
class Setting:
    """One run of some sections.

    Args:
        dry: on the CPU, tiny, kernels in Triton's interpreter: the same code, no speeds.
        deadline: `time.monotonic()` by which the section is stopped.
        emit: takes each bar as soon as it is measured.
    """

    dry: bool
    deadline: float
    emit: Callable[[Bar], None]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def dtype(self) -> torch.dtype:
        """Of models and attention; the interpreter's bf16 products are garbage."""
        return torch.float16 if self.dry else torch.bfloat16

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def speed_limit(self, limit: float | None) -> float | None:
        """`limit`, or None in a dry run: the interpreter's speed says nothing."""
        return None if self.dry else limit


def use_backends(dry: bool) -> None:
    """Register the backends that are measured; in a dry run the flash ones attend with PyTorch's SDPA instead."""
    from radixmlp.optimized.attention.trie_triton import TrieTriton

    kernel = _sdpa_in_place_of_flash() if dry else None
    for backend in (TrieTriton(), TrieFlex(), ScatterFlash(kernel), DenseFlash(kernel)):
        if backend.name in attention_backends():
            unregister_attention(backend.name)
        register_attention(backend)


def _sdpa_in_place_of_flash() -> VarlenKernel:
    def attend(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, spec: AttentionSpec, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        bounds = cu_seqlens.tolist()
        assert longest == max(end - start for start, end in pairwise(bounds))
        assert not with_lse
        return sdpa_varlen(q, k, v, bounds, spec), None

    return VarlenKernel("SDPA in place of FlashAttention", attend, softcap=False, device_type="cpu")


def random_qkv(
    plan: TriePlan, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """q [N', Hq, D], k and v [N', Hkv, D] on the plan's device, normal with a spread that makes softmax uneven."""
    device = plan.gather.device
    random = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(plan.num_nodes, count, head_dim, generator=random, device=device).mul_(1.5).to(dtype)
        for count in (heads[0], heads[1], heads[1])
    )
    return q, k, v


def attention_truth(
    q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """The readable reference in fp64, and in the inputs' own dtype: what its rounding legitimately costs."""
    return trie_attention(q.double(), k.double(), v.double(), plan, spec), trie_attention(q, k, v, plan, spec)


def share_of_allowed(got: Tensor, truth: Tensor, legitimate: list[Tensor]) -> tuple[float, dict[str, float]]:
    """The error of `got` as a share of what `rules.py` allows: above 1 is wrong.

    Args:
        got: [rows, ...] in the dtype that is judged.
        truth: the same shape, fp64 or fp32.
        legitimate: other paths in the dtype of `got`; the worst of them sets the scale below fp32.
    """
    rows = got.shape[0]
    mine, *others = (
        rules.errors_against(x.reshape(rows, -1), truth.reshape(rows, -1)) for x in (got, *legitimate)
    )
    rms, largest = max(e.rms for e in others), max(e.largest for e in others)
    details = {"rms": mine.rms, "largest": mine.largest, "other_rms": rms, "other_largest": largest}
    if got.dtype not in rules.HALF_DTYPES:
        return mine.largest / max(rules.FLOAT32, rules.LARGEST_FACTOR * largest), details
    share = mine.largest / (rules.LARGEST_FACTOR * largest + rules.floor_of(got.dtype, mine.scale))
    if rows >= rules.MIN_RMS_ROWS and rms > 0:
        share = max(share, mine.rms / (rules.RMS_FACTOR * rms))
    return share, details
