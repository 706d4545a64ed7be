"""What the harness puts on trial, so that a test can put something broken there instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import radixmlp
from radixmlp.reference import TriePlan


@dataclass(frozen=True)
class Subject:
    """The calls under test.

    Args:
        forward: as `radixmlp.forward(model, batch, attention=..., logits_to_keep=...)`.
        build_plan: as `radixmlp.build_plan(batch, order=...)`.
    """

    forward: Callable[..., Any]
    build_plan: Callable[..., TriePlan]


def fast_path() -> Subject:
    """What users call."""
    return Subject(radixmlp.forward, radixmlp.build_plan)
