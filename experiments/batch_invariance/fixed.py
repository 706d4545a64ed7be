"""Computing every row in calls whose shape does not depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

import radixmlp
from radixmlp.optimized.attention.interface import require_trie_order
from radixmlp.optimized.attention.products import score_dtype
from radixmlp.reference import AttentionSpec, TriePlan

TILE = 64
FIXED_TRIE, FIXED_DENSE = "trie-fixed", "dense-fixed"


@contextmanager
def padded_products(model: nn.Module) -> Iterator[None]:
    """Within the block every linear layer's rows are padded with zeros to a multiple of `TILE`: one product."""
    with _replaced(model, _padded):
        yield


@contextmanager
def tiled_products(model: nn.Module) -> Iterator[None]:
    """Within the block every linear layer is one product of `TILE` rows after another, whatever the batch."""
    with _replaced(model, _tiled):
        yield


@contextmanager
def deterministic_algorithms(_: nn.Module) -> Iterator[None]:
    """PyTorch's own switch: it forbids operations that differ from run to run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class FixedAttention:
    """Attention in tiles of `TILE` queries of one path, counted from its start, in fp32 (fp64 for fp64).

    Tile t of a path has the same shape in every batch: its queries, and (t + 1) * TILE keys, zeros where the path
    ends. A row's place in the call is its depth. Where paths part inside a tile, the rows before are computed once
    for each branch, and come out the same.

    Args:
        shares: on the trie's rows, or on one row per token.
    """

    def __init__(self, shares: bool) -> None:
        self.name = FIXED_TRIE if shares else FIXED_DENSE
        self.shares_prefixes = shares

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        if spec.sliding_window is not None or spec.softcap is not None or spec.sinks is not None:
            return f"{self.name} has no sliding windows, soft caps and sinks"
        return "attention dropout" if spec.dropout > 0 and training else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]."""
        require_trie_order(plan, self.name)
        wide = score_dtype(q.dtype)
        out = q.new_empty(*q.shape[:2], v.shape[2])
        for start, path in _tiles(plan):
            queries = path[start:]
            tile = _attend(q[queries].to(wide), k[path].to(wide), v[path].to(wide), start, spec.softmax_scale)
            out[queries] = tile.to(q.dtype)
        return out


@contextmanager
def registered() -> Iterator[None]:
    """Within the block both fixed backends are available under their names."""
    names: list[str] = []
    try:
        for shares in (True, False):
            names.append(radixmlp.register_attention(FixedAttention(shares)).name)
        yield
    finally:
        for name in names:
            radixmlp.unregister_attention(name)


def _tiles(plan: TriePlan) -> list[tuple[int, Tensor]]:
    """(first query's depth, rows of the path up to the tile's end) of each distinct tile, once a plan."""
    tiles: list[tuple[int, Tensor]] | None = plan.memo.get("fixed tiles")
    if tiles is None:
        distinct: dict[int, tuple[int, Tensor]] = {}  # a path is known by its last row
        for first, last in pairwise(plan.cu_seqlens.tolist()):
            path = plan.scatter[first:last].long()
            for start in range(0, last - first, TILE):
                rows = path[: start + TILE]
                distinct.setdefault(int(rows[-1]), (start, rows))
        tiles = plan.memo["fixed tiles"] = list(distinct.values())
    return tiles


def _attend(q: Tensor, k: Tensor, v: Tensor, start: int, scale: float) -> Tensor:
    """q [T, Hq, D] at depths start .. start+T-1, k [S, Hkv, D], v [S, Hkv, Dv] of the path -> [T, Hq, Dv]."""
    rows, heads = q.shape[0], k.shape[1]
    q = _filled(q, TILE).unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, TILE, D]
    k, v = (_filled(x, start + TILE).transpose(0, 1) for x in (k, v))  # [Hkv, S, D]
    scores = torch.matmul(q.flatten(1, 2).contiguous(), k.transpose(1, 2).contiguous()).mul_(scale)
    future = torch.ones(TILE, start + TILE, dtype=torch.bool, device=q.device).triu_(start + 1)
    weights = scores.unflatten(1, (-1, TILE)).masked_fill_(future, -math.inf).softmax(-1)
    out = torch.matmul(weights.flatten(1, 2), v.contiguous())  # [Hkv, G * TILE, Dv]
    return out.unflatten(1, (-1, TILE)).permute(2, 0, 1, 3).flatten(1, 2)[:rows]


def _filled(x: Tensor, rows: int) -> Tensor:
    """[n, H, D] with zeros up to `rows`."""
    return pad(x, (0, 0, 0, 0, 0, rows - x.shape[0]))


Product = Callable[[nn.Linear, Tensor], Tensor]


@contextmanager
def _replaced(model: nn.Module, product: Product) -> Iterator[None]:
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for layer in layers:
        layer.forward = partial(product, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _padded(layer: nn.Linear, x: Tensor) -> Tensor:
    """[..., in] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    whole = pad(rows, (0, 0, 0, -rows.shape[0] % TILE))
    return linear(whole, layer.weight, layer.bias)[: rows.shape[0]].unflatten(0, x.shape[:-1])


def _tiled(layer: nn.Linear, x: Tensor) -> Tensor:
    """[..., in] -> [..., out]."""
    rows = x.reshape(-1, x.shape[-1])
    whole = pad(rows, (0, 0, 0, -rows.shape[0] % TILE))
    parts = [linear(tile, layer.weight, layer.bias) for tile in whole.split(TILE)]
    return torch.cat(parts)[: rows.shape[0]].unflatten(0, x.shape[:-1])
