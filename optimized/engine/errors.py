"""What the engine raises and warns about."""

from __future__ import annotations


class RequestError(ValueError):
    """A request that cannot be answered; the message names its index, the value and the remedy.

    Args:
        index: of the request in the list that was given.
        reason: what is wrong with it and what to do.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(index, reason)  # all of them, so that it can be pickled
        self.index, self.reason = index, reason

    def __str__(self) -> str:
        return f"request {self.index} {self.reason}"


class SlowIndexWarning(UserWarning):
    """The device waited for the CPU to build index maps."""
