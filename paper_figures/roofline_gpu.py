"""GPUs from their public data sheets, and what share of the peaks is assumed to be reached."""

from __future__ import annotations

from dataclasses import dataclass

TERA = 1e12
GIGA = 1e9


@dataclass(frozen=True)
class Gpu:
    """A device that takes the larger of arithmetic and memory traffic for each kernel, and its launch.

    Args:
        name: what it is called.
        peak_flops: dense bf16 matrix products without sparsity, FLOP/s, from the data sheet.
        peak_bandwidth: of its memory, bytes/s, from the data sheet.
        source: the data sheet.
        matmul_share: of `peak_flops` that a large matrix product reaches. Assumed.
        attention_share, attention_backward_share: of `peak_flops` that FlashAttention reaches on causal
            sequences of 1K to 4K tokens with head size 128. Assumed; `attention_source` says from what.
        bandwidth_share: of `peak_bandwidth` that a streaming kernel reaches. Assumed.
        launch: seconds from one kernel's end to the next one's start. Assumed.
    """

    name: str
    peak_flops: float
    peak_bandwidth: float
    source: str
    attention_share: float
    attention_backward_share: float
    attention_source: str
    matmul_share: float = 0.65
    bandwidth_share: float = 0.80
    launch: float = 3e-6

    def matmul(self, flops: float, moved: float) -> float:
        """Seconds of one matrix product that moves `moved` bytes."""
        return max(flops / (self.peak_flops * self.matmul_share), self.stream(moved)) + self.launch

    def attention(self, flops: float, moved: float, backward: bool = False) -> float:
        """Seconds of one fused attention kernel."""
        share = self.attention_backward_share if backward else self.attention_share
        return max(flops / (self.peak_flops * share), self.stream(moved)) + self.launch

    def elementwise(self, moved: float, kernels: int = 1) -> float:
        """Seconds of `kernels` kernels that read and write `moved` bytes together."""
        return self.stream(moved) + kernels * self.launch

    def stream(self, moved: float) -> float:
        """Seconds to read or write `moved` bytes of device memory."""
        return moved / (self.peak_bandwidth * self.bandwidth_share)


_FLASH_2_ON_HOPPER = (
    "FlashAttention-3 paper (arXiv 2407.08608): FlashAttention-2 uses 35% of an H100, less where causal"
)
_FLASH_2_ON_AMPERE = (
    "FlashAttention-2 paper (arXiv 2307.08691): 50 to 73% of an A100's peak forward, less backward"
)

DEVICES: dict[str, Gpu] = {
    "h100": Gpu(
        "H100 SXM",
        989 * TERA,
        3350 * GIGA,
        "NVIDIA H100 Tensor Core GPU data sheet: 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s",
        0.33,
        0.28,
        _FLASH_2_ON_HOPPER,
    ),
    "h200": Gpu(
        "H200 SXM",
        989 * TERA,
        4800 * GIGA,
        "NVIDIA H200 Tensor Core GPU data sheet: 1,979 TFLOPS bf16 with sparsity, 4.8 TB/s",
        0.33,
        0.28,
        _FLASH_2_ON_HOPPER,
    ),
    "a100": Gpu(
        "A100 SXM 80 GB",
        312 * TERA,
        2039 * GIGA,
        "NVIDIA A100 Tensor Core GPU data sheet: 312 TFLOPS bf16, 2,039 GB/s",
        0.60,
        0.50,
        _FLASH_2_ON_AMPERE,
    ),
    "l4": Gpu(
        "L4",
        121 * TERA,
        300 * GIGA,
        "NVIDIA L4 Tensor Core GPU data sheet: 242 TFLOPS bf16 with sparsity, 300 GB/s",
        0.60,
        0.50,
        "assumed as on the A100: no published figure",
    ),
}
