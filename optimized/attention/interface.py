"""The one seam: what an attention backend is, and the registry experiments plug into."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from radixmlp.optimized.errors import UnsupportedAttentionError
from radixmlp.reference import AttentionSpec, TriePlan


@runtime_checkable
class AttentionBackend(Protocol):
    """Attention in the compact layout.

    A backend may set `shares_prefixes = False`: it is then given the identity plan (one row per token), which
    makes it a dense baseline. All others get a plan in depth-first order.
    """

    name: str

    def unsupported(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype, training: bool
    ) -> str | None:
        """The reason this backend cannot serve such a layer, or None."""
        ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: TriePlan, spec: AttentionSpec) -> Tensor:
        """q [N', Hq, D], k [N', Hkv, D], v [N', Hkv, Dv] -> [N', Hq, Dv]; inputs are not written."""
        ...


_BACKENDS: dict[str, AttentionBackend] = {}


def register_attention(backend: AttentionBackend) -> AttentionBackend:
    """Make `backend` available under its name everywhere (`forward`, `enable`, the harness).

    Raises:
        ValueError: the name is taken, reserved or empty.
    """
    if not backend.name or backend.name == "auto":
        raise ValueError(f"attention backend name {backend.name!r} is reserved: choose another")
    if backend.name in _BACKENDS:
        raise ValueError(f"attention backend {backend.name!r} is registered already: unregister it first")
    _BACKENDS[backend.name] = backend
    return backend


def unregister_attention(name: str) -> None:
    """Remove a backend registered with `register_attention`."""
    if name not in _BACKENDS:
        raise ValueError(f"no attention backend is called {name!r}; registered: {', '.join(_BACKENDS)}")
    del _BACKENDS[name]


def attention_backends() -> dict[str, AttentionBackend]:
    """{name: backend} of everything registered (a copy)."""
    return dict(_BACKENDS)


def get_attention(name: str) -> AttentionBackend:
    """The backend called `name`.

    Raises:
        UnsupportedAttentionError: there is none; the message lists those there are.
    """
    try:
        return _BACKENDS[name]
    except KeyError:
        known = ", ".join([*_BACKENDS, "auto"])
        raise UnsupportedAttentionError(
            f"no attention backend is called {name!r}; there are: {known}"
        ) from None


def shares_prefixes(backend: AttentionBackend) -> bool:
    """Whether `backend` runs on the trie's rows (True) or on one row per token (False)."""
    return getattr(backend, "shares_prefixes", True)


def refuse_second_derivatives() -> None:
    """For the backward of an attention or a loss that is not differentiable itself.

    Raises:
        RuntimeError: the backward runs with `create_graph=True`: what it gives would be taken for a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives (create_graph=True) are not supported on the trie: radixmlp.disable(model) first"
        )


def require_trie_order(plan: TriePlan, name: str) -> None:
    """Interval masks hold in depth-first order only; anything else would be silently wrong."""
    if plan.order != "trie":
        raise ValueError(
            f"{name} needs a plan in depth-first order, got order={plan.order!r}: build_plan(batch, order='trie')"
        )
