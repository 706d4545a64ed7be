"""What a job asks of the engine: how a request becomes units of work, and units' numbers become a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from radixmlp.optimized.jobs.requests import Kind, Request

Texts = tuple[str, ...]
# Takes a finished batch: the indices of its units, and their numbers [n, width] or [n].
Keep = Callable[[Sequence[int], Tensor], None]


@dataclass(frozen=True)
class Task:
    """One command's work.

    Args:
        name: of the command.
        kind: of request it takes.
        units: a request's units: strings for the engine, one tuple a unit.
        run: (engine, units, keep): computes units, and hands over each batch as soon as it is there.
        row: (request, [units, width] float32) -> the fields of its output row, beside `line` and `id`.
        columns: the names of these fields.
        numbers: what of it an .npy file holds for a request ([width]), None where a request has no fixed shape.
    """

    name: str
    kind: Kind
    units: Callable[[Request], list[Texts]]
    run: Callable[[Any, Sequence[Texts], Keep], None]
    row: Callable[[Request, np.ndarray], dict[str, Any]]
    columns: tuple[str, ...]
    numbers: Callable[[np.ndarray], np.ndarray] | None


def embed_task(prompt: str | None = None, pooling: str = "last", normalize: bool = True) -> Task:
    """`{"text"}` -> `{"embedding": [hidden]}`; options as `Engine.embed` takes them."""

    def run(engine: Any, units: Sequence[Texts], keep: Keep) -> None:
        texts = [text for (text,) in units]
        engine.embed(texts, prompt, pooling, normalize, on_batch=keep)

    return Task(
        "embed",
        "text",
        lambda request: [(request.fields["text"],)],
        run,
        lambda _request, values: {"embedding": values[0].tolist()},
        ("embedding",),
        lambda values: values[0],
    )


def rerank_task(instruction: str | None = None) -> Task:
    """`{"query", "passages"}` -> `{"scores": [passages], "ranking": passages, best first}`."""

    def run(engine: Any, units: Sequence[Texts], keep: Keep) -> None:
        queries, documents = [u[0] for u in units], [u[1] for u in units]
        engine.rerank_pairs(queries, documents, instruction, on_batch=keep)

    def row(request: Request, values: np.ndarray) -> dict[str, Any]:
        passages = request.fields["passages"]
        scores = values[:, 0]
        # Equal scores keep the order they came in.
        order = np.argsort(-scores, kind="stable").tolist()
        names = [i if passages[i].id is None else passages[i].id for i in order]
        return {"scores": scores.tolist(), "ranking": names}

    def units(request: Request) -> list[Texts]:
        return [(request.fields["query"], passage.text) for passage in request.fields["passages"]]

    return Task("rerank", "pair", units, run, row, ("scores", "ranking"), None)


def score_task() -> Task:
    """`{"prompt", "continuation"}` -> `{"logprob", "num_tokens"}` of the continuation."""

    def run(engine: Any, units: Sequence[Texts], keep: Keep) -> None:
        engine.score([u[0] for u in units], [u[1] for u in units], on_batch=keep)

    return Task(
        "score",
        "continuation",
        lambda request: [(request.fields["prompt"], request.fields["continuation"])],
        run,
        lambda _request, values: {"logprob": float(values[0, 0]), "num_tokens": int(values[0, 1])},
        ("logprob", "num_tokens"),
        lambda values: values[0, :1],
    )
