"""What people put around a model: pipelines, `Trainer`, accelerate's hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    pipeline,
)

import radixmlp

PREFIX = " ".join(f"word{number}" for number in range(10))
TEXTS = [f"{PREFIX} " + " ".join(f"word{20 + i % 4 + j}" for j in range(1 + i % 3)) for i in range(12)]
IDS = torch.tensor([[20, 21, 22, 23, 24, 25]] * 3 + [[20, 21, 22, 23, 30, 31]])


class Rebuilding(ModelHook):
    """Gives a module copies of all that it was called with, as hooks do that move tensors between devices."""

    calls = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        self.calls += 1
        return tuple(copied(arg) for arg in args), {name: copied(value) for name, value in kwargs.items()}

    def post_forward(self, module: Any, output: Any) -> Any:
        return output


def copied(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(copied, value))
    return value.clone() if isinstance(value, Tensor) else value


WHERE: dict[str, Callable[[Any], list[Any]]] = {
    "model": lambda model: [model],
    "backbone": lambda model: [model.base_model],
    "layers": lambda model: list(model.base_model.layers),
    "all modules": lambda model: list(model.modules()),
}


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt_oss"])
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("first", ["hooks", "enable"])
def test_hooks_that_rebuild_arguments(
    build: Callable[..., Any], close: Any, family: str, where: str, first: str
) -> None:
    model = build(AutoModelForCausalLM, family)
    own = model(IDS).logits
    if first == "enable":
        radixmlp.enable(model)
    hooks = []
    for module in WHERE[where](model):
        hooks.append(Rebuilding())
        add_hook_to_module(module, hooks[-1])
    if first == "hooks":
        radixmlp.enable(model)
    before = [hook.calls for hook in hooks]
    close(model(IDS).logits, own)
    assert any(hook.calls > count for hook, count in zip(hooks, before, strict=True))
    assert model.radixmlp_stats.compacted == 1
    assert model.radixmlp_stats.rows == 8
    radixmlp.disable(model)
    assert torch.equal(model(IDS).logits, own)
    for module in WHERE[where](model):
        remove_hook_from_module(module)
    assert torch.equal(model(IDS).logits, own)


def test_hooks_removed_from_an_enabled_model(build: Callable[..., Any], close: Any) -> None:
    model = build(AutoModelForCausalLM)
    own = model(IDS).logits
    radixmlp.enable(model)
    for module in (model, model.model):
        add_hook_to_module(module, Rebuilding())
    for module in (model, model.model):
        remove_hook_from_module(module)
    close(model(IDS).logits, own)
    assert model.radixmlp_stats.compacted == 1
    radixmlp.disable(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_weights_offloaded_after_enable(build: Callable[..., Any], close: Any) -> None:
    model = build(AutoModelForCausalLM)
    own = model(IDS).logits
    radixmlp.enable(model)
    cpu_offload(model, execution_device="cpu")
    close(model(IDS).logits, own)
    assert model.radixmlp_stats.compacted == 1


@pytest.fixture
def accelerator_of() -> Iterator[Callable[[str], Any]]:
    """`accelerator_of(precision)`; accelerate keeps one state a process, which is put back to nothing."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield lambda precision: Accelerator(cpu=True, mixed_precision=precision)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(("first", "precision"), [("prepare", "no"), ("enable", "no"), ("enable", "bf16")])
def test_accelerator_prepare(
    build: Callable[..., Any], close: Any, accelerator_of: Any, first: str, precision: str
) -> None:
    model = build(AutoModelForCausalLM)
    accelerator = accelerator_of(precision)
    dense = accelerator.prepare(copy.deepcopy(model))
    own = dense(IDS).logits
    noise = (torch.cat([dense(row[None]).logits for row in IDS]) - own).abs().max() / own.abs().max()
    if first == "enable":
        radixmlp.enable(model)
    model = accelerator.prepare(model)
    if first == "prepare":
        radixmlp.enable(model)
    got = model(IDS).logits
    close(got, own, 1e-5 if precision == "no" else 2 * noise.item() + 2 * torch.finfo(torch.bfloat16).eps)
    assert model.radixmlp_stats.compacted == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_pipeline(build: Callable[..., Any], tokenizer: Any, side: str) -> None:
    model = build(AutoModelForSequenceClassification, num_labels=3)
    tokenizer.padding_side = side
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    own = classify(TEXTS, batch_size=6, top_k=None)
    assert len({scores[0]["label"] for scores in own}) > 1
    radixmlp.enable(model)
    got = classify(TEXTS, batch_size=6, top_k=None)
    for ours, theirs in zip(got, own, strict=True):
        assert [entry["label"] for entry in ours] == [entry["label"] for entry in theirs]
        for mine, its in zip(ours, theirs, strict=True):
            assert abs(mine["score"] - its["score"]) <= 1e-5
    assert model.radixmlp_stats.compacted == 2
    assert model.radixmlp_stats.rows < 0.4 * model.radixmlp_stats.tokens


def trainer(
    model: Any, tokenizer: Any, folder: Any, rows: list[dict[str, Any]], collate: Any, **options: Any
) -> Any:
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=6,
        per_device_train_batch_size=6,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **options,
    )
    return Trainer(
        model=model,
        args=arguments,
        data_collator=collate,
        train_dataset=Rows(rows),
        eval_dataset=Rows(rows),
        processing_class=tokenizer,
    )


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A list of tokenized texts."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def language_rows(tokenizer: Any) -> list[dict[str, Any]]:
    """With a column that the model does not take: `Trainer` drops it by the signature of `model.forward`."""
    return [{**tokenizer(text), "origin": text} for text in TEXTS]


def test_trainer_evaluates_a_language_model(
    build: Callable[..., Any], tokenizer: Any, close: Any, tmp_path: Any
) -> None:
    model = build(AutoModelForCausalLM)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    run = trainer(model, tokenizer, tmp_path, language_rows(tokenizer), collate)
    own = run.evaluate()["eval_loss"]
    radixmlp.enable(model)
    close(run.evaluate()["eval_loss"], own)
    assert model.radixmlp_stats.compacted == 2
    fresh = trainer(model, tokenizer, tmp_path, language_rows(tokenizer), collate)
    close(fresh.evaluate()["eval_loss"], own)
    assert model.radixmlp_stats.compacted == 4
    assert model.radixmlp_stats.rows < 0.4 * model.radixmlp_stats.tokens


def test_trainer_evaluates_and_predicts_with_a_classifier(
    build: Callable[..., Any], tokenizer: Any, close: Any, tmp_path: Any
) -> None:
    model = build(AutoModelForSequenceClassification, num_labels=3)
    rows = [{**tokenizer(text), "labels": place % 3} for place, text in enumerate(TEXTS)]
    run = trainer(model, tokenizer, tmp_path, rows, DataCollatorWithPadding(tokenizer))
    own, expected = run.evaluate()["eval_loss"], run.predict(run.eval_dataset).predictions
    radixmlp.enable(model)
    close(run.evaluate()["eval_loss"], own)
    got = run.predict(run.eval_dataset).predictions
    logits, others = (found[0] if isinstance(found, tuple) else found for found in (got, expected))
    close(logits, others)
    assert model.radixmlp_stats.compacted == 4
    assert model.radixmlp_stats.rows < 0.4 * model.radixmlp_stats.tokens


@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
def test_trainer_trains(
    build: Callable[..., Any],
    tokenizer: Any,
    close: Any,
    tmp_path: Any,
    checkpointing: dict[str, bool] | None,
) -> None:
    """Three steps of plain gradient descent end at the same weights, checkpointed or not."""
    dense = build(AutoModelForCausalLM).double()
    model = radixmlp.enable(copy.deepcopy(dense))
    losses = []
    for trained in (dense, model):
        run = trainer(
            trained,
            tokenizer,
            tmp_path,
            language_rows(tokenizer),
            DataCollatorForLanguageModeling(tokenizer, mlm=False),
            max_steps=3,
            optim="sgd",
            learning_rate=1e-3,
            gradient_checkpointing=checkpointing is not None,
            gradient_checkpointing_kwargs=checkpointing,
        )
        before = {name: weight.clone() for name, weight in trained.state_dict().items()}
        losses.append(run.train().training_loss)
    close(losses[1], losses[0])
    changes = 0
    for name, weight in model.state_dict().items():
        close(weight, dense.state_dict()[name], 1e-9)
        changes += not torch.equal(weight, before[name])
    assert changes > 10
    assert model.radixmlp_stats.compacted == 3
    assert not model.radixmlp_stats.dense
