"""`EngineConfig`: the settings of an engine, under the names the paper's system publishes them by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from radixmlp.optimized.attention import get_attention, shares_prefixes

ModelImpl = Literal["radix", "dense"]


@dataclass(frozen=True)
class EngineConfig:
    """How an engine batches and runs (arXiv 2601.15013, section 4).

    Args:
        model_impl: "radix": one row per trie node; "dense": one row per token, the baseline. All else is equal.
        radix_mlp_threshold: with `attention="auto"`, batches with gamma = N'/N above it run densely.
        max_batch_tokens: most *computed* rows of a batch: trie nodes, or tokens where a batch runs densely.
        attention: "auto" or a name of `attention_backends()`.
        max_length: most tokens of a request; None: what the model and the budget allow.
        truncate: cut what is too long (documents and texts, never a template around them) instead of raising.
        progress: show a bar on standard error.
        deterministic: the results are a function of the set of requests, bit by bit, on one machine with one set of
            versions and threads: their order and repetitions do not matter, PyTorch runs deterministic algorithms,
            and no measured cost decides anything (gamma against the threshold chooses between trie and dense). A
            request's last bits still depend on its company: matrix products round by the number of their rows.

    Raises:
        ValueError: a value out of range, named.
        UnsupportedAttentionError: there is no such backend.
    """

    model_impl: ModelImpl = "radix"
    radix_mlp_threshold: float = 0.9
    max_batch_tokens: int = 65536
    attention: str = "auto"
    max_length: int | None = None
    truncate: bool = False
    progress: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.model_impl not in get_args(ModelImpl):
            raise ValueError(f"model_impl is {self.model_impl!r}: expected 'radix' or 'dense'")
        threshold = self.radix_mlp_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            raise ValueError(f"radix_mlp_threshold is {threshold!r}: expected a gamma between 0 and 1")
        _check_count("max_batch_tokens", self.max_batch_tokens)
        if self.max_length is not None:
            _check_count("max_length", self.max_length)
        for name in ("truncate", "progress", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected True or False")
        if self.attention != "auto":
            shares = shares_prefixes(get_attention(self.attention))
            if self.model_impl == "dense" and shares:
                raise ValueError(
                    f"attention is {self.attention!r}, which runs on the trie's rows, but model_impl is 'dense': "
                    "name a dense backend or leave 'auto'"
                )

    @property
    def dense(self) -> bool:
        """Whether every batch runs on one row per token."""
        if self.model_impl == "dense":
            return True
        return self.attention != "auto" and not shares_prefixes(get_attention(self.attention))


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}: expected a positive integer")
