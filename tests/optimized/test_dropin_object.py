"""The object behind an enabled model: disabled, copied, pickled, patched, run in threads, interrupted."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import radixmlp
from radixmlp.verify.families import small_model

Helper = Callable[..., Any]  # of conftest.py

SEQUENCES = [
    [5, 6, 7, 8, 9],
    [5, 6, 7, 10],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 18],
    [5, 6, 7, 8, 9],
    [20],
    [5, 6],
    [5, 6, 7, 8, 11, 12, 13, 14, 15, 16, 17, 19, 21],
]


def test_disable_restores_the_object() -> None:
    model = small_model("qwen3")
    untouched = {name: dict(vars(module)) for name, module in model.named_modules()}
    config = copy.deepcopy(model.config.to_dict())
    signature = inspect.signature(model.forward)
    radixmlp.enable(model)
    assert inspect.signature(model.forward) == signature
    model(torch.tensor([[5, 6, 7]] * 2))
    radixmlp.disable(model)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model, "radixmlp_stats")
    for name, module in model.named_modules():
        now = vars(module)
        assert {k: id(v) for k, v in now.items()} == {k: id(v) for k, v in untouched[name].items()}, name


def test_disable_under_a_later_patch(close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7]] * 4)
    own = model(ids).logits
    radixmlp.enable(model)
    ours, calls = model.model.forward, []

    def patch(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return ours(*args, **kwargs)

    model.model.forward = patch
    close(model(ids).logits, own)
    radixmlp.disable(model)
    assert model.model.forward is patch
    assert torch.equal(model(ids).logits, own)
    assert len(calls) == 2
    del model.model.forward
    assert torch.equal(model(ids).logits, own)


def test_an_earlier_patch_stays_inside() -> None:
    model = small_model("qwen3")
    original, shapes = model.model.forward, []

    def patch(*args: Any, **kwargs: Any) -> Any:
        shapes.append(kwargs["input_ids"].shape)
        return original(*args, **kwargs)

    model.model.forward = patch
    radixmlp.enable(model)
    shapes.clear()
    model(torch.tensor([[5, 6, 7]] * 4))
    assert shapes == [(1, 3)]
    radixmlp.disable(model)
    assert model.model.forward is patch


def test_a_deep_copy_uses_its_own_weights(close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7]] * 4)
    radixmlp.enable(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    got = twin(ids).logits
    assert model.radixmlp_stats.compacted == 0
    assert twin.radixmlp_stats.compacted == 1
    radixmlp.disable(twin)
    close(got, twin(ids).logits)
    model(ids)
    assert model.radixmlp_stats.compacted == 1


def test_pickles(close: Helper) -> None:
    model = small_model("qwen3")
    try:
        pickle.dumps(model)
    except AttributeError:
        pytest.skip("models of this transformers version cannot be pickled at all")
    ids = torch.tensor([[5, 6, 7]] * 4)
    radixmlp.enable(model)
    own = model(ids).logits
    loaded = pickle.loads(pickle.dumps(model))
    close(loaded(ids).logits, own)
    assert loaded.radixmlp_stats.compacted == 2


def test_saved_models(tmp_path: Any, close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7]] * 4)
    radixmlp.enable(model)
    own = model(ids).logits
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.to_dict().keys() == model.config.to_dict().keys()
    assert "radixmlp" not in (tmp_path / "config.json").read_text()
    close(type(model).from_pretrained(tmp_path)(ids).logits, own)


def test_two_models_of_one_config_and_two_threads(padded: Helper) -> None:
    model = small_model("qwen3")
    twin = type(model)(model.config).eval()
    ids, mask = padded(SEQUENCES, "right")
    expected = {id(m): m(ids, attention_mask=mask).logits.detach() for m in (model, twin)}
    radixmlp.enable(model, threshold=1.0)
    wrong: list[str] = []

    def run(which: Any, name: str) -> None:
        for _ in range(10):
            with torch.no_grad():
                got = which(ids, attention_mask=mask).logits
            own = expected[id(which)]
            if (got - own)[mask.bool()].abs().max() > 1e-5 * own.abs().max():
                wrong.append(name)

    threads = [
        threading.Thread(target=run, args=(m, n)) for m, n in ((model, "a"), (model, "b"), (twin, "twin"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert model.radixmlp_stats.compacted == 20


def test_replicas_run_their_own_weights(close: Helper) -> None:
    model = small_model("qwen3")
    radixmlp.enable(model)
    replica = model.lm_head._replicate_for_data_parallel()
    replica.weight, replica.bias = 2 * model.lm_head.weight.detach(), None
    x = torch.randn(2, 64)
    close(replica(x), 2 * model.lm_head(x))
    radixmlp.disable(model)
    assert "_replicate_for_data_parallel" not in vars(model.lm_head)


def test_an_implementation_chosen_later_is_not_taken_for_the_probed_one() -> None:
    from transformers import AttentionInterface

    def uniform(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None

    AttentionInterface.register("only-its-own-value", uniform)
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    radixmlp.enable(model)
    model.set_attn_implementation("only-its-own-value")
    got = model(ids).logits
    assert model.radixmlp_stats.compacted == 0
    radixmlp.disable(model)
    assert torch.equal(model(ids).logits, got)
    model.set_attn_implementation("eager")
    radixmlp.enable(model)
    model(ids)
    assert model.radixmlp_stats.compacted == 1


def test_a_model_called_inside_another_keeps_its_own_shape() -> None:
    outer, inner = small_model("qwen3"), small_model("llama")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    radixmlp.enable(outer)
    radixmlp.enable(inner)
    shapes: list[Any] = []
    outer.model.register_forward_hook(lambda *_: shapes.append(inner.model(ids).last_hidden_state.shape))
    outer(ids, logits_to_keep=1)
    assert shapes == [(3, 4, 64)]


def test_a_call_cut_short_leaves_no_hints() -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    radixmlp.enable(model)
    model.forward.plan((ids,), {"logits_to_keep": 1})  # and interrupted before anything else
    assert model.model(ids).last_hidden_state.shape == (3, 4, 64)


def test_a_module_of_two_models_is_refused() -> None:
    both = torch.nn.ModuleList([small_model("qwen3"), radixmlp.enable(small_model("llama"))])
    with pytest.raises(radixmlp.UnsupportedModelError, match="holds 2 transformers models"):
        radixmlp.enable(both)
    assert both[1].radixmlp_stats is not None
    assert "forward" in vars(both[1])


def test_checkpointing_in_several_threads() -> None:
    model = small_model("qwen3", torch.float64)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    before = [vars(m).get("_gradient_checkpointing_func") for m in model.modules()]
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9], [5, 6, 7, 8]])
    weight = model.model.layers[0].mlp.up_proj.weight
    own = torch.autograd.grad(model(ids, labels=ids).loss, weight)[0]
    radixmlp.enable(model)
    wrong: list[str] = []

    def run() -> None:
        for _ in range(5):
            try:
                got = torch.autograd.grad(model(ids, labels=ids).loss, weight)[0]
            except Exception as error:
                wrong.append(str(error))
            else:
                if (got - own).abs().max() > 1e-6 * own.abs().max():
                    wrong.append("differs")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [vars(m).get("_gradient_checkpointing_func") for m in model.modules()] == before


def test_half_precision_probes_beside_a_twin_of_one_config() -> None:
    model = small_model("qwen3", torch.bfloat16)
    twin = type(model)(model.config).eval()
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    own = twin(ids).logits
    wrong: list[int] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if not torch.equal(twin(ids).logits, own):
                wrong.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(5):
        radixmlp.disable(radixmlp.enable(model))
    stop.set()
    thread.join()
    assert not wrong
    assert model.config._attn_implementation == "sdpa"


def test_an_interrupted_forward_leaves_nothing_behind(close: Helper) -> None:
    model = small_model("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]] * 4)
    own = model(ids).logits
    radixmlp.enable(model)

    def interrupt(*_: Any, **__: Any) -> None:
        assert model.config._attn_implementation == "radixmlp"
        raise KeyboardInterrupt

    model.model.layers[1].forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(ids)
    del model.model.layers[1].forward
    assert model.config._attn_implementation == "sdpa"
    close(model(ids).logits, own)
    assert model.radixmlp_stats.compacted == 1
