"""The result as numbers: quantiles, and the document that `--json` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from radixmlp.verify.inspect.excerpts import first_branch, segment_text
from radixmlp.verify.inspect.inspection import Inspection, Line
from radixmlp.verify.inspect.predictions import MEMORY_FORMULA, Prediction
from radixmlp.verify.inspect.survey import BatchSum
from radixmlp.verify.inspect.tokenizing import TextTokenizer
from radixmlp.verify.inspect.verdict import advice, is_worth_it, verdict

POOLS_NOTE = (
    "Divided into batches some million tokens at a time: what further parts of the file share is not counted."
)
QUANTILES = (0.0, 0.2, 0.5, 0.8, 1.0)


def quantiles(values: Sequence[float], at: Sequence[float] = QUANTILES) -> list[float]:
    """Values of the sorted sample at these shares of it (the lower one between two); nothing for none."""
    ordered = sorted(values)
    return [ordered[math.floor(share * (len(ordered) - 1))] for share in at] if ordered else []


def document(
    source: str, found: Inspection, predictions: Sequence[Prediction], tokenizer: TextTokenizer
) -> dict[str, Any]:
    """Everything that was found, as JSON-able values.

    Texts appear only as short excerpts of what sequences share and where they part.
    """
    total, options = found.survey.total, found.options
    return {
        "source": source,
        "tokenizer": found.tokenizer,
        "options": {
            "max_batch_tokens": options.max_batch_tokens,
            "threshold": options.threshold,
            "order": options.policy,
        },
        "requests": found.requests,
        "sequences": found.sequences,
        "bad_lines": found.bad_lines,
        "first_bad_lines": [bad._asdict() for bad in found.bad],
        "too_long": found.too_long,
        "empty": found.empty,
        "doubled_bos": found.doubled_bos,
        "total": _sums(total),
        "template": _line(found.main),
        "swapped": None if found.swapped is None else _line(found.swapped),
        "predicted": [asdict(one) for one in predictions],
        "memory_formula": MEMORY_FORMULA,
        "first_divergence": _divergence(found, tokenizer),
        "causes": None if found.head.causes is None else asdict(found.head.causes),
        "head": {"sequences": len(found.head.texts), "complete": found.head.complete},
        "note": POOLS_NOTE if found.survey.pools > 1 else None,
        "worth_it": is_worth_it(found),
        "verdict": verdict(found, predictions),
        "advice": advice(found),
    }


def _line(line: Line) -> dict[str, Any]:
    return {
        "name": line.template,
        "all_in_one_batch": None if line.whole is None else _sums(line.whole),
        **{
            policy: {
                "batches": len(survey.batches),
                "pools": survey.pools,
                **_sums(survey.total),
                "r_of_batches": dict(
                    zip(map(str, QUANTILES), quantiles([b.ratio for b in survey.batches]), strict=False)
                ),
            }
            for policy, survey in line.surveys.items()
        },
    }


def _sums(total: BatchSum) -> dict[str, Any]:
    return {"tokens": total.tokens, "rows": total.rows, "gamma": total.gamma, "r": total.ratio}


def _divergence(found: Inspection, tokenizer: TextTokenizer) -> dict[str, Any] | None:
    tree = found.head.tree
    if tree is None or not tree.num_segments:
        return None
    shared, ways = first_branch(tree)
    largest = sorted(ways, key=lambda way: -int(tree.sequences[way]))[:4]
    return {
        "tokens": 0 if shared is None else int(tree.rows[shared]),
        "text": "" if shared is None else segment_text(tree, shared, tokenizer),
        "ways": len(ways),
        "largest": [
            {"sequences": int(tree.sequences[way]), "text": segment_text(tree, way, tokenizer)}
            for way in largest
        ],
    }
