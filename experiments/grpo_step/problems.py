"""Sums that two steps solve, and their grades."""

from __future__ import annotations

import random
import re

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Greta", "Hugo")
THINGS = ("apples", "stamps", "shells", "pencils", "marbles", "cards", "buttons", "coins")


def problem(rng: random.Random) -> tuple[str, str, int]:
    """(question, working, answer): a sum that two steps solve."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    bags, each, more = rng.randint(2, 5), rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{name} has {bags} bags with {each} {thing} each and finds {more} more. How many {thing} are there?"
    )
    inside = bags * each
    working = f"{bags} bags of {each} are {bags} * {each} = {inside}. {inside} + {more} = {inside + more}."
    return question, f"{working} The answer is {inside + more}.", inside + more


def grade(text: str, answer: int) -> float:
    """1 for the right answer, 0.2 for a wrong one in the right form, else 0."""
    said = re.search(r"The answer is (-?\d+)", text)
    return 0.0 if said is None else 1.0 if int(said[1]) == answer else 0.2


def prompts(shots: int, questions: int, seed: int) -> list[tuple[str, int]]:
    """(prompt, answer) of each question, behind the same worked examples."""
    rng = random.Random(seed)
    worked = [problem(rng) for _ in range(shots)]
    asked = [problem(rng) for _ in range(questions)]
    examples = "".join(f"Q: {question}\nA: {working}\n\n" for question, working, _ in worked)
    return [(f"{examples}Q: {question}\nA:", answer) for question, _, answer in asked]
