"""Where `"auto"` asks the cost model, what it then runs, and that values do not depend on it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import radixmlp
from radixmlp.optimized.cost import CostModel, choice, choose_attention, fixed_rule, known, use_cost_model
from radixmlp.optimized.cost.calibration import calibrate
from radixmlp.reference import RaggedBatch

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 20, 21], [5, 6, 7, 8, 9, 30, 31, 32], [5, 6, 40]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to the user's own cache, or kept from another test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known.forget()


@pytest.fixture
def no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "LEAST_FLOPS", 0.0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often a calibration was asked for; each is a pinned one."""
    made: list[str] = []

    def pretend(model: Any, key: dict[str, str]) -> CostModel:
        made.append(type(model).__name__)
        return preferring("scatter-sdpa")

    monkeypatch.setattr(known, "calibrate", pretend)
    return made


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
        **changes,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def preferring(attention: str) -> CostModel:
    """A calibration under which `attention` is always the fastest."""
    pieces, copies = {"dense-sdpa": (1.0, 1.0), "scatter-sdpa": (1.0, 0.0), "trie-sdpa": (0.0, 1.0)}[
        attention
    ]
    return CostModel(
        {},
        layers=3,
        query_heads=4,
        kv_heads=2,
        device_type="cuda",  # where attention in pieces and per sequence have costs of their own
        candidates=("trie-sdpa", "dense-sdpa", "scatter-sdpa"),
        row_seconds=((16, 1e-6), (256, 16e-6)),
        attention={"parts": (pieces, 0.0, 0.0), "fused": (0.0, 0.0, 0.0)},
        copy_seconds=copies,
    )


def batch() -> RaggedBatch:
    return RaggedBatch.from_sequences(SEQUENCES)


def test_values_do_not_depend_on_the_choice() -> None:
    model = tiny()
    with torch.no_grad():
        expected = radixmlp.forward(model, batch(), attention="dense-sdpa")
        for attention in ("dense-sdpa", "scatter-sdpa", "trie-sdpa"):
            with use_cost_model(preferring(attention)):
                out = radixmlp.forward(model, batch())
            assert out.choice is not None
            assert out.choice.attention == attention
            assert out.attention == ("dense-sdpa" if attention == "dense-sdpa" else "auto")
            assert out.plan.num_nodes == (24 if attention == "dense-sdpa" else 13)
            torch.testing.assert_close(out.logits, expected.logits, rtol=1e-4, atol=1e-5)
    assert expected.choice is None


@pytest.mark.parametrize("attention", ["scatter-sdpa", "trie-sdpa"])
def test_the_chosen_attention_is_the_one_that_runs(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    backends = radixmlp.attention_backends()
    for name in ("scatter-sdpa", "trie-sdpa"):
        kind = type(backends[name])

        def noted(self: Any, *args: Any, original: Any = kind.__call__) -> Any:
            ran.append(self.name)
            return original(self, *args)

        monkeypatch.setattr(kind, "__call__", noted)
    model = tiny()
    radixmlp.forward(model, batch(), threshold=1.0)
    ran.clear()
    with use_cost_model(preferring(attention)):
        radixmlp.forward(model, batch())
    assert ran == [attention] * 3


def test_a_layer_that_the_chosen_attention_refuses_runs_on_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(radixmlp.attention_backends()["scatter-sdpa"])

    def refuse(*_: Any) -> Any:
        raise radixmlp.UnsupportedAttentionError("not these heads")

    model = tiny()
    expected = radixmlp.forward(model, batch()).logits
    monkeypatch.setattr(kind, "__call__", refuse)
    with use_cost_model(preferring("scatter-sdpa")):
        torch.testing.assert_close(radixmlp.forward(model, batch()).logits, expected)
    with pytest.raises(radixmlp.UnsupportedAttentionError, match=r"^not these heads$"):
        radixmlp.forward(model, batch(), attention="scatter-sdpa")


def test_small_batches_do_not_calibrate(calls: list[str]) -> None:
    out = radixmlp.forward(tiny(), batch())
    assert out.choice is not None
    assert out.choice.attention == "trie-sdpa"
    assert "small" in out.choice.reason
    assert calls == []


def test_above_the_threshold_nobody_is_asked(calls: list[str], no_floor: None) -> None:
    out = radixmlp.forward(tiny(), batch(), threshold=0.1)
    assert out.choice is not None
    assert out.choice.attention == out.attention == "dense-sdpa"
    assert "above the threshold of 0.1" in out.choice.reason
    assert calls == []


def test_one_calibration_serves_a_model(calls: list[str], no_floor: None) -> None:
    model = tiny()
    for _ in range(3):
        out = radixmlp.forward(model, batch())
        assert out.choice is not None
        assert out.choice.attention == "scatter-sdpa"
    assert calls == ["Qwen3ForCausalLM"]
    radixmlp.forward(tiny(), batch())  # another object of the same shape
    assert len(calls) == 1
    radixmlp.forward(tiny(use_sliding_window=False, attention_bias=True), batch())
    assert len(calls) == 2


def _under_a_mode(run: Callable[[], Any]) -> Any:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode():
        return run()


def _under_autocast(run: Callable[[], Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return run()


def _switched_off(run: Callable[[], Any]) -> Any:
    with fixed_rule():
        return run()


@pytest.mark.parametrize(
    ("within", "why"),
    [(_under_a_mode, "mode"), (_under_autocast, "autocast"), (_switched_off, "switched off")],
)
def test_no_calibration_where_it_would_be_wrong(
    within: Callable[[Callable[[], Any]], Any], why: str, calls: list[str], no_floor: None
) -> None:
    model = tiny()
    plan = radixmlp.build_plan(batch())
    made = within(lambda: choose_attention(model, plan))
    assert made.attention == "trie-sdpa"
    assert why in made.reason
    assert calls == []


def test_no_calibration_in_training_or_of_modules_that_others_steer(calls: list[str], no_floor: None) -> None:
    plan = radixmlp.build_plan(batch())
    model = tiny()
    model.model.layers[1].train()
    assert "training" in choose_attention(model, plan).reason
    model.eval()
    model.model.layers[0]._hf_hook = object()
    assert "hooks" in choose_attention(model, plan).reason
    del model.model.layers[0]._hf_hook
    with torch.device("cpu"):  # a default device is no such mode
        assert choose_attention(model, plan).attention == "scatter-sdpa"
    assert len(calls) == 1


def test_a_calibration_that_fails_breaks_no_forward(monkeypatch: pytest.MonkeyPatch, no_floor: None) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(known, "calibrate", fail)
    model = tiny()
    out = radixmlp.forward(model, batch())
    assert out.choice is not None
    assert out.choice.attention == "trie-sdpa"
    assert "RuntimeError: out of luck" in out.choice.reason
    assert CostModel.for_model(model).failure == "RuntimeError: out of luck"


def test_a_disturbed_calibration_is_not_used_and_tried_again_a_few_times(
    monkeypatch: pytest.MonkeyPatch, no_floor: None
) -> None:
    made = []

    def disturbed(model: Any, key: dict[str, str]) -> CostModel:
        made.append(key)
        return CostModel(**{**vars(preferring("dense-sdpa")), "key": key, "calm": False})

    monkeypatch.setattr(known, "calibrate", disturbed)
    model = tiny()
    for _ in range(3):
        out = radixmlp.forward(model, batch())
        assert out.choice is not None
        assert out.choice.attention == "trie-sdpa"
        assert "busy" in out.choice.reason
    assert len(made) == 1
    monkeypatch.setattr(known, "PAUSE", 0.0)
    for _ in range(5):
        radixmlp.forward(model, batch())
    assert len(made) == known.ATTEMPTS


def _padded() -> tuple[torch.Tensor, torch.Tensor]:
    length = max(map(len, SEQUENCES))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in SEQUENCES])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in SEQUENCES])
    return ids, mask


@pytest.mark.parametrize("strict", [False, True])
def test_the_drop_in_runs_and_counts_what_is_chosen(strict: bool) -> None:
    model = tiny()
    ids, mask = _padded()
    with torch.no_grad():
        own = model(ids, attention_mask=mask).logits
        radixmlp.enable(model, strict=strict)
        for attention in ("dense-sdpa", "scatter-sdpa", "trie-sdpa", "trie-sdpa"):
            with use_cost_model(preferring(attention)):
                got = model(ids, attention_mask=mask).logits
            torch.testing.assert_close(got[mask.bool()], own[mask.bool()], rtol=1e-4, atol=1e-5)
    stats = model.radixmlp_stats
    assert stats.choices == {"model": 1, "scatter-sdpa": 1, "trie-sdpa": 2}
    assert stats.dense == {"predicted to be no faster": 1}
    assert stats.compacted == 3


def test_the_probe_of_enable_runs_on_the_trie_whatever_is_predicted() -> None:
    with use_cost_model(preferring("dense-sdpa")):
        model = radixmlp.enable(tiny())
    assert model.radixmlp_stats.choices == {}


def test_threads_calibrate_once(monkeypatch: pytest.MonkeyPatch, no_floor: None) -> None:
    model, made, out = tiny(), [], []

    def slow(model: Any, key: dict[str, str]) -> CostModel:
        made.append(threading.get_ident())
        return CostModel(**{**vars(calibrate(model, key)), "calm": True})

    monkeypatch.setattr(known, "calibrate", slow)
    radixmlp.forward(model, batch(), attention="trie-sdpa")
    threads = [
        threading.Thread(target=lambda: out.append(radixmlp.forward(model, batch()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(out) == 4
    assert len(made) == 1
