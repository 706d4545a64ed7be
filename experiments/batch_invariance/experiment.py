"""How far a request's result moves with the batch it is in, and what it costs that it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import radixmlp
from radixmlp.verify.bars import TRIE, wrong_outputs
from radixmlp.verify.models import load_model
from radixmlp.verify.timing import time_interleaved
from radixmlp.verify.variants import DENSE, DENSE_PADDED, DENSE_RAGGED, build_variants, pad_rows

from .compositions import ALONE, Composition, compositions
from .fixed import (
    FIXED_DENSE,
    FIXED_TRIE,
    deterministic_algorithms,
    padded_products,
    registered,
    tiled_products,
)

QUESTION = "how far does a request's result move with its batch, dense and on the trie, and what does fixing it cost?"

Mode = Callable[[nn.Module], AbstractContextManager[None]]
AS_IS, PADDED, TILED = "as is", "products padded", "products tiled"
MODES: dict[str, Mode] = {
    AS_IS: lambda _: nullcontext(),
    "deterministic algorithms": deterministic_algorithms,
    PADDED: padded_products,
    TILED: tiled_products,
}


@dataclass(frozen=True)
class Way:
    """An attention and a way to run the rest."""

    attention: str
    mode: str

    @property
    def name(self) -> str:
        return self.attention if self.mode == AS_IS else f"{self.attention}, {self.mode}"


WAYS = (
    *(Way(DENSE_PADDED, mode) for mode in MODES),
    *(Way(path, mode) for path in (DENSE_RAGGED, TRIE) for mode in MODES),
    *(Way(path, mode) for path in (FIXED_DENSE, FIXED_TRIE) for mode in (AS_IS, PADDED, TILED)),
)


@dataclass(frozen=True)
class Settings:
    """Sizes.

    Args:
        requests: (prefix, own) tokens of each request; costs are those of the first one's largest batch.
        many: sequences of the largest batch.
        rounds: timed calls of each way, interleaved.
    """

    model: str = "qwen3-0.6b-width:2"
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    requests: tuple[tuple[int, int], ...] = ((112, 40), (2, 1))
    many: int = 16
    rounds: int = 3


QUICK = Settings("tiny-qwen3", ("float32", "bfloat16"), ((70, 9), (2, 1)), 4, 1)


@dataclass(frozen=True)
class Moved:
    """Differences of a request's hidden states from those it has alone.

    Args:
        largest: absolute.
        relative: the largest, as a share of the largest value.
        equal: share of values equal bit by bit.
    """

    largest: float
    relative: float
    equal: float


def measure(quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Per dtype: how each request moves on every way and in every batch, then what the ways cost."""
    settings = QUICK if quick else Settings()
    found: dict[str, Any] = {}
    with registered():
        for dtype in settings.dtypes:
            loaded = load_model(settings.model, dtype)
            requests = [
                compositions(prefix, own, settings.many, loaded.vocab_size)
                for prefix, own in settings.requests
            ]
            largest = next(c for c in requests[0] if c.batch.num_sequences == settings.many)
            progress(f"{dtype}: values")
            _check(loaded.model, largest)
            say = partial(_say, progress, dtype)
            moved = [_movement(loaded.model, batches, say) for batches in requests]
            found[dtype] = {"moved": moved, "cost": _cost(loaded.model, largest, settings.rounds, say)}
    return {"settings": asdict(settings), "found": found}


def _movement(model: Any, batches: Sequence[Composition], progress: Callable[[str], None]) -> dict[str, Any]:
    """How one request moves, and whether the fixed trie has the fixed dense's values."""
    results = {way: results_of(model, way, batches, progress) for way in WAYS}
    return {
        "ways": {way.name: _moved(results[way]) for way in WAYS},
        "trie_is_dense": _trie_is_dense(results),
    }


def _say(progress: Callable[[str], None], dtype: str, what: str) -> None:
    progress(f"{dtype}: {what}")


def results_of(
    model: Any, way: Way, batches: Sequence[Composition], progress: Callable[[str], None]
) -> dict[str, Tensor]:
    """{composition: the request's last hidden states [L, hidden]}."""
    progress(way.name)
    with MODES[way.mode](model):
        return {composition.name: _hidden(model, composition, way.attention) for composition in batches}


@torch.no_grad()
def _hidden(model: Any, composition: Composition, attention: str) -> Tensor:
    batch = composition.batch
    if attention != DENSE_PADDED:
        out = radixmlp.forward(model, batch, attention=attention, logits_to_keep=1)
        return out.last_hidden_state[composition.rows]
    padded = pad_rows(batch)
    out = model.base_model(padded.input_ids, attention_mask=padded.attention_mask, use_cache=False)
    hidden: Tensor = out.last_hidden_state[composition.place, : int(padded.last[composition.place]) + 1]
    return hidden


def moved(got: Tensor, alone: Tensor) -> Moved:
    """Compare [L, hidden] with [L, hidden]."""
    difference = float((got.double() - alone.double()).abs().max())
    return Moved(
        difference, difference / float(alone.double().abs().max()), float((got == alone).double().mean())
    )


def _moved(results: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: asdict(moved(got, results[ALONE])) for name, got in results.items() if name != ALONE}


def _trie_is_dense(results: Mapping[Way, Mapping[str, Tensor]]) -> dict[str, float]:
    """Per mode: share of values, over all batches, that the fixed trie has as the fixed dense rows have them."""
    shares = {}
    for mode in (AS_IS, PADDED, TILED):
        dense, trie = (results[Way(path, mode)] for path in (FIXED_DENSE, FIXED_TRIE))
        same = torch.cat([(dense[name] == trie[name]).flatten() for name in dense])
        shares[mode] = float(same.double().mean())
    return shares


def _calls(model: Any, composition: Composition) -> dict[str, Callable[[], Tensor]]:
    variants = build_variants(model, composition.batch, list(dict.fromkeys(way.attention for way in WAYS)))
    return {way.name: partial(_run, model, way, variants[way.attention]) for way in WAYS}


def _run(model: Any, way: Way, variant: Callable[[], Tensor]) -> Tensor:
    with MODES[way.mode](model):
        return variant()


def _check(model: Any, composition: Composition) -> None:
    outputs = {name: call() for name, call in _calls(model, composition).items()}
    wrong = wrong_outputs(
        model, composition.batch, outputs, [composition.place, composition.batch.num_sequences - 1]
    )
    if wrong:
        raise ValueError(f"wrong values, so nothing was timed: {wrong}")


def _cost(
    model: Any, composition: Composition, rounds: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Seconds of each way, and how often the same path's plain way fits into it."""
    calls = _calls(model, composition)
    timings = time_interleaved(calls, rounds, warmup=0, progress=progress)
    plain = {FIXED_DENSE: DENSE_RAGGED, FIXED_TRIE: TRIE}
    dense = timings.fastest([*DENSE])
    return {
        way.name: {
            "seconds": timings.median(way.name),
            "times_plain": asdict(timings.ratio(way.name, plain.get(way.attention, way.attention))),
            "over_dense": asdict(timings.ratio(dense, way.name)),
        }
        for way in WAYS
    }


def report(measured: dict[str, Any]) -> str:
    """Markdown: a table of movement for each dtype and request, and one of costs for each dtype."""
    s = measured["settings"]
    lines = [
        f"{s['model']}; batches of up to {s['many']} sequences. Compared are the last hidden states of a request "
        "with those it has alone, on the same way: share of values equal bit by bit, largest difference (and that as "
        f"a share of the largest value). Dtypes: {', '.join(s['dtypes'])}.",
    ]
    for dtype, found in measured["found"].items():
        for (prefix, own), moved in zip(s["requests"], found["moved"], strict=True):
            lines += _movement_table(f"{dtype}, a request of {prefix} + {own} tokens", moved)
        lines += [
            "",
            f"### {dtype}, cost",
            "",
            f"{s['many']} sequences below one prefix, the first request's sizes, {s['rounds']} interleaved rounds, "
            "median (20–80%).",
            "",
            "| way | seconds | times its path as is | over the faster dense as is |",
            "|---|---|---|---|",
        ]
        for way, cost in found["cost"].items():
            ratios = " | ".join(_spread(cost[name]) for name in ("times_plain", "over_dense"))
            lines.append(f"| {way} | {cost['seconds']:.4g} | {ratios} |")
    return "\n".join(lines) + "\n"


def _movement_table(title: str, moved: Mapping[str, Any]) -> list[str]:
    batches = list(next(iter(moved["ways"].values())))
    lines = ["", f"### {title}", "", f"| way | {' | '.join(batches)} |", f"|---|{'---|' * len(batches)}"]
    for way, by_batch in moved["ways"].items():
        lines.append(f"| {way} | {' | '.join(_cell(by_batch[name]) for name in batches)} |")
    shares = "; ".join(f"{mode}: {100 * share:.4g}%" for mode, share in moved["trie_is_dense"].items())
    return [
        *lines,
        "",
        f"Values that `{FIXED_TRIE}` has bit by bit as `{FIXED_DENSE}`, all batches: {shares}.",
    ]


def _cell(found: Mapping[str, float]) -> str:
    if found["equal"] == 1 and found["largest"] == 0 == found["relative"]:
        return "equal"
    return f"{100 * found['equal']:.4g}%, {found['largest']:.2e} ({found['relative']:.1e})"


def _spread(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['q20']:.2f}–{ratio['q80']:.2f})"
