"""Few-shot prompts, and the tokens that stand for labels behind them."""

from __future__ import annotations

from collections.abc import Sequence

from radixmlp.optimized.engine.piles import check_text, check_texts
from radixmlp.optimized.engine.tokens import Tokens

_ENDS_AT_ONCE = 1024


def check_labels(labels: Sequence[str]) -> list[str]:
    """`labels` if they are different, non-empty strings.

    Raises:
        TypeError, ValueError: names the label.
    """
    found = check_texts("labels", labels)
    if not found:
        raise ValueError("labels is empty: give at least one")
    for index, label in enumerate(found):
        if not label.strip():
            raise ValueError(f"labels[{index}] is {label!r}: expected text")
        if label in found[:index]:
            raise ValueError(f"labels[{index}] is {label!r} again: give each label once")
    return found


def check_examples(examples: Sequence[tuple[str, str]], labels: Sequence[str]) -> list[tuple[str, str]]:
    """`examples` if each is a text with one of the labels.

    Raises:
        TypeError, ValueError: names the example.
    """
    for index, example in enumerate(examples):
        if isinstance(example, str) or len(example) != 2:
            raise TypeError(f"examples[{index}] is {example!r}: expected (text, label)")
        check_text(f"the text of examples[{index}]", example[0])
        if example[1] not in labels:
            raise ValueError(
                f"examples[{index}] has the label {example[1]!r}: expected one of {', '.join(map(repr, labels))}"
            )
    return [(text, label) for text, label in examples]


def label_tokens(tokens: Tokens, labels: Sequence[str], prompt: str, separator: str) -> list[list[int]]:
    """The ids of separator + label behind `prompt`.

    Raises:
        ValueError: a label is joined to the prompt's last token, has no tokens, or its tokens are the beginning of
            another's (or all of them): its probability would contain the other's.
    """
    before = tokens.encode([prompt])[0]
    found = []
    for label, whole in zip(
        labels, tokens.encode([prompt + separator + label for label in labels]), strict=True
    ):
        if whole[: len(before)] != before:
            raise ValueError(
                f"label {label!r} is tokenised together with the end of the prompt ({prompt[-20:]!r}): end the "
                "template where a word ends, or give another separator"
            )
        if len(whole) == len(before):
            raise ValueError(f"label {label!r} has no tokens of its own: give it other text")
        found.append(whole[len(before) :])
    for label, ids in zip(labels, found, strict=True):
        for other, longer in zip(labels, found, strict=True):
            if label != other and longer[: len(ids)] == ids:
                how = "the same tokens as" if longer == ids else "tokens that begin those of"
                raise ValueError(
                    f"label {label!r} has {how} label {other!r}: its probability would contain the other's; "
                    "rename one"
                )
    return found


def check_borders(
    tokens: Tokens, labels: Sequence[str], behind: Sequence[list[int]], ends: Sequence[str], separator: str
) -> None:
    """Hold that every label is tokenised behind each of `ends` as it is behind the first prompt.

    Raises:
        ValueError: names the label and the end.
    """
    for start in range(0, len(ends), _ENDS_AT_ONCE):
        some = ends[start : start + _ENDS_AT_ONCE]
        alone = tokens.encode(some)
        for label, ids in zip(labels, behind, strict=True):
            joined = tokens.encode([end + separator + label for end in some])
            for end, before, whole in zip(some, alone, joined, strict=True):
                if whole != before + ids:
                    raise ValueError(
                        f"label {label!r} is tokenised otherwise behind {end[-20:]!r}: end the template where a word "
                        "ends, or give another separator"
                    )


def answer_token(tokens: Tokens, label: str | int, vocabulary: int) -> int:
    """The one token that `label` is.

    Raises:
        ValueError: it is none, or several, or none of the model's.
    """
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise TypeError(f"label is {label!r}: expected a string of one token, or a token id")
    if isinstance(label, int):
        if not 0 <= label < vocabulary:
            raise ValueError(f"label is {label}, but the model has {vocabulary} tokens")
        return label
    ids = tokens.encode([label])[0]
    if len(ids) != 1:
        raise ValueError(f"label {label!r} is {len(ids)} tokens: give labels of one token each, or token ids")
    return ids[0]
