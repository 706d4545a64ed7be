"""Examples for one task: a long instruction, a passage, the question it answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from radixmlp.verify.passages import RankedPassages
from radixmlp.verify.prompts import chatml

INSTRUCTION = (
    "You write the question that a passage answers. Read the passage to its end before you start. Ask about the "
    "passage as a whole, not about one detail of it. Use plain words and no more than twelve of them. Do not use "
    "names that the passage does not use. Do not answer the question, do not comment on the passage, do not greet "
    "and do not explain what you did. Write one line, in lower case, without a question mark. If a passage answers "
    "several questions, choose the one that a person without knowledge of the subject would ask first. If it gives "
    "a rule and its reason, ask for the reason. These are passages with the questions that others wrote for them."
)


@dataclass(frozen=True)
class Settings:
    """Sizes of a run.

    Args:
        shots: passages with their questions at the end of the instruction.
        batch: examples a step.
        steps: AdamW updates of each of the two models.
    """

    shots: int = 6
    batch: int = 8
    steps: int = 20
    learning_rate: float = 1e-5
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """Token ids: what is given, and what is to be learnt."""

    prompt: list[int]
    answer: list[int]


def texts(settings: Settings, data: list[RankedPassages]) -> list[tuple[str, str]]:
    """(prompt, answer) of every passage that is not one of the instruction's examples, in a random order."""
    pairs = [(passage, entry.query) for entry in data for passage in entry.passages]
    random.Random(settings.seed).shuffle(pairs)
    shots, rest = pairs[: settings.shots], pairs[settings.shots :]
    examples = "".join(f"\n\nPassage: {passage}\nQuestion: {question}" for passage, question in shots)
    return [
        (chatml(INSTRUCTION + examples, f"Passage: {passage}"), f"{question}<|im_end|>")
        for passage, question in rest
    ]


def batches_of(examples: list[Example], settings: Settings) -> list[list[Example]]:
    """`steps` lists of `batch` examples, from the first again when they run out."""
    places = range(settings.steps * settings.batch)
    drawn = [examples[place % len(examples)] for place in places]
    return [drawn[a : a + settings.batch] for a in range(0, len(drawn), settings.batch)]
