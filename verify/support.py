"""`radixmlp models`: every causal model type of transformers, and whether it runs on the trie."""

from __future__ import annotations

import argparse
import copy
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

import radixmlp
from radixmlp.verify import rules, support_page
from radixmlp.verify.environment import find_checkout
from radixmlp.verify.families import CannotBuild, causal_types, small_model
from radixmlp.verify.planted import FAULTS, planted
from radixmlp.verify.support_cases import Case, cases, truths

Outcome = Literal["verified", "refused", "not built", "WRONG"]
TABLE = Path("verify") / "model_support.md"
_LONGEST_REASON = 240


@dataclass(frozen=True)
class Support:
    """What became of one model type.

    Args:
        model_type: as in transformers' causal mapping.
        class_name: the model class; empty where it was not built.
        outcome: "verified": `enable` takes it, its calls equal the truth and a wrong mask shows; "refused": `enable`
            raised `UnsupportedModelError`; "not built"; "WRONG": `enable` takes it and one of the rest fails.
        reason: one line; for a verified type what is not as fast as it could be, or nothing.
        details: errors relative to max|truth| by call, the errors that planted faults make, and gamma.
    """

    model_type: str
    class_name: str
    outcome: Outcome
    reason: str
    details: dict[str, float] = field(default_factory=dict)


class _UnprovenError(Exception):
    """Why an enabled model is not verified."""


def support_table(
    types: Iterable[str] | None = None, each: Callable[[Support], None] = lambda _: None
) -> list[Support]:
    """Judge model types (default: all of them) as small random models in fp32 on the CPU.

    Args:
        each: called with every result as it comes.
    """
    results = []
    with _quiet():
        for model_type in causal_types() if types is None else types:
            results.append(judge(model_type))
            each(results[-1])
    return results


def judge(model_type: str, **changes: Any) -> Support:
    """Build one type, enable it, compare its calls with the truth, and plant faults that have to show.

    Args:
        changes: further arguments of its config.
    """
    try:
        model = small_model(model_type, **changes)
    except CannotBuild as error:
        return Support(model_type, "", "not built", _one_line(error, model_type))
    name, own = type(model).__name__, copy.deepcopy(model)
    details: dict[str, float] = {}
    try:
        radixmlp.enable(model, threshold=1.0)
        reason = _prove(model, own, details)
    except (radixmlp.UnsupportedModelError, radixmlp.UnsupportedAttentionError) as error:
        return Support(model_type, name, "WRONG" if details else "refused", _one_line(error, name), details)
    except _UnprovenError as error:
        return Support(model_type, name, "WRONG", str(error), details)
    except Exception as error:
        return Support(model_type, name, "WRONG", f"{type(error).__name__}: {_one_line(error)}", details)
    return Support(model_type, name, "verified", reason, details)


def _prove(model: Any, own: Any, details: dict[str, float]) -> str:
    """Fill `details`; returns a note on calls that the model's own forward served.

    Raises:
        _UnprovenError: a call is wrong, or did not run on the trie and had to, or a planted fault stays unseen.
    """
    calls = cases()
    expected = truths(own, calls)
    notes = []
    for call, truth in zip(calls, expected, strict=True):
        dense = _error(call.logits(own), truth)
        model.radixmlp_stats.reset()
        error = _error(call.logits(model), truth)
        details[call.name], details[f"dense, {call.name}"] = error, dense
        stats = model.radixmlp_stats
        if not error <= rules.FLOAT32:
            raise _UnprovenError(
                f"{call.name}: differs from the truth by {error:.1e} (allowed {rules.FLOAT32:.0e}, dense {dense:.1e})"
            )
        if not stats.compacted:
            reason = ", ".join(stats.dense)
            if call.compact:
                raise _UnprovenError(f"{call.name}: did not run on the trie: {reason}")
            notes.append(f"{call.name} run dense: {reason}")
        elif call is calls[0]:
            details["gamma"] = stats.gamma
    _plant(model, calls[0], expected[0], details)
    return "; ".join(notes)


def _plant(model: Any, call: Case, truth: Tensor, details: dict[str, float]) -> None:
    """The same call with another implementation of attention: right it has to pass, with each fault to fail."""
    with planted("none") as backends:
        right = _error(call.logits(model), truth)
    if not right <= rules.FLOAT32:
        raise _UnprovenError(f"explicit masks differ from the truth by {right:.1e}")
    windowed = any(backend.windowed for backend in backends)
    for fault in FAULTS:
        if fault == "window" and not windowed:
            continue
        with planted(fault):
            details[f"planted, {fault}"] = wrong = _error(call.logits(model), truth)
        if wrong <= rules.FLOAT32:
            raise _UnprovenError(
                f"a mask one too wide ({fault}) does not show: it moves the result by {wrong:.1e}"
            )


def _error(got: Tensor, truth: Tensor) -> float:
    return rules.errors_against(got, truth).largest


def _one_line(error: Exception, *prefixes: str) -> str:
    """The first sentence, without the names that stand in other columns."""
    text = " ".join(str(error).split())
    for prefix in prefixes:
        text = text.removeprefix(f"{prefix}: ").removeprefix(f"{prefix} ")
    text = re.split(r"\. (?=[A-Z])", text)[0].rstrip(".")
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' advice on configs that nobody will use."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def main(argv: Sequence[str] | None = None) -> int:
    """Judge every causal model type of transformers, and write the table of them.

    Returns:
        0, or 1 where a type is wrong or `--check` finds another outcome, 2 for a bad request.
    """
    arguments = _parse(argv)
    unknown = sorted(set(arguments.type) - set(causal_types()))
    if unknown:
        print(f"transformers has no causal model type {', '.join(unknown)}", file=sys.stderr)
        return 2
    table = arguments.out or _committed_table()
    if table is None and (arguments.check or not arguments.type):
        print("This is no checkout: say where the table is with --out FILE.", file=sys.stderr)
        return 2
    results = support_table(arguments.type or None, each=_show)
    counts = Counter(result.outcome for result in results)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in counts))
    status = 1 if counts["WRONG"] else 0
    if arguments.check:
        assert table is not None
        differences = support_page.differences(table, results, whole=not arguments.type)
        print("\n".join([f"{table} differs:", *differences]) if differences else f"as in {table}")
        return 1 if differences else status
    if arguments.type and arguments.out is None:
        return status
    assert table is not None
    table.write_text(support_page.render(results), encoding="utf-8")
    print(f"Written to {table}")
    return status


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="radixmlp models", description=(main.__doc__ or "").strip().splitlines()[0]
    )
    parser.add_argument("--type", action="append", default=[], metavar="NAME", help="one type (repeatable)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the table (default: {TABLE} of a checkout)"
    )
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    return parser.parse_args(argv)


def _committed_table() -> Path | None:
    root = find_checkout()
    return None if root is None else root / TABLE


def _show(result: Support) -> None:
    print(
        f"{result.outcome:>9}  {result.model_type}" + (f": {result.reason}" if result.reason else ""),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
