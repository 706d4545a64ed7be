"""What `enable` sets for a model."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from radixmlp.optimized.integration.facts import Facts
from radixmlp.optimized.integration.stats import Stats


@dataclass(frozen=True)
class Settings:
    """Defaults of a model's compact forwards.

    Args:
        attention: a name of `attention_backends()` or "auto".
        threshold: batches with gamma = N'/N above it run densely.
        strict: raise where a call cannot be compacted, instead of running it densely.
    """

    attention: str = "auto"
    threshold: float = 0.9
    strict: bool = False


# For the calls of one thread or task: how the probe runs a model that others may be calling.
probing: ContextVar[Settings | None] = ContextVar("radixmlp_probing", default=None)


@dataclass
class DropIn:
    """The state behind an enabled model; copied with it.

    Args:
        facts: what the probe found out about the model.
        active: False once disabled: whatever still holds one of our forwards then runs the model's own.
    """

    settings: Settings
    facts: Facts
    stats: Stats = field(default_factory=Stats)
    active: bool = True

    @property
    def current(self) -> Settings:
        """The settings of a call made now."""
        return probing.get() or self.settings
