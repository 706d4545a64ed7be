"""How long a forward pass or a training step should take: FLOPs, bytes and kernel launches on a described device.

Every number from here is a prediction, and is to be labelled so. ROOFLINE.md has the formulas, the assumptions
and how well they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from radixmlp.verify.ideal import DecoderShape

from .roofline_cpu import Cpu, cpu_device
from .roofline_cpu_layer import cpu_parts
from .roofline_gpu import DEVICES, Gpu
from .roofline_gpu_layer import gpu_parts
from .roofline_work import Attended, Work

__all__ = [
    "DEVICES",
    "Attended",
    "Cpu",
    "Device",
    "Gpu",
    "Path",
    "Prediction",
    "Work",
    "cpu_device",
    "predict",
    "predicted_speedup",
]

Path = Literal["dense", "scatter", "trie"]
Device = Gpu | Cpu


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one pass.

    Args:
        device, path: what was asked for.
        seconds: of the whole pass, all layers.
        parts: seconds by what they are spent on; they add up to `seconds`.
    """

    device: str
    path: Path
    seconds: float
    parts: dict[str, float]


def predict(
    device: Device, shape: DecoderShape, work: Work, path: Path, *, training: bool = False
) -> Prediction:
    """Predict one prefill (backbone, and the head on `work.logits_rows`), or one training step.

    Args:
        device: one of `DEVICES`, or `cpu_device(...)`.
        shape: the decoder; as many layers as `layer_windows` has entries.
        work: the batch.
        path: "dense", "scatter" (the paper's) or "trie".
        training: forward and backward of all weights, the head on `work.targets` rows, without the optimiser.

    Raises:
        ValueError: an unknown path, or a layer whose sliding window is shorter than the longest sequence.
    """
    if path not in ("dense", "scatter", "trie"):
        raise ValueError(f"unknown path {path!r}: choose dense, scatter or trie")
    for layer, window in enumerate(shape.layer_windows):
        if window is not None and window < work.longest:
            raise ValueError(
                f"layer {layer} sees {window} tokens and the longest sequence has {work.longest}: the roofline "
                "counts full causal attention only"
            )
    if isinstance(device, Gpu):
        parts = gpu_parts(device, shape, work, path, training)
    else:
        parts = cpu_parts(device, shape, work, path, training)
    return Prediction(device.name, path, sum(parts.values()), parts)


def predicted_speedup(
    device: Device, shape: DecoderShape, work: Work, path: Path, *, training: bool = False
) -> float:
    """Predicted seconds of dense over those of `path`."""
    dense = predict(device, shape, work, "dense", training=training)
    return dense.seconds / predict(device, shape, work, path, training=training).seconds
