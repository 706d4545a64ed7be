"""The two refusals. Both are `ValueError`: the caller can change the input."""


class UnsupportedModelError(ValueError):
    """The model mixes rows in a way a prefix trie cannot reproduce; the message says which."""


class UnsupportedAttentionError(ValueError):
    """The named attention backend cannot serve this layer, device or dtype; the message says why."""
