"""The JSON files of `paper_figures/measured/`: one a device, read with clear errors and written in one step.

A file holds `environment` (where and of which commit), `bars` (`Bar.row()`), and, where the figures were measured,
`series` (the points of the figures) and `roofline` (the calibration of the machine's model).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixmlp.verify.environment import device_slug
from radixmlp.verify.report import finite

if TYPE_CHECKING:
    from radixmlp.verify.bars import Bar

HOUSE_DEVICE = "amd-epyc-2-cores"  # the machine whose numbers the READMEs show
EXTRAS = ("series", "roofline")  # what only `radixmlp figures --measure` measures
MACHINE = (
    "device",
    "threads",
    "omp_wait_policy",
    "radixmlp",
    "torch",
    "triton",
    "transformers",
    "numpy",
    "python",
)


class MeasuredFileError(ValueError):
    """A file of measurements cannot be read as one; the message says why and what to do."""


def measured_file(root: Path, device: str) -> Path:
    """Where the measurements of a device lie in a checkout; `device` is its name or the name's slug."""
    return root / "paper_figures" / "measured" / f"{device_slug(device)}.json"


def read_document(path: Path) -> dict[str, Any]:
    """A file of measurements.

    Raises:
        MeasuredFileError: there is none, or it is no JSON object with an `environment` that names a device and a
            list of `bars`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MeasuredFileError(
            f"{path}: no such file; `make bench` or `make reproduce-figures MEASURE=1` measures this machine"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise MeasuredFileError(f"{path}: cannot be read ({error})") from None
    return parse_document(text, str(path))


def parse_document(text: str, source: str) -> dict[str, Any]:
    """The text of a file of measurements; `source` is its name in messages. Raises as `read_document` does."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise MeasuredFileError(
            f"{source}, line {error.lineno}: not JSON ({error.msg}); measurements are not edited by hand: restore "
            "the committed file or measure again"
        ) from None
    reason = _wrong_form(document)
    if reason is not None:
        raise MeasuredFileError(f"{source}: {reason}; restore the committed file or measure again")
    return dict(document)


def is_gpu(environment: dict[str, Any]) -> bool:
    """Whether a file's environment is that of a GPU: only theirs names a CUDA capability."""
    return environment.get("capability") is not None


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What makes numbers of two environments incomparable: the device, its threads, or a version."""
    return [key for key in MACHINE if old.get(key) != new.get(key)]


def whole_document(path: Path | None, bars: Sequence[Bar], where: dict[str, Any]) -> dict[str, Any]:
    """All bars measured anew; the figures' series stay if the file there is of the same machine and versions."""
    document = {"environment": where, "bars": [bar.row() for bar in bars]}
    old = _readable(path)
    if old is not None and not differences(old["environment"], where):
        document |= {key: old[key] for key in EXTRAS if key in old}
    return document


def replace_groups(
    path: Path | None, names: Sequence[str], bars: Sequence[Bar], where: dict[str, Any]
) -> str:
    """Put some groups' bars, with their commit, in place of the old ones in a device's file; says what it did."""
    document = _readable(path)
    if path is None or document is None:
        return "Not written: this is a part of the bars (--out FILE keeps it)."
    differs = differences(document["environment"], where)
    if where.get("dirty") or differs or any(bar.broken for bar in bars):
        return (
            f"Not written to {path.name}: the tree is not clean, a group did not run, or it was made elsewhere "
            f"({', '.join(differs)} differ)."
        )
    kept = [row for row in document["bars"] if row["name"].split(":")[0] not in names]
    document["bars"] = kept + [bar.row() | {"commit": where["commit"]} for bar in bars]
    write_atomically(path, finite(document))
    return f"Replaced in {path}: {', '.join(names)}"


def write_atomically(path: Path, document: Any) -> None:
    """Write JSON beside its place and move it there: the old file stays until the new one is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, allow_nan=False, default=str) + "\n"
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _readable(path: Path | None) -> dict[str, Any] | None:
    """The document at `path`; None where there is none that can be read."""
    if path is None:
        return None
    try:
        return read_document(path)
    except MeasuredFileError:
        return None


def _wrong_form(document: Any) -> str | None:
    if not isinstance(document, dict):
        return f"holds a {type(document).__name__}, not an object with `environment` and `bars`"
    environment = document.get("environment")
    if not isinstance(environment, dict) or not isinstance(environment.get("device"), str):
        return "has no `environment` that names its device"
    if not isinstance(document.get("bars"), list):
        return "has no list of `bars`"
    for place, point in enumerate(document.get("series", [])):
        missing = [key for key in ("figure", "series", "x", "y", "unit") if key not in point]
        if missing:
            return f"point {place} of `series` has no {', '.join(missing)}"
    return None
