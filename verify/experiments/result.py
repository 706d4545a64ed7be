"""What a run leaves: `result.json` with every number, `result.md` for people, and one verdict line a backend."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from radixmlp.verify.experiments.faults import FAULTS, Outcome
from radixmlp.verify.experiments.timing import RIVALS
from radixmlp.verify.experiments.trial import Trial
from radixmlp.verify.records import Record
from radixmlp.verify.report import finite, number

_PLACE = ("sequence", "offset", "row", "column", "got", "expected")
_VERSIONS = ("torch", "triton", "transformers")


def document_of(
    name: str,
    question: str,
    quick: bool,
    environment: dict[str, Any],
    trial: Trial | None,
    measured: dict[str, Any] | None,
) -> dict[str, Any]:
    """The whole result, JSON-able.

    Raises:
        ValueError: `measure()` returned something JSON cannot hold; the message names it.
    """
    document: dict[str, Any] = {
        "experiment": name,
        "question": question,
        "quick": quick,
        "environment": environment,
    }
    if trial is not None:
        document["verdicts"] = {backend: verdict_line(trial, backend) for backend in trial.backends}
        document["trial"] = _trial_document(trial)
    if measured is not None:
        document["measured"] = measured
    document = finite(document)
    try:
        json.dumps(document)
    except TypeError as error:
        remedy = "return numbers, strings, lists and dicts"
        raise ValueError(f"what measure() returned is not JSON: {error}; {remedy}") from error
    return document


def write_result(folder: Path, document: dict[str, Any], trial: Trial | None, report: str) -> list[Path]:
    """Write result.json and result.md into `folder` (created where it is missing); the files written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        folder / "result.json": json.dumps(document, indent=1) + "\n",
        folder / "result.md": markdown(document, trial, report),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def verdict_line(trial: Trial, name: str) -> str:
    """One sentence on one backend: what the harness found."""
    if not trial.serves(name):
        return f"not run here: {trial.refused[name]['plain causal attention']}"
    red = trial.red(name)
    if red:
        return f"parity RED: {len(red)} of {trial.judged(name)} checks failed"
    planted = [outcome for outcome in trial.faults if outcome.attention == name and not outcome.remark]
    missed = [outcome for outcome in planted if not outcome.caught]
    if missed:
        return f"faults MISSED: {missed[0].fault} ({missed[0].where}) left parity green"
    text = (
        f"parity green ({trial.judged(name)} checks), {len(planted)} of {len(planted)} planted faults caught"
    )
    for row in trial.speed:
        if row["variant"] == name:
            over = row["over trie-sdpa"]
            text += (
                f"; {number(over['median'])}x trie-sdpa ({number(over['q20'])}–{number(over['q80'])}), "
                f"{number(row['over dense']['median'])}x dense on {row['workload']}"
            )
    peaks = {row["variant"]: row["peak_mb"] for row in trial.memory}
    if name in peaks:
        text += f"; peak memory {number(peaks[name] / peaks['trie-sdpa'])} of trie-sdpa's"
    return text


def markdown(document: dict[str, Any], trial: Trial | None, report: str) -> str:
    """The text of result.md."""
    environment = document["environment"]
    commit = str(environment.get("commit") or "no commit")[:10] + ("+" if environment.get("dirty") else "")
    versions = ", ".join(f"{key} {environment.get(key)}" for key in _VERSIONS if environment.get(key))
    kind = "a quick run, no evidence" if document["quick"] else "the whole run"
    lines = [
        f"# {document['experiment']}: result",
        "",
        document["question"],
        "",
        f"On {environment['device']} ({environment['threads']} threads), {versions}, commit `{commit}`; {kind}. "
        f"Written by `radixmlp experiment run {document['experiment']}`.",
        "",
    ]
    if trial is not None:
        lines += [f"- `{name}`: {line}." for name, line in document["verdicts"].items()]
        lines += ["", *_parity_section(trial), *_fault_section(trial)]
        lines += [*_speed_section(trial), *_memory_section(trial)]
    if report:
        lines += [report.strip(), ""]
    return "\n".join(lines)


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table and the empty line after it; numbers with four significant digits."""
    cells = [[number(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    rule = ["---"] * len(headings)
    return [f"| {' | '.join(row)} |" for row in [list(headings), rule, *cells]] + [""]


def _trial_document(trial: Trial) -> dict[str, Any]:
    return {
        "passed": trial.passed,
        "refused": trial.refused,
        "parity": {name: _parity_document(trial, name) for name in trial.backends},
        "faults": [{**asdict(outcome), "caught": outcome.caught} for outcome in trial.faults],
        "speed": trial.speed,
        "memory": trial.memory,
    }


def _parity_document(trial: Trial, name: str) -> dict[str, Any]:
    closest = _closest(trial, name)
    return {
        "judged": trial.judged(name),
        "failed": [asdict(record) for record in trial.red(name)],
        "closest": None if closest is None else asdict(closest),
    }


def _closest(trial: Trial, name: str) -> Record | None:
    """The judged record with the largest share of its limit."""
    judged = [record for record in trial.parity if record.attention == name and record.limit]
    return max(judged, key=lambda record: record.value / (record.limit or 1.0), default=None)


def _parity_section(trial: Trial) -> list[str]:
    rows = []
    for name in trial.backends:
        closest = _closest(trial, name)
        near = (
            ""
            if closest is None or not closest.limit
            else (
                f"{number(closest.value / closest.limit)} of it: {closest.metric}, {closest.model}, "
                f"{closest.workload}, {closest.dtype}"
            )
        )
        refused = "; ".join(f"{what}: {why}" for what, why in trial.refused.get(name, {}).items())
        rows.append([f"`{name}`", trial.judged(name), len(trial.red(name)), near, refused or "nothing"])
    return [
        "## Parity",
        "",
        "Against the model's own forward in fp64, each sequence alone, by the limits of `verify/rules.py`.",
        "",
        *table(["backend", "judged", "failed", "closest to its limit", "refused"], rows),
    ]


def _fault_section(trial: Trial) -> list[str]:
    """One row a fault, one column a backend: by how much parity was over its limit, case by case."""
    if not trial.faults:
        return []
    names = list(dict.fromkeys(outcome.attention for outcome in trial.faults))
    rows = [
        [
            f"{fault}: {what}",
            *(", ".join(map(_caught, trial.planted(name, fault))) for name in names),
        ]
        for fault, what in FAULTS.items()
    ]
    return [
        "## Planted faults",
        "",
        "Each must turn parity red for the backend it is planted in. How many times its limit the error became (on a "
        "tree in float32, then in bfloat16; windows in float32, gradients in float64).",
        "",
        *table(["fault", *(f"`{name}`" for name in names)], rows),
    ]


def _caught(outcome: Outcome) -> str:
    if outcome.remark:
        return outcome.remark
    if not outcome.caught_by:
        return f"**missed** ({outcome.where})"
    return outcome.caught_by if outcome.over_limit is None else f"{outcome.over_limit:,.0f}"


def _speed_section(trial: Trial) -> list[str]:
    if not trial.speed:
        return []
    lines = [
        "## Speed",
        "",
        "Plan, backbone and last-token logits; variants interleaved, median of paired ratios (20–80%). `ideal` is "
        "the FLOP ratio over dense of the path.",
        "",
    ]
    for model, workload, dtype in dict.fromkeys((r["model"], r["workload"], r["dtype"]) for r in trial.speed):
        group = [r for r in trial.speed if (r["model"], r["workload"]) == (model, workload)]
        lines += [
            f"{model}, {workload}, {dtype}, r = {number(group[0]['r'])}, {group[0]['rounds']} rounds:",
            "",
        ]
        rows = [
            [
                f"`{r['variant']}`",
                r["seconds"],
                *(_spread(r[f"over {x}"]) for x in ("dense", *RIVALS)),
                r["ideal"],
            ]
            for r in group
        ]
        lines += table(["variant", "seconds", "over dense", *(f"over {x}" for x in RIVALS), "ideal"], rows)
    return lines


def _memory_section(trial: Trial) -> list[str]:
    if not trial.memory:
        return []
    first = trial.memory[0]
    rows = [[f"`{row['variant']}`", row["peak_mb"], row["over_dense"]] for row in trial.memory]
    return [
        "## Memory",
        "",
        f"Peak of one pass above the weights, a fresh process each: {first['model']}, {first['workload']}, "
        f"{first['dtype']}.",
        "",
        *table(["variant", "peak MB", "over the leaner dense"], rows),
    ]


def _spread(ratio: dict[str, float]) -> str:
    return f"{number(ratio['median'])} ({number(ratio['q20'])}–{number(ratio['q80'])})"


def record_line(record: Record) -> str:
    """A failed check: by how much, on what, and at which row."""
    reason = record.details.get("error")
    what = f"{record.metric} {number(record.value)} (limit {number(record.limit)})"
    known = [f"{key} {number(record.details[key])}" for key in _PLACE if key in record.details]
    place = f"; worst at {', '.join(known)}" if known else ""
    return f"{reason or what} on {record.model}, {record.workload}, {record.dtype}{place}"
