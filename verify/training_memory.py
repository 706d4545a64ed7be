"""Memory of a training step: its peak above weights and gradients, each path in a fresh process.

See `memory.py` for how a peak is read. Gradients exist, and are resident, before the step that is measured; no
optimiser is made, so none counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.functional import log_softmax

from radixmlp.reference import RaggedBatch
from radixmlp.training import causal_lm_loss
from radixmlp.verify.memory import _ALLOCATOR, MAX_CHILD_SECONDS, MB, peak_of
from radixmlp.verify.training_variants import build_losses, load_trainee, mask_prompts, step
from radixmlp.verify.workloads import make_workload

CPU = torch.device("cpu")
_WARM_UP = [[1, 2, 3, 4], [1, 2, 3, 5]]
_NAIVE_COPIES = 3  # of the logits: log-probabilities, their gradient, and the logits' own
_ROOM_MB = 1000.0


@dataclass(frozen=True)
class Step:
    """One training step to measure.

    Args:
        variant: a name `build_losses` takes.
        model, vocabulary, dtype: as `load_trainee` takes them.
        workload: "synthetic:PROMPT+COMPLETIONxGROUP".
        masked: tokens of each row that are no targets, 0: all are.
    """

    variant: str
    model: str
    vocabulary: int
    dtype: str
    workload: str
    masked: int


@dataclass(frozen=True)
class HeadStep:
    """Loss and backward of a one-layer fp32 model that is nearly all head: `rows` rows predict a token each."""

    variant: Literal["naive", "chunked"]
    vocabulary: int
    rows: int
    hidden_size: int
    sequences: int = 8


def peak_megabytes_of(measured: Step | HeadStep) -> float:
    """Peak MB (10^6 bytes) of one step in a fresh process: above weights and gradients (`Step`), or above the
    weights alone (`HeadStep`).

    Raises:
        RuntimeError: the process failed, or the machine has too little free memory; the message says which.
    """
    if isinstance(measured, HeadStep):
        _require_room(measured)
    arguments = json.dumps({"kind": type(measured).__name__, **asdict(measured)})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "radixmlp.verify.training_memory", arguments],
        env={**os.environ, **_ALLOCATOR},
        capture_output=True,
        text=True,
        timeout=MAX_CHILD_SECONDS,
    )
    if done.returncode != 0:
        tail = (done.stderr or done.stdout)[-2000:]
        raise RuntimeError(
            f"measuring memory of {measured.variant} failed with exit code {done.returncode}:\n{tail}"
        )
    return float(json.loads(done.stdout.splitlines()[-1])["peak_mb"])


def _require_room(head: HeadStep) -> None:
    """A machine that runs out of memory kills whichever process it likes: refuse before."""
    copies = _NAIVE_COPIES if head.variant == "naive" else 1
    needed = copies * 4 * head.rows * head.vocabulary / MB + _ROOM_MB
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024 / MB
            if available < needed:
                raise RuntimeError(
                    f"the {head.variant} head needs about {needed:,.0f} MB, {available:,.0f} MB are free"
                )


def _measure_step(asked: Step) -> float:
    model = load_trainee(asked.model, asked.vocabulary, asked.dtype)
    workload = make_workload(asked.workload, None, model.config.vocab_size)
    labels = mask_prompts(workload.batch, asked.masked)
    tiny = RaggedBatch.from_sequences(_WARM_UP)
    step(model, build_losses(model, tiny, None, [asked.variant])[asked.variant])
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()  # written, so resident
    loss = build_losses(model, workload.batch, labels, [asked.variant])[asked.variant]
    return peak_of(lambda: loss().backward(), CPU)


def _measure_head(asked: HeadStep) -> float:
    if asked.rows % asked.sequences:
        raise ValueError(f"{asked.rows} rows are not a multiple of {asked.sequences} sequences")
    model = _head_model(asked.vocabulary, asked.hidden_size)
    length = asked.rows // asked.sequences + 1  # the last token of each sequence predicts nothing
    ids = torch.randint(
        asked.vocabulary, (asked.sequences, length), generator=torch.Generator().manual_seed(0)
    )
    ids[:, 0] = torch.arange(asked.sequences)  # nothing is shared
    causal_lm_loss(model, RaggedBatch.from_sequences(_WARM_UP)).backward()
    model.zero_grad(set_to_none=True)
    if asked.variant == "naive":
        return peak_of(lambda: _naive_step(model, ids), CPU)
    batch = RaggedBatch.from_sequences(ids)
    return peak_of(lambda: causal_lm_loss(model, batch).backward(), CPU)


def _naive_step(model: Any, ids: torch.Tensor) -> None:
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logprobs = log_softmax(model.lm_head(hidden).float(), -1)
    (-logprobs.gather(-1, ids[:, 1:, None])).mean().backward()


def _head_model(vocabulary: int, hidden_size: int) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(2, hidden_size // 4),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).eval()


def main(argv: list[str] | None = None) -> int:
    """The fresh process: its argument is the step as JSON; prints {"peak_mb": ...}."""
    asked = json.loads((sys.argv[1:] if argv is None else argv)[0])
    kind = asked.pop("kind")
    peak = _measure_step(Step(**asked)) if kind == Step.__name__ else _measure_head(HeadStep(**asked))
    print(json.dumps({"peak_mb": peak}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
