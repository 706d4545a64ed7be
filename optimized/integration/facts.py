"""What the probe found out about a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DefaultPositions = Literal["tokens", "columns", "recounted", "unknown"]


@dataclass(frozen=True)
class Facts:
    """Findings that steer compact calls.

    Args:
        tolerance: the difference from the model's own results, as a share of their norm, that its dtype explains.
        decoder: the name of the submodule that is given the token ids ("": the model itself).
        default_positions: what the model does where no positions are given. "tokens": counts each row's tokens;
            "columns": counts columns, padding included; "recounted": counts columns, but turns queries and keys by
            them and nothing else, so that counting tokens changes nothing; "unknown": neither.
        max_rows: compact rows beyond which results would be wrong; None: any number is right.
        implementation: the model's own attention implementation while it was probed.
        caches: the KV cache of a compact call, filled, is the model's own.
        caches_in_training: the model returns a cache in training mode, too.
        keeps_last_columns: with `logits_to_keep=k` the model reads the last k columns of the hidden states only.
    """

    tolerance: float = 0.0
    decoder: str = ""
    default_positions: DefaultPositions = "unknown"
    max_rows: int | None = None
    implementation: str | None = None
    caches: bool = False
    caches_in_training: bool = True
    keeps_last_columns: bool = False
