"""What the harness passes around: workloads in, records out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from radixmlp.reference import RaggedBatch

Kind = Literal["parity", "compression", "speed", "memory", "index", "kernel"]


@dataclass(frozen=True)
class Workload:
    """A named batch.

    Args:
        name: as `--workload` takes it.
        batch: the token ids, on the CPU.
        prefix_length: shared tokens where the workload is synthetic, for the plot over prefix length.
        description: one line for the report.
    """

    name: str
    batch: RaggedBatch
    prefix_length: int | None = None
    description: str = ""


@dataclass(frozen=True)
class Record:
    """One measured number and the verdict on it. `limit` None: reported, not judged."""

    kind: Kind
    model: str
    workload: str
    attention: str
    dtype: str
    device: str
    metric: str
    value: float
    limit: float | None
    passed: bool
    details: dict[str, Any] = field(default_factory=dict)
