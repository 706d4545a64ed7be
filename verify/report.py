"""The report of one run: `report.json` for machines, `report.md` for reviews, `report.html` for people."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from radixmlp.verify.environment import environment, find_checkout
from radixmlp.verify.plots import speed_plots
from radixmlp.verify.records import Record

__all__ = ["environment", "failures", "verdict", "write_report"]

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_KINDS = {
    "parity": "Parity: the same numbers as the truth",
    "compression": "Compression: the trie against a brute-force count",
    "speed": "Speed: over the fastest dense alternative",
    "memory": "Memory: peak above the weights, fresh process",
    "index": "Index: building the trie",
    "kernel": "Kernels",
}
_BAR_DEFAULTS = {
    "better": "higher",
    "quantiles": None,
    "ideal": None,
    "share_of_ideal": None,
    "shape": "",
    "wrong": None,
}
_AT_LEAST = ("speed", "index")  # kinds whose value must not fall below its limit


class Column(NamedTuple):
    """A detail that has a column of its own: its key in `Record.details`, its heading, how to print it."""

    key: str
    heading: str
    show: Callable[[Any], str]


class Table(NamedTuple):
    """One kind of check as text: headings, then (passed, cells) per record."""

    kind: str
    title: str
    headings: list[str]
    rows: list[tuple[str, list[str]]]


def failures(records: Sequence[Record]) -> list[Record]:
    """The records that turn a run red: not passed, or judged on a number that is none (NaN, infinity)."""
    return [r for r in records if not r.passed or (r.limit is not None and not math.isfinite(r.value))]


def verdict(records: Sequence[Record]) -> bool:
    """True only when something was judged and nothing failed."""
    return any(record.limit is not None for record in records) and not failures(records)


def write_report(
    out_dir: Path | str, environment: Mapping[str, Any], records: Sequence[Record]
) -> dict[str, Path]:
    """Write the three reports.

    Args:
        out_dir: created where it does not exist.
        environment: as `environment()` returns it.
        records: in the order they were measured.

    Returns:
        {"json", "md", "html"} -> the file written. `report.json` is {"environment": {...}, "records": [...]};
        numbers that JSON cannot hold (NaN, infinity) are null there.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"environment": dict(environment), "records": [asdict(record) for record in records]}
    context = _context(environment, records)
    texts = {
        "json": json.dumps(finite(document), indent=1, default=str) + "\n",
        "md": _render("report.md.j2", context, autoescape=False),
        "html": _render("report.html.j2", context, autoescape=True),
    }
    paths = {suffix: folder / f"report.{suffix}" for suffix in texts}
    for suffix, text in texts.items():
        paths[suffix].write_text(text, encoding="utf-8")
    return paths


def finite(value: Any) -> Any:
    """The same structure with every float that JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def number(value: Any) -> str:
    """A measured number with four significant digits, as a person writes it."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if value == 0 or not math.isfinite(value) or (isinstance(value, int) and abs(value) < 1e7):
        return f"{value}" if isinstance(value, int) else f"{value:g}"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.2e}"


def measured_bars(root: Path | None) -> list[dict[str, Any]]:
    """What `radixmlp bench` wrote in a checkout: one {"file", "environment", "bars", "error"} per machine.

    A file that cannot be read is shown with the reason; it does not cost the reader the rest of the report.
    """
    files = [] if root is None else sorted((root / "paper_figures" / "measured").glob("*.json"))
    found = []
    for file in files:
        entry: dict[str, Any] = {"file": file.name, "environment": {}, "bars": [], "error": None}
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if "bars" not in document:
                continue
            entry["environment"] = dict(document["environment"])
            entry["bars"] = [{**_BAR_DEFAULTS, **bar, "fill": _bar_fill(bar)} for bar in document["bars"]]
        except (ValueError, KeyError, TypeError) as error:
            entry["error"] = f"{type(error).__name__}: {error}"
        found.append(entry)
    return found


def _percent(value: Any) -> str:
    return "–" if value is None else f"{100 * value:.0f}%"


_COLUMNS: dict[str, list[Column]] = {
    "speed": [
        Column("q20", "20%", number),
        Column("q80", "80%", number),
        Column("ideal", "ideal (FLOPs)", number),
        Column("share_of_ideal", "of ideal", _percent),
        Column("r", "r", number),
        Column("tokens", "tokens", number),
        Column("fastest_dense", "fastest dense", number),
        Column("plan_share_of_forward", "plan / forward", _percent),
    ],
    "memory": [
        Column("peak_mb", "peak MB", number),
        Column("dense_peak_mb", "dense MB", number),
        Column("one_over_r", "1/r", number),
        Column("leanest_dense", "leanest dense", number),
    ],
    "index": [
        Column("q20", "20%", number),
        Column("q80", "80%", number),
        Column("fast_ms", "fast ms", number),
        Column("mtok_per_s", "Mtok/s", number),
        Column("tokens", "tokens", number),
    ],
}


def _context(environment: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    failed = failures(records)
    root = find_checkout()
    return {
        "environment": environment,
        "passed": verdict(records),
        "judged": sum(record.limit is not None for record in records),
        "reported": sum(record.limit is None for record in records),
        "failed": [_failure(record) for record in failed],
        "summary": _summary(records),
        "tables": [_table(kind, records) for kind in _KINDS if any(r.kind == kind for r in records)],
        "plots": [(plot.title, plot.caption, Markup(plot.svg)) for plot in speed_plots(records)],
        "measured": measured_bars(root),
    }


def _render(template: str, context: Mapping[str, Any], autoescape: bool) -> str:
    engine = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=autoescape,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    engine.filters["number"] = number
    engine.filters["percent"] = _percent
    engine.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return engine.get_template(template).render(context)


def _summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    rows = []
    for kind in _KINDS:
        group = [record for record in records if record.kind == kind]
        if group:
            judged = sum(record.limit is not None for record in group)
            counts = {"judged": judged, "failed": len(failures(group)), "reported": len(group) - judged}
            rows.append({"kind": kind, **counts})
    return rows


def _table(kind: str, records: Sequence[Record]) -> Table:
    group = [record for record in records if record.kind == kind]
    columns = _COLUMNS.get(kind, [])
    headings = ["verdict", "model", "workload", "attention", "dtype", "device", "metric", "value", "limit"]
    headings += [column.heading for column in columns] or ["details"]
    red = {id(record) for record in failures(group)}
    rows = []
    for record in sorted(group, key=lambda r: id(r) not in red):  # stable: failed first, else as measured
        cells = [record.model, record.workload, record.attention, record.dtype, record.device, record.metric]
        cells += [number(record.value), _limit(record)]
        cells += [column.show(record.details.get(column.key)) for column in columns] or [
            _details(record.details)
        ]
        rows.append((_verdict_word(record, id(record) in red), cells))
    return Table(kind, _KINDS[kind], headings, rows)


def _verdict_word(record: Record, failed: bool) -> str:
    if failed:
        return "failed"
    return "reported" if record.limit is None else "passed"


def _failure(record: Record) -> dict[str, str]:
    what = f"{record.kind}: {record.metric} of {record.attention}"
    where = f"{record.model}, {record.workload}, {record.dtype} on {record.device}"
    return {
        "what": what,
        "where": where,
        "value": number(record.value),
        "limit": _limit(record),
        "details": _details(record.details),
    }


def _limit(record: Record) -> str:
    if record.limit is None:
        return "–"
    sign = "≥" if record.kind in _AT_LEAST else "=" if record.kind == "compression" else "≤"
    return f"{sign} {number(record.limit)}"


def _details(details: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={number(value)}" for key, value in details.items() if value not in (None, ""))


def _bar_fill(bar: Mapping[str, Any]) -> float:
    """How far a bar is from its limit, 1.0 at the limit and larger where better, cut at 2 for drawing."""
    if bar["value"] is None or bar["limit"] is None:
        return 0.0
    higher = bar.get("better", "higher") == "higher"
    good, bad = (bar["value"], bar["limit"]) if higher else (bar["limit"], bar["value"])
    return min(2.0, good / bad) if bad else 2.0
