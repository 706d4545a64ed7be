"""What `enable` sets for a model."""

from __future__ import annotations

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
