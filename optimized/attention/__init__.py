"""Attention backends and their registry. Importing this registers the built-in ones."""

from radixmlp.optimized.attention.flash import DenseFlash, ScatterFlash
from radixmlp.optimized.attention.interface import (
    AttentionBackend,
    attention_backends,
    get_attention,
    register_attention,
    require_trie_order,
    shares_prefixes,
    unregister_attention,
)
from radixmlp.optimized.attention.sdpa import DenseSdpa, ScatterSdpa
from radixmlp.optimized.attention.trie_flex import TrieFlex
from radixmlp.optimized.attention.trie_sdpa import TrieSdpa
from radixmlp.optimized.attention.trie_triton import TrieTriton

for _backend in (
    DenseSdpa(),
    ScatterSdpa(),
    TrieSdpa(),
    TrieTriton(),
    TrieFlex(),
    ScatterFlash(),
    DenseFlash(),
):
    register_attention(_backend)

__all__ = [
    "AttentionBackend",
    "attention_backends",
    "get_attention",
    "register_attention",
    "require_trie_order",
    "shares_prefixes",
    "unregister_attention",
]
