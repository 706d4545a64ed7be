"""A multiple-choice task for lm-evaluation-harness out of the shipped passages, and evaluating it with a model."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixmlp.verify.passages import load_passages

TASK, SHOTS, CHOICES = "radixmlp_topics", 5, 4


def documents() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the five shots, the items): a passage, four questions, and which of them it answers."""
    entries = load_passages()
    questions = [entry.query for entry in entries]
    found = []
    for place in range(min(len(entry.passages) for entry in entries)):
        for topic, entry in enumerate(entries):
            answer = (place + topic) % CHOICES
            others = [questions[(topic + step) % len(questions)] for step in range(1, CHOICES)]
            others.insert(answer, questions[topic])
            found.append({"passage": entry.passages[place], "choices": others, "answer": answer})
    return found[:SHOTS], found[SHOTS:]


def local_task() -> Any:
    """The items as a task of the harness: 5-shot, always the same shots, multi-token choices."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    shots, items = documents()
    splits = {"train": datasets.Dataset.from_list(shots), "test": datasets.Dataset.from_list(items)}
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
    ]
    config = {
        "task": TASK,
        "custom_dataset": lambda **_: datasets.DatasetDict(splits),
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Passage: {{passage}}\nIt answers the question:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "num_fewshot": SHOTS,
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": metrics,
    }
    return ConfigurableTask(config=config)


@dataclass
class Variant:
    """One way to evaluate, and what each of its rounds did.

    Args:
        lm: the harness' model.
        model_seconds, slots: of the calls of the model in each round (`HFLM` only).
        rows: computed in each round.
        answers: (log-probability, greedy) of each choice, by item.
        right: [acc, acc_norm] by item.
        dense_reasons: why batches were left dense.
    """

    lm: Any
    model_seconds: list[float] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    answers: dict[int, list[tuple[float, bool]]] = field(default_factory=dict)
    right: dict[int, list[float]] = field(default_factory=dict)
    dense_reasons: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call_model, self.lm._model_call = self.lm._model_call, self._timed_call
        self.elapsed = 0.0

    def _timed_call(self, inps: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        logits = self.call_model(inps, **kwargs)
        self.elapsed += time.perf_counter() - started
        self.calls.append(tuple(inps.shape))
        return logits

    def run(self, task: Any, items: Sequence[int]) -> None:
        """Evaluate some of the items."""
        from lm_eval import evaluate

        stats = getattr(self.lm.model, "radixmlp_stats", None)
        if stats is not None:
            stats.reset()
        self.elapsed, self.calls = 0.0, []
        result = evaluate(
            self.lm, {TASK: task}, samples={TASK: list(items)}, bootstrap_iters=0, log_samples=True
        )
        for sample in result["samples"][TASK]:
            item = sample["doc_id"]
            self.answers[item] = [(float(answer[0]), bool(answer[1])) for answer in sample["filtered_resps"]]
            self.right[item] = [sample["acc"], sample["acc_norm"]]
        self.model_seconds.append(self.elapsed)
        slots = sum(batch * length for batch, length in self.calls)
        self.slots.append(slots)
        self.rows.append(slots if stats is None else stats.rows)
        for reason, count in () if stats is None else stats.dense.items():
            self.dense_reasons[reason] = self.dense_reasons.get(reason, 0) + count


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Offline, and without the harness' progress bars and remarks."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before = {name: os.environ.get(name) for name in offline}
    os.environ.update(offline)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(level)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
