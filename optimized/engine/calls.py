"""One call of an engine: prepared ahead, run, read off, put in the order of the requests."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from radixmlp.optimized.engine.ahead import ahead
from radixmlp.optimized.engine.answers import Reader
from radixmlp.optimized.engine.config import EngineConfig
from radixmlp.optimized.engine.encoders import Encoder, Entry
from radixmlp.optimized.engine.errors import RequestError, SlowIndexWarning
from radixmlp.optimized.engine.piles import Pile
from radixmlp.optimized.engine.rows import Route, Runner
from radixmlp.optimized.engine.screening import screen
from radixmlp.optimized.engine.stats import Clock, EngineStats, overlap
from radixmlp.optimized.engine.windows import Prepared, lay_out, prepare
from radixmlp.optimized.integration.models import embedding_of
from radixmlp.optimized.integration.probe import evaluating
from radixmlp.reference import RaggedBatch

OnBatch = Callable[[list[int], Tensor], None]
_WORTH_A_WARNING = 1.0  # seconds of a call
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


def answer(
    model: Any,
    config: EngineConfig,
    stats: EngineStats,
    pile: Pile,
    encoder: Encoder,
    reader: Reader,
    on_batch: OnBatch | None = None,
) -> Tensor:
    """[n, width] fp32 on the CPU: what `reader` finds for each request.

    Args:
        encoder: of the pile's distinct requests.
        on_batch: told after each run of the indices of the requests it answered, each occurrence of one, and of their
            values [k, width].

    Raises:
        RequestError: a request that cannot be answered, or whose values are not finite.
    """
    clock, runner = Clock(), Runner(model, config)
    screen(encoder)
    out = torch.empty(len(pile.first), reader.width)
    with (
        _alone_on(model),
        _deterministic(config.deterministic),
        evaluating(model),
        _progress(config.progress, pile) as answered,
        ahead(prepare(encoder, config.max_batch_tokens, config.dense, clock, runner.ready)) as prepared,
    ):
        while (one := _next(prepared, clock)) is not None:
            _check_ids(model, one, pile)
            for entries, batch, route in _parts(runner, one):
                with clock.running():
                    ran = runner.run(batch, route)
                    values = reader.read(ran, runner, entries).to("cpu", torch.float32)
                _store(out, values, entries, pile, reader.by_target)
                numbers = [entry.request for entry in entries]
                tokens = sum(len(entry.tokens) * int(pile.counts[entry.request]) for entry in entries)
                stats.count_batch(ran.attention, ran.plan.num_nodes, tokens)
                if on_batch is not None:
                    on_batch(*pile.occurrences(numbers, out))
                answered(numbers)
    stats.count_call(pile.size, clock)
    warn_if_waiting(clock)
    return pile.spread(out)


def _next(prepared: Iterator[Prepared], clock: Clock) -> Prepared | None:
    with clock.waiting():
        return next(prepared, None)


def _parts(runner: Runner, one: Prepared) -> Iterator[tuple[list[Entry], RaggedBatch, Route]]:
    """A batch's runs: one, or several where it runs densely and its own rows are more than the budget."""
    budget = runner.config.max_batch_tokens
    route = runner.choose(one.plan)
    if route.plan is not None or one.batch.num_tokens <= budget:
        yield one.entries, one.batch, route
        return
    start, held = 0, 0
    for place, entry in enumerate(one.entries):
        if held + len(entry.tokens) > budget:
            part = one.entries[start:place]
            yield part, lay_out(part), route
            start, held = place, 0
        held += len(entry.tokens)
    part = one.entries[start:]
    yield part, lay_out(part), route


def _check_ids(model: Any, one: Prepared, pile: Pile) -> None:
    vocabulary = embedding_of(model).shape[0]
    asked = (target.tokens[-1] for entry in one.entries for target in entry.targets)
    if max(int(one.batch.input_ids.max()), max(asked, default=0)) < vocabulary:
        return
    for entry in one.entries:
        largest = max([*entry.tokens, *(target.tokens[-1] for target in entry.targets)])
        if largest >= vocabulary:
            raise RequestError(
                pile.first[entry.request],
                f"has the token id {largest}, but the model has {vocabulary} token embeddings: this is not its "
                "tokenizer",
            )


def _store(out: Tensor, values: Tensor, entries: list[Entry], pile: Pile, by_target: bool) -> None:
    """Put values where they belong: a row of `out` for each entry, or one value for each target."""
    finite = torch.isfinite(values).all(1)
    targets = [(entry.request, target.column) for entry in entries for target in entry.targets]
    owners = [request for request, _ in targets] if by_target else [entry.request for entry in entries]
    if not bool(finite.all()):
        wrong = sorted({i for place in (~finite).nonzero()[:5, 0] for i in pile.indices(owners[int(place)])})
        raise RequestError(
            wrong[0],
            f"has a result that is not finite (so have requests {', '.join(map(str, wrong[:10]))}, and maybe "
            "others): the weights or the dtype overflow; try float32",
        )
    if by_target:
        out[owners, [column for _, column in targets]] = values[:, 0]
    else:
        out[owners] = values


def warn_if_waiting(clock: Clock) -> None:
    """Say so where the CPU's index keeps the device waiting: after the first batch, for more than 1% of the call."""
    seconds = sum(end - start for start, end in clock.waits) + clock.run_seconds
    later = clock.waits[1:]
    index, tokenize = (overlap(later, clock.spans[kind]) for kind in ("index", "tokenize"))
    if seconds >= _WORTH_A_WARNING and index > 0.01 * seconds and index > tokenize:
        warnings.warn(
            f"the CPU's index maps are the bottleneck: batches waited {index:.2f} s of {seconds:.2f} s for them, "
            f"{tokenize:.2f} s for the tokenizer; leave a core free for the engine's thread, raise max_batch_tokens, "
            "or set model_impl='dense' where gamma is near 1",
            SlowIndexWarning,
            stacklevel=4,
        )


@contextmanager
def _alone_on(model: nn.Module) -> Iterator[None]:
    """One call at a time on a model: its mode and, for a moment, its decoder's forward are exchanged."""
    with _locks_lock:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        yield


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """PyTorch's deterministic algorithms for the time of the block, where wanted."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


@contextmanager
def _progress(wanted: bool, pile: Pile) -> Iterator[Callable[[list[int]], None]]:
    """A bar on standard error that is told the numbers of the requests answered."""
    if not wanted:
        yield lambda numbers: None
        return
    from tqdm import tqdm

    seen = np.zeros(len(pile.first), bool)
    with tqdm(total=pile.size, unit="request", desc="radixmlp") as bar:

        def answered(numbers: list[int]) -> None:
            new = [number for number in set(numbers) if not seen[number]]
            seen[new] = True
            bar.update(int(pile.counts[new].sum()))

        yield answered
