"""The KV cache of a compact forward: recorded one row a node, laid out [B, H, L, D] when somebody reads it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, DynamicCache

from radixmlp.optimized.errors import UnsupportedModelError

_filling = threading.RLock()
# Kept in step with the two spellings transformers uses for the argument.
CACHE_ARGUMENTS = ("cache", "past_key_values")


class CacheRecorder(DynamicCache):
    """An empty cache that keeps what each layer stores and hands it straight back."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states [1, H, N', D], returned as they are."""
        if layer_idx in self.stored:
            raise UnsupportedModelError(f"layer {layer_idx} writes its cache twice in one forward")
        self.stored[layer_idx] = (key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        """0: nothing was there before this forward."""
        return 0

    def get_mask_sizes(self, query_length: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """(keys, offset) of a mask without a past."""
        length = query_length if isinstance(query_length, int) else len(query_length)
        return length, 0

    def fill(self, cache: Cache, nodes: Tensor) -> None:
        """Store every layer's rows in `cache`; nodes [B, L] is the compact row of each slot."""
        for layer, (keys, values) in sorted(self.stored.items()):
            cache.update(_spread(keys, nodes), _spread(values, nodes), layer)


def _spread(rows: Tensor, nodes: Tensor) -> Tensor:
    """[1, H, N', D] -> [B, H, L, D]."""
    B, L = nodes.shape
    return rows[0].index_select(1, nodes.flatten().to(rows.device)).unflatten(1, (B, L)).transpose(0, 1)


class LazyCache(DynamicCache):
    """The cache a forward returns unasked: a `DynamicCache` from the first time anything of it is read."""

    def __init__(self, fill: Callable[[], DynamicCache]) -> None:
        # Not DynamicCache's: without attributes, the first look at one of them lands in __getattr__.
        self.__dict__["_fill"] = fill

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with _filling:
            fill = self.__dict__.get("_fill")
            if fill is not None:
                filled = vars(fill())  # where it fails, the next look tries again
                del self.__dict__["_fill"]
                self.__dict__.update(filled)
                self.__class__ = DynamicCache
        return getattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the filled cache."""
        self.__getattr__("layers")
        return DynamicCache.__reduce_ex__(self, protocol)


def length_of(cache: Any) -> int | None:
    """Tokens a cache given to a call holds; None where that cannot be told."""
    if cache is None:
        return 0
    if isinstance(cache, LazyCache | DynamicCache):
        return int(cache.get_seq_length())
    return None


def is_plain(cache: Any) -> bool:
    """Whether a compact forward can fill `cache`: a `DynamicCache` whose layers keep keys and values as such."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    replicated = getattr(cache, "layer_class_to_replicate", None)
    return (
        type(cache) is DynamicCache
        and not getattr(cache, "offloading", False)
        and (replicated is None or replicated in plain)
        and all(type(layer) in plain for layer in cache.layers)
    )
