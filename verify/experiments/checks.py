"""What an experiment's own test asks: is a backend's attention that of the reference, values and gradients?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import radixmlp
from radixmlp.optimized.attention import AttentionBackend, shares_prefixes
from radixmlp.reference import AttentionSpec, RaggedBatch, TriePlan
from radixmlp.reference.attention import causal_attention

Heads = tuple[int, int]


def random_inputs(
    rows: int, heads: Heads = (4, 2), widths: tuple[int, int] = (8, 8), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """q [rows, Hq, D], k [rows, Hkv, D], v [rows, Hkv, Dv], the same for the same arguments, requiring gradients."""
    random = torch.Generator().manual_seed(rows)
    shapes = ((heads[0], widths[0]), (heads[1], widths[0]), (heads[1], widths[1]))
    q, k, v = (
        torch.randn(rows, h, width, generator=random, dtype=torch.float64).mul_(2).to(dtype).requires_grad_()
        for h, width in shapes
    )
    return q, k, v


def attention_errors(
    backend: AttentionBackend,
    sequences: Sequence[Sequence[int]],
    spec: AttentionSpec | None = None,
    *,
    heads: Heads = (4, 2),
    widths: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    gradients: bool = True,
) -> dict[str, float]:
    """How far a backend is from the reference's attention per sequence in fp64, on random Q, K and V.

    Args:
        sequences: token ids; their trie is the plan.
        spec: of the layer; None: scale 1/sqrt(D) and nothing else.
        heads: (Hq, Hkv).
        widths: (D, Dv).
        gradients: compare those of q, k and v too, of a fixed random projection of the output.

    Returns:
        {"out": ..., "q": ..., "k": ..., "v": ...}: largest error over max|truth|, 0 where there is nothing.
    """
    batch = RaggedBatch.from_sequences(sequences)
    plan = radixmlp.build_plan(batch) if shares_prefixes(backend) else TriePlan.identity(batch)
    spec = spec or AttentionSpec(widths[0] ** -0.5)
    given = random_inputs(plan.num_nodes, heads, widths, dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in given)
    out = backend(*given, plan, spec)
    ragged_q, ragged_k, ragged_v = (x[plan.scatter.long()] for x in exact)
    truth = causal_attention(ragged_q, ragged_k, ragged_v, plan.cu_seqlens, spec)[plan.gather.long()]
    errors = {"out": _error(out, truth)}
    if gradients and plan.num_nodes:
        weights = torch.randn(truth.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        got = torch.autograd.grad((out.double() * weights).sum(), given)
        expected = torch.autograd.grad((truth * weights).sum(), exact)
        errors |= {name: _error(a, b) for name, a, b in zip("qkv", got, expected, strict=True)}
    return errors


def _error(got: Tensor, truth: Tensor) -> float:
    got, truth = got.detach().double(), truth.detach()
    if got.shape != truth.shape:
        raise ValueError(f"got shape {tuple(got.shape)}, expected {tuple(truth.shape)}")
    if not truth.numel():
        return 0.0
    scale = float(truth.abs().max()) or 1.0
    return float((got - truth).abs().max()) / scale
