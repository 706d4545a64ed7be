"""The cells of a measuring run: groups of the bench, the series of the figures, the machine's calibration."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from radixmlp.reference import RaggedBatch
from radixmlp.verify.bars import SCATTER, TRIE
from radixmlp.verify.models import LoadedModel, load_model
from radixmlp.verify.variants import PREFIX_KV
from radixmlp.verify.workloads import make_workload

from .data import Point
from .measure_copies import copies
from .measure_points import Progress, time_batch
from .measure_run import Cell
from .measure_texts import gamma, rerank_latency
from .measure_weights import memory

FIGURE_GROUPS = {"qwen3-0.6b": 70, "qwen3-8b": 420, "training": 360, "index": 60}  # of the bench; seconds
PREFIX_SECONDS = {
    "qwen3-0.6b-width:1": 0.012,
    "qwen3-4b-width:1": 0.08,
    "qwen3-8b-width:1": 0.15,
}  # a shared token
PATHS = {TRIE: "trie", SCATTER: "scatter", PREFIX_KV: "prefix-kv", "auto": "auto"}


@dataclass(frozen=True)
class Sizes:
    """How large the series are; the defaults are the figures'.

    Args:
        prefix: model -> prefix lengths of figure 1, with `suffix` own tokens and `batch` sequences.
        grid_model, grid_prefixes, grid_suffixes, grid_batch: of figure 8.
        long_prefixes, long_suffix, long_batch: of figure 9, long context.
        low_shares, low_length, low_batch: of figure 9, per cent of a sequence that is shared.
        small_batches, small_prefix, small_suffix: of figure 9, few sequences.
        layers: of the 0.6B width in figures 8 and 9.
        queries: of the reranking table.
        copy_scale: divides the rows of the copies.
        memory_model, memory_workload: of figure 7.
        rounds: timed rounds of short calls; long ones take two.
    """

    name: str = "full"
    prefix: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("qwen3-0.6b-width:1", (256, 512, 1024, 2048)),
        ("qwen3-4b-width:1", (512,)),
        ("qwen3-8b-width:1", (512,)),
    )
    suffix: int = 256
    batch: int = 32
    grid_model: str = "qwen3-0.6b-width:1"
    grid_prefixes: tuple[int, ...] = (128, 512, 2048)
    grid_suffixes: tuple[int, ...] = (32, 256)
    grid_batch: int = 16
    long_prefixes: tuple[int, ...] = (1024, 4096, 8192)
    long_suffix: int = 64
    long_batch: int = 4
    low_shares: tuple[int, ...] = (0, 10, 25, 50)
    low_length: int = 512
    low_batch: int = 8
    small_batches: tuple[int, ...] = (1, 2, 4, 8)
    small_prefix: int = 512
    small_suffix: int = 64
    rerank_model: str = "smollm2-135m"
    queries: int = 6
    copy_scale: int = 1
    memory_model: str = "qwen3-0.6b-width:4"
    memory_workload: str = "synthetic:512+64x16"
    rounds: int = 5


QUICK = Sizes(
    name="quick",
    prefix=(("tiny-qwen3", (16, 32)),),
    suffix=8,
    batch=4,
    grid_model="tiny-qwen3",
    grid_prefixes=(16,),
    grid_suffixes=(4,),
    grid_batch=4,
    long_prefixes=(64,),
    long_suffix=8,
    low_shares=(0, 50),
    low_length=32,
    low_batch=4,
    small_batches=(1, 2),
    small_prefix=32,
    small_suffix=8,
    rerank_model="tiny-qwen3",
    queries=1,
    copy_scale=100,
    memory_model="",
    rounds=2,
)


def all_cells(sizes: Sizes, groups: Sequence[str] = tuple(FIGURE_GROUPS)) -> list[Cell]:
    """Every cell of a run: the series first, because the bench's groups are long; then groups, then calibration.

    Args:
        groups: of the bench; those whose bars the figures show where omitted.
    """
    cells = [
        Cell("gamma", 3, partial(gamma, sizes.queries == 1)),
        Cell("copies", 10, partial(copies, sizes.copy_scale, sizes.rounds)),
    ]
    cells += [
        Cell(
            f"prefix {model} {length}",
            5 + PREFIX_SECONDS.get(model, 0) * length,
            partial(_prefix, sizes, model, length),
        )
        for model, lengths in sizes.prefix
        for length in lengths
    ]
    cells += [
        Cell("grid", 45, partial(_grid, sizes)),
        Cell("long context", 45, partial(_long, sizes)),
        Cell("low redundancy", 30, partial(_low, sizes)),
        Cell("small batches", 15, partial(_small, sizes)),
        Cell("rerank latency", 40, partial(rerank_latency, sizes.rerank_model, sizes.queries)),
    ]
    if sizes.memory_model:
        cells.append(Cell("memory", 50, partial(memory, sizes.memory_model, sizes.memory_workload)))
    cells += [Cell(f"bench: {name}", FIGURE_GROUPS.get(name, 200), partial(_group, name)) for name in groups]
    if sizes.name == "full":
        cells.append(Cell("roofline", 180, calibration))
    return cells


def rows_of(points: Sequence[Point]) -> dict[str, Any]:
    """Points as a cell returns them."""
    return {"series": [vars(point) for point in points]}


def _group(name: str, progress: Progress) -> dict[str, Any]:
    """One group of the bench, in a fresh process; a bar that came out wrong is kept, with its reason.

    Fresh, because a heap that has grown before keeps its pages: dense, whose activations are the largest, then faults
    fewer of them in, and the same bars come out up to a third lower.
    """
    progress(f"{name}, in a fresh process")
    with tempfile.TemporaryDirectory(prefix="radixmlp-bench-") as folder:
        out = Path(folder) / "bars.json"
        _in_a_fresh_process(name, ["-m", "radixmlp.verify.bench", "--only", name, "--out", str(out)], out)
        return {"bars": json.loads(out.read_text(encoding="utf-8"))["bars"]}


def _in_a_fresh_process(what: str, arguments: list[str], out: Path) -> None:
    """Run Python; it is to leave the file `out`."""
    done = subprocess.run([sys.executable, "-P", *arguments], capture_output=True, text=True)
    if not out.exists():
        raise RuntimeError(f"{what} failed:\n{(done.stderr or done.stdout)[-2000:]}")


_CALIBRATION = """
import json, sys
from pathlib import Path
from radixmlp.verify.checkout import require_checkout
from radixmlp.verify.figures_command import paper_figures
found = paper_figures(require_checkout("the calibration"), "roofline_calibrate").calibrate(lambda what: None)
Path(sys.argv[1]).write_text(json.dumps(found))
"""


def calibration(progress: Progress) -> dict[str, Any]:
    """The machine's model, from a fresh process as well: what page faults cost is part of it."""
    progress("calibration, in a fresh process")
    with tempfile.TemporaryDirectory(prefix="radixmlp-calibration-") as folder:
        out = Path(folder) / "calibration.json"
        _in_a_fresh_process("the calibration", ["-c", _CALIBRATION, str(out)], out)
        return {"roofline": json.loads(out.read_text(encoding="utf-8"))}


def _prefix(sizes: Sizes, model: str, length: int, progress: Progress) -> dict[str, Any]:
    """Figure 1: one prefix length of one model."""
    loaded = load_model(model, "bfloat16", "cpu")
    batch = _synthetic(loaded, length, sizes.suffix, sizes.batch)
    timed = time_batch(loaded.model, batch, [SCATTER, TRIE], 2, progress)
    shape = f"{_title(model)}, {length} + {sizes.suffix} tokens x {sizes.batch}, bf16"
    width = model.split("-width")[0]
    return rows_of(
        [
            timed.point("prefix", f"{width} {PATHS[variant]}", variant, length, shape, model=width)
            for variant in (SCATTER, TRIE)
        ]
    )


def _grid(sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Figure 8: every path on every shape."""
    loaded = load_model(sizes.grid_model, "bfloat16", "cpu")
    shapes = list(itertools.product(sizes.grid_suffixes, sizes.grid_prefixes))
    points = []
    for place, (suffix, prefix) in enumerate(shapes):
        batch = _synthetic(loaded, prefix, suffix, sizes.grid_batch)
        say = partial(_prefixed, progress, f"{prefix} + {suffix}")
        timed = time_batch(loaded.model, batch, [SCATTER, PREFIX_KV, TRIE], 3, say)
        shape = f"{_title(sizes.grid_model)}, {prefix} + {suffix} tokens x {sizes.grid_batch}, bf16"
        found = {"model": sizes.grid_model, "prefix": prefix, "suffix": suffix, "batch": sizes.grid_batch}
        points += [
            timed.point("grid", PATHS[variant], variant, place, shape, **found)
            for variant in (SCATTER, PREFIX_KV, TRIE)
        ]
    return rows_of(points)


def _long(sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Figure 9: what the growth of attention leaves of the gain."""
    loaded = load_model(sizes.grid_model, "bfloat16", "cpu")
    points = []
    for prefix in sizes.long_prefixes:
        batch = _synthetic(loaded, prefix, sizes.long_suffix, sizes.long_batch)
        say = partial(_prefixed, progress, f"prefix {prefix}")
        timed = time_batch(loaded.model, batch, [SCATTER, TRIE], 2, say)
        shape = (
            f"{_title(sizes.grid_model)}, {prefix} + {sizes.long_suffix} tokens x {sizes.long_batch}, bf16"
        )
        points += [timed.point("long", PATHS[variant], variant, prefix, shape) for variant in (SCATTER, TRIE)]
    return rows_of(points)


def _low(sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Figure 9: little to share, up to nothing at all."""
    loaded = load_model(sizes.grid_model, "bfloat16", "cpu")
    points = []
    for share in sizes.low_shares:
        prefix = sizes.low_length * share // 100
        batch = _synthetic(loaded, prefix, sizes.low_length - prefix, sizes.low_batch)
        variants = [SCATTER, TRIE, "auto"]
        say = partial(_prefixed, progress, f"{share}% shared")
        timed = time_batch(loaded.model, batch, variants, sizes.rounds, say)
        shape = f"{_title(sizes.grid_model)}, {sizes.low_length} tokens x {sizes.low_batch}, bf16"
        points += [timed.point("low", PATHS[variant], variant, share, shape) for variant in variants]
    return rows_of(points)


def _small(sizes: Sizes, progress: Progress) -> dict[str, Any]:
    """Figure 9: few sequences."""
    loaded = load_model(sizes.grid_model, "bfloat16", "cpu")
    points = []
    for count in sizes.small_batches:
        batch = _synthetic(loaded, sizes.small_prefix, sizes.small_suffix, count)
        variants = [SCATTER, TRIE, "auto"]
        say = partial(_prefixed, progress, f"{count} sequences")
        timed = time_batch(loaded.model, batch, variants, sizes.rounds, say)
        shape = f"{_title(sizes.grid_model)}, {sizes.small_prefix} + {sizes.small_suffix} tokens, bf16"
        points += [timed.point("small", PATHS[variant], variant, count, shape) for variant in variants]
    return rows_of(points)


def _synthetic(loaded: LoadedModel, prefix: int, suffix: int, count: int) -> RaggedBatch:
    return make_workload(f"synthetic:{prefix}+{suffix}x{count}", None, loaded.vocab_size).batch


def _title(model: str) -> str:
    """ "qwen3-0.6b-width:1" -> "Qwen3-0.6B width, 1 layer"."""
    name, _, layers = model.partition("-width:")
    if not layers:
        return model
    return f"{name.replace('qwen', 'Qwen').replace('b', 'B')} width, {layers} layer{'' if layers == '1' else 's'}"


def _prefixed(progress: Progress, where: str, what: str) -> None:
    progress(f"{where}, {what}")
