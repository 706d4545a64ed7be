"""Whether it is worth it, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from radixmlp.verify.inspect.inspection import Inspection
from radixmlp.verify.inspect.predictions import Prediction


def is_worth_it(found: Inspection) -> bool:
    """Whether any batch has a gamma that "auto" would compact."""
    threshold = found.options.threshold
    return any(batch.tokens and batch.gamma <= threshold for batch in found.survey.batches)


def verdict(found: Inspection, predictions: Sequence[Prediction]) -> str:
    """One plain sentence, judged by the threshold."""
    total, threshold = found.survey.total, found.options.threshold
    if not total.tokens:
        return "Nothing to judge: the requests have no tokens."
    compact = [batch for batch in found.survey.batches if batch.tokens and batch.gamma <= threshold]
    if not compact:
        return (
            f"Not worth it: gamma is {total.gamma:.2f} (r = {total.ratio:.2f}) and above the threshold of "
            f"{threshold:g} in every batch; all would run densely, and only the index is paid for."
        )
    gains = [prediction.trie for prediction in predictions]
    gain = (
        f"{min(gains):.2f}x"
        if f"{min(gains):.2f}" == f"{max(gains):.2f}"
        else f"{min(gains):.2f}x to {max(gains):.2f}x"
    )
    tokens, rows = sum(batch.tokens for batch in compact), sum(batch.rows for batch in compact)
    gamma, share = rows / tokens, tokens / total.tokens
    where = (
        "" if share > 0.995 else f" in batches that hold {share:.0%} of the tokens, the others run densely"
    )
    return (
        f"Worth it: {gamma:.0%} of the rows are left to compute (gamma {gamma:.2f}, threshold "
        f"{threshold:g}){where}; by FLOPs that is {gain}, predicted."
    )


def advice(found: Inspection) -> list[str]:
    """What to change, each in one sentence; empty where nothing is worth saying."""
    lines = []
    if found.doubled_bos:
        lines.append(
            f"{found.doubled_bos:,} of {_sequences(found.sequences)} begin with two beginning-of-sequence tokens "
            "(doubled BOS): the text holds one already and the tokenizer adds another; leave one out."
        )
    lines += _about_causes(found)
    lines += _about_order(found)
    duplicates = _duplicates(found)
    if duplicates:
        scope = "" if found.head.complete else f" of the first {len(found.head.texts):,}"
        lines.append(
            f"{_sequences(duplicates)}{scope}: {'copies' if duplicates > 1 else 'a copy'} of another, at no cost."
        )
    if found.empty:
        lines.append(f"{_sequences(found.empty)} without any token.")
    if found.too_long:
        lines.append(
            f"{_sequences(found.too_long)} longer than a batch of {found.options.max_batch_tokens:,} rows, left out "
            f"of all numbers (the first is from line {found.first_too_long}): raise --max-batch-tokens."
        )
    return lines


def _about_causes(found: Inspection) -> list[str]:
    causes = found.head.causes
    if causes is None:
        return []
    lines = []
    for cause in causes.found:
        verb = "differs" if cause.removable else "is written differently"
        what = cause.what[0].upper() + cause.what[1:]
        more = cause.places - 1
        places = f" and at {more:,} more place{'s' if more > 1 else ''}" if more else ""
        remedy = "move it behind what is the same" if cause.removable else "write it one way"
        lines.append(
            f"{what} {verb} after {cause.token:,} tokens{places} ({_sequences(cause.sequences)}), and the text "
            f"after it is the same again: {remedy}."
        )
    if causes.rows_without is not None and causes.tokens_without is not None and causes.rows_without:
        lines.append(
            f"Without what differs there, r would be {causes.tokens_without / causes.rows_without:.2f} instead of "
            f"{causes.tokens_now / causes.rows_now:.2f} (the sequences looked at as one batch)."
        )
    return lines


def _about_order(found: Inspection) -> list[str]:
    if found.swapped is None:
        return []
    now, other = found.survey.total, found.swapped.surveys[found.options.policy].total
    better = ": worth trying, if the model ranks as well that way." if other.rows < 0.98 * now.rows else "."
    return [
        f"The other order ({found.swapped.template}) would compute {other.rows:,} rows instead of {now.rows:,}, "
        f"r = {other.ratio:.2f} instead of {now.ratio:.2f}{better}"
    ]


def _sequences(count: int) -> str:
    return f"{count:,} sequence" + ("" if count == 1 else "s")


def _duplicates(found: Inspection) -> int:
    tree = found.head.tree
    return 0 if tree is None else int((tree.ending[tree.ending > 1] - 1).sum())
