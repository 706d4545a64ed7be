"""How long a request may be, and what to say to one that is longer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from radixmlp.optimized.engine.config import EngineConfig
from radixmlp.optimized.engine.errors import RequestError


@dataclass(frozen=True)
class Limit:
    """The tightest of the model's, the budget's and the user's limits.

    Args:
        tokens: most tokens of one sequence.
        source: whose limit that is, in words.
        remedy: how to get a longer one through.
        truncate: cut to it instead of raising.
    """

    tokens: int
    source: str
    remedy: str
    truncate: bool

    @classmethod
    def of(cls, model: Any, config: EngineConfig, max_rows: int | None = None) -> Limit:
        """The limit for `model` (its `max_position_embeddings`, where it states them) under `config`.

        Args:
            max_rows: rows of a batch beyond which the model would be wrong.
        """
        budget = config.max_batch_tokens
        limits = [(budget, "max_batch_tokens", "raise max_batch_tokens, shorten it")]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            limits.append((positions, "the model's max_position_embeddings", "shorten it"))
        if max_rows is not None:
            limits.append((max_rows, "the rows this model can tell apart", "shorten it"))
        if config.max_length is not None:
            limits.append((config.max_length, "max_length", "raise max_length, shorten it"))
        tokens, source, remedy = min(limits)
        return cls(tokens, source, remedy, config.truncate)

    def too_long(self, index: int, length: int) -> RequestError:
        """The error for a request of `length` tokens."""
        return RequestError(
            index,
            f"has {length} tokens, more than {self.source} = {self.tokens}: {self.remedy}, or set truncate=True",
        )

    def no_room(self, index: int, what: str, length: int) -> RequestError:
        """The error where what may not be cut fills the limit by itself."""
        return RequestError(
            index,
            f"cannot be cut to {self.source} = {self.tokens} tokens: {what} alone takes {length}; shorten that",
        )
