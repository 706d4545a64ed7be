"""The tables of ROOFLINE.md, written from the model itself: `write_page` writes them anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radixmlp.verify.measured import is_gpu, read_document

from .roofline import DEVICES
from .roofline_check import WITHIN, Known, implied_ratios, measured_speedups, published_speedups
from .roofline_series import series_speedups

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "ROOFLINE.md"
BEGIN, END = "<!-- predicted:begin -->", "<!-- predicted:end -->"


def page(text: str, documents: Sequence[Mapping[str, Any]]) -> str:
    """`text` with what is between its markers written anew.

    Args:
        text: of ROOFLINE.md.
        documents: the measurements of `measured/`, in the order of their tables.
    """
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(documents)}\n{END}{rest.split(END)[1]}"


def committed_documents() -> list[dict[str, Any]]:
    """The documents of `measured/`, by name."""
    return [read_document(path) for path in sorted((FOLDER / "measured").glob("*.json"))]


def write_page() -> None:
    """Rewrite ROOFLINE.md from the committed measurements."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), committed_documents()), encoding="utf-8")


def tables(documents: Sequence[Mapping[str, Any]]) -> str:
    """Devices, published against predicted, and each CPU's measurements against predicted."""
    blocks = [_devices(), _published(), _implied()]
    for document in documents:
        device = document["environment"]["device"]
        known = measured_speedups(document)
        if known:
            calibrated = _calibration(document["roofline"])
            blocks.append(f"### Measured on {device}\n\n{calibrated}\n\n{_comparison('measured', known)}")
            blocks += _series(series_speedups(document))
        elif not is_gpu(document["environment"]):
            blocks.append(
                f"### Measured on {device}\n\nNot calibrated yet: `radixmlp figures --measure` does it."
            )
    return "\n\n".join(blocks)


def _devices() -> str:
    lines = [
        "### Devices",
        "",
        "| device | bf16 peak, TFLOP/s | products reach | attention reaches, forward / backward | memory, GB/s "
        "| reached | launch, µs | peaks from | attention's share from |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for device in DEVICES.values():
        shares = f"{device.attention_share:.0%} / {device.attention_backward_share:.0%}"
        lines.append(
            f"| {device.name} | {device.peak_flops / 1e12:.0f} | {device.matmul_share:.0%} | {shares} | "
            f"{device.peak_bandwidth / 1e9:.0f} | {device.bandwidth_share:.0%} | {device.launch * 1e6:.0f} | "
            f"{device.source} | {device.attention_source} |"
        )
    return "\n".join(lines)


def _published() -> str:
    known = published_speedups()
    return (
        f"### Published on an H100, the paper's path over dense\n\n{_comparison('published, up to', known)}"
    )


def _implied() -> str:
    lines = [
        "### MS MARCO on an H100: the r that the published speed-up needs",
        "",
        "| model | r, predicted |",
        "|---|---|",
    ]
    lines += [f"| {model} | {r:.2f} |" for model, r in implied_ratios().items()]
    return "\n".join(lines)


def _comparison(what: str, known: Sequence[Known]) -> str:
    lines = [f"| | {what} | predicted | predicted / {what.split(',')[0]} | |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {row.known:.2f} | {row.predicted:.2f} | {row.ratio:.2f} | {row.note} |"
        for row in known
    ]
    return "\n".join(lines)


def _series(known: Sequence[Known]) -> list[str]:
    """How many of the figures' points are predicted within 15%, and the others in full."""
    if not known:
        return []
    far = [row for row in known if not row.close]
    near = f"{len(known) - len(far)} are predicted within {WITHIN:.0%}"
    counted = f"Of {len(known)} measured points of the figures, {near}"
    if not far:
        return [f"{counted}."]
    return [f"{counted}; the others are:", _comparison("measured", far)]


def _calibration(roofline: Mapping[str, Any]) -> str:
    forward = roofline["dtypes"]["bfloat16"]["forward"]
    rate = forward["products"]["flops"] / 1e9
    fault = roofline["touch"] * 4096e6
    return (
        f"Calibrated with {roofline['threads']} threads: bf16 products {rate:.0f} GFLOP/s; a page of 4 KiB that is "
        f"fresh costs {fault:.2f} µs, and tensors of {roofline['fresh_bytes'] >> 20} MiB or more are fresh."
    )
