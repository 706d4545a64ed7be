"""PEFT: an adapter is a part of the model, whenever it came; adapters per row are not shared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import radixmlp
from radixmlp.reference import RaggedBatch
from radixmlp.verify import smollm2

IDS = torch.tensor(
    [
        [20, 21, 22, 23, 24, 25, 26, 27],
        [20, 21, 22, 23, 24, 30, 31, 32],
        [20, 21, 22, 23, 24, 25, 40, 41],
        [20, 21, 22, 23, 24, 25, 26, 27],
    ]
)
DISTINCT = 8 + 3 + 2
TARGETS = {
    "attention and MLP": {"target_modules": ["q_proj", "v_proj", "up_proj"]},
    "second layer only": {"target_modules": ["v_proj"], "layers_to_transform": [1]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "head": {"target_modules": ["lm_head"]},
}


def lora(model: Any, target: str = "attention and MLP", **options: Any) -> Any:
    """The model with an adapter whose weights are no longer zero."""
    adapted = get_peft_model(model, LoraConfig(r=4, **TARGETS[target], **options)).eval()
    stir(adapted, 1)
    return adapted


@torch.no_grad()
def stir(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def logits(model: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(IDS, **kwargs).logits
    return found


@pytest.fixture
def model(build: Callable[..., Any]) -> Any:
    return build(AutoModelForCausalLM)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("first", ["adapter", "enable"])
def test_an_adapter_before_and_after_enable(model: Any, close: Any, target: str, first: str) -> None:
    base = logits(model)
    if first == "enable":
        radixmlp.enable(model)
    adapted = lora(model, target)
    if first == "adapter":
        radixmlp.enable(adapted)
    got = logits(adapted)
    stats = model.radixmlp_stats
    assert (stats.compacted, stats.rows) == (1, DISTINCT)
    with adapted.disable_adapter():
        close(logits(adapted), base)
    radixmlp.disable(adapted)
    own = logits(adapted)
    assert (own - base).abs().max() > 0.01 * base.abs().max()
    close(got, own)


@pytest.mark.parametrize("first", ["merge", "enable"])
def test_merged(model: Any, close: Any, first: str) -> None:
    adapted = lora(model)
    own = logits(adapted)
    if first == "enable":
        radixmlp.enable(adapted)
    merged = adapted.merge_and_unload()
    if first == "merge":
        radixmlp.enable(merged)
    assert type(merged) is type(model)
    close(logits(merged), own)
    assert merged.radixmlp_stats.rows == DISTINCT


def test_the_active_adapter_is_the_one_that_counts(model: Any, close: Any) -> None:
    adapted = lora(model)
    adapted.add_adapter("other", LoraConfig(r=4, **TARGETS["attention and MLP"]))
    stir(adapted, 2)
    expected = {}
    for name in ("default", "other"):
        adapted.set_adapter(name)
        expected[name] = logits(adapted)
    radixmlp.enable(adapted)
    for name in ("default", "other", "default"):
        adapted.set_adapter(name)
        close(logits(adapted), expected[name])
    assert adapted.radixmlp_stats.compacted == 3


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("first", ["adapter", "enable"])
def test_an_adapter_per_row_is_never_shared(model: Any, close: Any, target: str, first: str) -> None:
    if first == "enable":
        radixmlp.enable(model)
    adapted = lora(model, target)
    adapted.add_adapter("other", LoraConfig(r=4, **TARGETS[target]))
    stir(adapted, 2)
    if first == "adapter":
        radixmlp.enable(adapted)
    names = ["default", "other", "__base__", "other"]
    got = logits(adapted, adapter_names=names)
    stats = model.radixmlp_stats
    if target == "head":  # the decoder has no adapter: it is the head that may not share
        assert stats.compacted == 1
    else:
        assert stats.compacted == 0
        assert any("adapter per row" in reason for reason in stats.dense)
    stats.reset()
    same = logits(adapted)
    assert stats.compacted == 1
    radixmlp.disable(adapted)
    close(got, logits(adapted, adapter_names=names))
    assert (got[0] - got[3]).abs().max() > 0.01 * got.abs().max()  # equal tokens, other adapters
    close(same, logits(adapted))


def test_an_adapter_per_row_with_strict(model: Any) -> None:
    adapted = lora(model)
    radixmlp.enable(adapted, strict=True)
    with pytest.raises(radixmlp.UnsupportedModelError, match="adapter per row"):
        logits(adapted, adapter_names=["default", "__base__", "default", "__base__"])


@pytest.mark.parametrize("names", [None, ["default", "other", "__base__", "other"]])
def test_generation(model: Any, names: list[str] | None) -> None:
    adapted = lora(model, task_type="CAUSAL_LM")
    adapted.add_adapter("other", LoraConfig(r=4, **TARGETS["attention and MLP"]))
    stir(adapted, 2)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    if names is not None:
        options["adapter_names"] = names
    own = adapted.generate(IDS, **options)
    radixmlp.enable(adapted)
    assert torch.equal(adapted.generate(IDS, **options), own)
    assert adapted.radixmlp_stats.compacted == (names is None)


def test_one_adapter_per_row_as_sharing_keys(model: Any, close: Any) -> None:
    """The way to keep rows apart that one adapter serves for different tenants."""
    adapted = lora(model)
    own = logits(adapted)
    radixmlp.enable(adapted, threshold=1.0)
    close(logits(adapted, sharing_keys=["a", "a", "b", "b"]), own)
    assert adapted.radixmlp_stats.rows == (8 + 3) + (8 + 2)


def test_ragged_forward_of_an_adapted_model(model: Any, close: Any) -> None:
    adapted = lora(model)
    own = logits(adapted)
    out = radixmlp.forward(adapted, RaggedBatch.from_padded(IDS, torch.ones_like(IDS)))
    close(out.logits.view(own.shape), own)
    assert out.plan.num_nodes == DISTINCT


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_virtual_tokens_stand_before_every_row(model: Any, close: Any, kind: Any) -> None:
    base = logits(model)
    tuned = get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with torch.no_grad():
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.5)
    mask = torch.ones_like(IDS)
    own = logits(tuned, attention_mask=mask)
    assert (own[:, -IDS.shape[1] :] - base).abs().max() > 0.01 * base.abs().max()
    radixmlp.enable(tuned)
    close(logits(tuned, attention_mask=mask), own)
    with pytest.raises(radixmlp.UnsupportedModelError, match="virtual tokens"):
        radixmlp.forward(tuned, RaggedBatch.from_padded(IDS, mask))


def test_gradients_of_an_adapter(model: Any, close: Any) -> None:
    adapted = lora(model).double().train()

    def gradients() -> dict[str, Tensor]:
        adapted.zero_grad()
        adapted(IDS, labels=IDS).loss.backward()
        return {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}

    own = gradients()
    assert len(own) == 2 * 2 * 3  # layers x (A, B) x targets
    radixmlp.enable(adapted)
    got = gradients()
    assert got.keys() == own.keys()
    for name, gradient in got.items():
        close(gradient, own[name], 1e-6)
    assert adapted.radixmlp_stats.compacted == 1


def test_adapter_dropout_in_training_runs_densely(model: Any) -> None:
    adapted = lora(model, lora_dropout=0.1).train()
    radixmlp.enable(adapted)
    adapted(IDS, labels=IDS).loss.backward()
    assert adapted.radixmlp_stats.compacted == 0
    assert any("drop" in reason for reason in adapted.radixmlp_stats.dense)


@pytest.mark.parametrize("first", ["adapter", "enable"])
def test_a_classifier_with_an_adapter(build: Callable[..., Any], close: Any, first: str) -> None:
    """PEFT puts a copy of the head beside it, to be trained."""
    model = build(AutoModelForSequenceClassification, num_labels=3)
    base = logits(model)
    if first == "enable":
        radixmlp.enable(model)
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(model, config).eval()
    stir(adapted, 1)
    with torch.no_grad():
        model.score.modules_to_save["default"].weight.mul_(-1)
    if first == "adapter":
        radixmlp.enable(adapted)
    got = logits(adapted)
    assert model.radixmlp_stats.rows == DISTINCT
    radixmlp.disable(adapted)
    own = logits(adapted)
    close(got, own)
    assert (own - base).abs().max() > 0.01 * base.abs().max()
    assert not any("forward" in vars(module) for module in adapted.modules())


def test_an_adapter_is_saved_and_loaded_on_an_enabled_model(model: Any, close: Any, tmp_path: Any) -> None:
    fresh = copy.deepcopy(model)
    adapted = lora(model)
    own = logits(adapted)
    radixmlp.enable(adapted)
    adapted.save_pretrained(tmp_path)
    radixmlp.enable(fresh)
    close(logits(PeftModel.from_pretrained(fresh, tmp_path).eval()), own)
    assert fresh.radixmlp_stats.compacted == 1


@pytest.mark.slow
@pytest.mark.parametrize("first", ["adapter", "enable"])
def test_smollm2(close: Any, first: str) -> None:
    model = smollm2.load_model(torch.float32, "sdpa")
    ids = IDS.repeat(1, 4) * 37
    if first == "enable":
        radixmlp.enable(model)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.01)
    if first == "adapter":
        radixmlp.enable(adapted)
    with torch.no_grad():
        got = adapted(ids).logits
        assert model.radixmlp_stats.compacted == 1
        radixmlp.disable(adapted)
        own = adapted(ids).logits
        with adapted.disable_adapter():
            assert (adapted(ids).logits - own).abs().max() > 1e-2 * own.abs().max()
    close(got, own)
