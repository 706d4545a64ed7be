"""Which tile each attention kernel over the trie takes, by architecture. Importing this imports no Triton.

Launches and the table of compiled kernels (`configurations()`) choose by the same functions: what is judged is what
runs. Tiles are chosen so that no kernel spills registers and none needs more shared memory than a block may have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))  # (D, Dv); (192, 128): MLA
WIDEST_FLOAT32 = 128  # full fp32 products of wider heads do not fit the registers in the backward pass
LEAST_SHARED_MEMORY = 163 * 1024  # bytes of a block, of sm_80
_SHARED_MEMORY_SM90 = 227 * 1024


@dataclass(frozen=True)
class Tile:
    """Query rows (nodes times packed heads) and keys of a tile, and how its programs are compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def block_queries(self, pack: int) -> int:
        """Nodes of a tile with `pack` heads each."""
        return self.rows // pack

    @property
    def constants(self) -> dict[str, int]:
        """The kernels' constexprs for it."""
        return {"BLOCK_M": self.rows, "BLOCK_N": self.keys}

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options for it."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


# By (D, Dv), for 16-bit inputs, on GPUs that multiply from shared memory (sm_90 and newer).
_FORWARD = {
    (64, 64): Tile(128, 64, 8, 3),
    (96, 96): Tile(128, 64, 8, 3),
    (128, 128): Tile(128, 64, 8, 3),
    (192, 128): Tile(128, 64, 8, 3),
    (192, 192): Tile(128, 32, 8, 3),
    (256, 256): Tile(128, 32, 8, 2),
}
_DQ = {
    (64, 64): Tile(128, 64, 8, 3),
    (96, 96): Tile(128, 64, 8, 3),
    (128, 128): Tile(128, 64, 8, 3),
    (192, 128): Tile(128, 32, 8, 3),
    (192, 192): Tile(128, 32, 8, 2),
    (256, 256): Tile(128, 32, 8, 2),
}
_DKV = {
    (64, 64): Tile(64, 128, 8, 2),
    (96, 96): Tile(32, 128, 8, 2),
    (128, 128): Tile(32, 128, 8, 2),
    (192, 128): Tile(32, 64, 8, 3),
    (192, 192): Tile(16, 64, 8, 3),
    (256, 256): Tile(16, 64, 8, 3),
}

# Where sm_8x differs: its tensor cores take operands from registers, which the tiles above would spill.
_FORWARD_SM80 = {
    (192, 128): Tile(128, 64, 8, 2),
    (192, 192): Tile(64, 32, 8, 2),
    (256, 256): Tile(64, 32, 8, 2),
}
_DQ_SM80 = {
    (96, 96): Tile(64, 32, 8, 2),
    (128, 128): Tile(64, 32, 8, 2),
    (192, 128): Tile(64, 32, 8, 2),
    (192, 192): Tile(64, 32, 8, 2),
    (256, 256): Tile(64, 32, 8, 2),
}
_DKV_SM80 = {
    (64, 64): Tile(32, 128, 8, 2),
    (96, 96): Tile(16, 128, 8, 2),
    (128, 128): Tile(16, 128, 8, 2),
}

# By padded D, for float32.
_FLOAT32_FORWARD = {64: Tile(32, 32, 4, 1), 128: Tile(32, 16, 4, 1)}
_FLOAT32_DQ = {64: Tile(32, 32, 8, 1), 128: Tile(16, 16, 8, 1)}
_FLOAT32_DKV = {64: Tile(16, 32, 4, 1), 128: Tile(16, 16, 8, 2)}


def architecture(device: torch.device) -> str:
    """ "sm_90": what kernels are compiled for on `device`; on the CPU, where they are interpreted, as on sm_90."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory a program may use; on the CPU, where kernels are interpreted, as on sm_90."""
    if device.type != "cuda":
        return _SHARED_MEMORY_SM90
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def padded(width: int) -> int:
    """The next power of two."""
    return 1 << (width - 1).bit_length()


def forward_tile(head_dim: int, value_dim: int, dtype: torch.dtype, softcap: bool, arch: str) -> Tile:
    """The tile of `trie_attention_forward` on `arch`, such as "sm_90"."""
    if dtype is torch.float32:
        return _FLOAT32_FORWARD[padded(head_dim)]
    tile = _by_shape(head_dim, value_dim, arch, _FORWARD, _FORWARD_SM80)
    if softcap and value_dim > 128:  # the cap takes registers
        return replace(tile, rows=64, num_stages=3)
    return tile


def dq_tile(head_dim: int, value_dim: int, dtype: torch.dtype, arch: str) -> Tile:
    """The tile of `trie_attention_dq` on `arch`."""
    if dtype is torch.float32:
        return _FLOAT32_DQ[padded(head_dim)]
    return _by_shape(head_dim, value_dim, arch, _DQ, _DQ_SM80)


def dkv_tile(head_dim: int, value_dim: int, dtype: torch.dtype, softcap: bool, arch: str) -> Tile:
    """The tile of `trie_attention_dkv` on `arch`."""
    if dtype is torch.float32:
        return _FLOAT32_DKV[padded(head_dim)]
    tile = _by_shape(head_dim, value_dim, arch, _DKV, _DKV_SM80)
    if softcap and head_dim > 64:  # as above
        return replace(tile, rows=16)
    return tile


def _by_shape(
    head_dim: int,
    value_dim: int,
    arch: str,
    tiles: dict[tuple[int, int], Tile],
    tiles_sm80: dict[tuple[int, int], Tile],
) -> Tile:
    shape = (head_dim, value_dim)
    return tiles_sm80.get(shape, tiles[shape]) if arch.startswith("sm_8") else tiles[shape]


def unsupported_heads(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernels do not serve keys of `head_dim` and values of `value_dim` on any GPU, or None."""
    shipped = [shape for shape in HEAD_DIMS if dtype is not torch.float32 or shape[0] <= WIDEST_FLOAT32]
    if (head_dim, value_dim) in shipped:
        return None
    names = ", ".join(str(d) if d == dv else f"{d} with values of {dv}" for d, dv in shipped)
    return f"head_dim {head_dim} with values of {value_dim} in {dtype} is not among those shipped: {names}"
