"""The calibration: what it measures, what it leaves alone, and where it is kept."""

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import radixmlp
from radixmlp.optimized.attention.trie_sdpa import TrieSdpa
from radixmlp.optimized.cost import CostModel, known, store
from radixmlp.optimized.cost.calibration import calibrate
from radixmlp.reference import RaggedBatch

BATCH = RaggedBatch.from_sequences([[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 20, 21], [5, 6, 7, 30]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is read from or written to the user's own cache, or kept from another test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known.forget()
    return tmp_path / "cache"


def tiny(family: str = "qwen3", auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 97,
        "pad_token_id": 0,
        **changes,
    }
    return auto.from_config(AutoConfig.for_model(family, **sizes)).eval()


def calm(cost: CostModel) -> CostModel:
    """As on a machine that does nothing else."""
    return CostModel(**{**vars(cost), "calm": True})


def calmly(model: Any, key: dict[str, str]) -> CostModel:
    return calm(calibrate(model, key))


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_calibration_says_what_a_layer_costs(layers: int) -> None:
    cost = calibrate(tiny(num_hidden_layers=layers), {"device": "here"})
    assert (cost.layers, cost.query_heads, cost.kv_heads, cost.device_type) == (layers, 4, 2, "cpu")
    assert cost.candidates == ("trie-sdpa", "dense-sdpa", "scatter-sdpa")
    assert [rows for rows, _ in cost.row_seconds] == sorted({rows for rows, _ in cost.row_seconds})
    assert all(seconds > 0 for _, seconds in cost.row_seconds)
    assert set(cost.attention) == {"parts"}
    assert sum(cost.attention["parts"]) > 0
    assert cost.copy_seconds > 0
    assert cost.seconds > 0
    predicted = cost.predict(radixmlp.build_plan(BATCH))
    assert set(predicted) == {"trie-sdpa", "scatter-sdpa", "dense-sdpa"}
    assert all(seconds > 0 for seconds in predicted.values())


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mixtral"])
def test_any_family_is_calibrated(family: str) -> None:
    changes = {"num_local_experts": 4} if family in ("gpt_oss", "mixtral") else {}
    cost = calibrate(tiny(family, sliding_window=16, attn_implementation="eager", **changes), {})
    assert cost.candidates[0] == "trie-sdpa"
    assert cost.layers == 3


def test_a_decoder_alone_is_calibrated() -> None:
    assert calibrate(tiny(auto=AutoModel), {}).layers == 3


def state_of(model: Any) -> dict[str, Any]:
    return {
        "training": {name: module.training for name, module in model.named_modules()},
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "hooks": {
            name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()
        },
        "tensors": {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()},
        "implementation": model.config._attn_implementation,
        "gradients": [parameter.grad for parameter in model.parameters()],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, (place, values) in before.pop("tensors").items():
        assert after["tensors"][name][0] == place
        assert torch.equal(after["tensors"][name][1], values)
    after.pop("tensors")
    assert before == after


@pytest.mark.parametrize("context", ["plain", "inference", "autocast", "no_grad"])
def test_nothing_is_left_behind(context: str) -> None:
    model = tiny()
    contexts = {
        "plain": torch.enable_grad(),
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no_grad": torch.no_grad(),
    }
    before, rng = state_of(model), torch.get_rng_state()
    with contexts[context]:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")
        cost = calibrate(model, {})
        assert modes == (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
        )
    assert cost.candidates
    assert torch.equal(torch.get_rng_state(), rng)
    assert torch.get_default_dtype() is torch.float32
    assert_same(before, state_of(model))
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_failed_calibration_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()

    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", fail)
    before = state_of(model)
    cost = CostModel.for_model(model)
    assert cost.failure == "MemoryError: no room"
    assert cost.choose(radixmlp.build_plan(BATCH)).attention == "trie-sdpa"
    assert_same(before, state_of(model))


def test_a_backend_that_cannot_serve_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrieSdpa, "unsupported", lambda *_: "not today")
    assert calibrate(tiny(), {}).candidates == ("dense-sdpa", "scatter-sdpa")

    def refuse(*_: Any) -> None:
        raise radixmlp.UnsupportedAttentionError("not these heads")

    monkeypatch.undo()
    monkeypatch.setattr(TrieSdpa, "__call__", refuse)
    cost = calmly(tiny(), {})
    assert cost.candidates == ("dense-sdpa", "scatter-sdpa")
    assert cost.choose(radixmlp.build_plan(BATCH)).attention in ("dense-sdpa", "scatter-sdpa")


def test_an_enabled_models_own_calls_go_on_beside_a_calibration() -> None:
    model = radixmlp.enable(tiny())
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    with torch.no_grad():
        expected = model(ids).logits
        got: list[torch.Tensor] = []
        stop = threading.Event()

        def call() -> None:
            with torch.no_grad():
                while not stop.is_set():
                    got.append(model(ids).logits)

        thread = threading.Thread(target=call)
        thread.start()
        assert calibrate(model, {}).candidates
        stop.set()
        thread.join()
    assert got
    assert all(torch.equal(logits, expected) for logits in got)


def test_a_calibration_is_kept_on_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "calibrate", calmly)
    cost = CostModel.for_model(tiny())
    (file,) = cache.rglob("*.json")
    assert json.loads(file.read_text())["key"]["threads"] == str(torch.get_num_threads())
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # and nothing half written
    known.forget()
    monkeypatch.setattr(known, "calibrate", lambda *_: pytest.fail("it was known"))
    assert CostModel.for_model(tiny()) == cost


def test_a_refresh_calibrates_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(model: Any, key: dict[str, str]) -> CostModel:
        made.append(key)
        return calmly(model, key)

    monkeypatch.setattr(known, "calibrate", counted)
    model = tiny()
    CostModel.for_model(model)
    cost = CostModel.for_model(model, refresh=True)
    assert len(made) == 2
    known.forget()
    assert CostModel.for_model(model) == cost


def test_other_shapes_dtypes_and_threads_have_calibrations_of_their_own() -> None:
    model = tiny()
    keys = [store.key_of(m, m.model) for m in (model, tiny(intermediate_size=56), tiny().bfloat16())]
    assert len({json.dumps(key) for key in keys}) == 3
    assert len({store.path_of(key) for key in keys}) == 3
    assert store.key_of(tiny(), tiny().model) == keys[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"key": 1}', "\x00\xff", '{"layers": 1e999}'])
def test_a_broken_file_is_as_good_as_none(content: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "calibrate", calmly)
    model = tiny()
    path = store.path_of(store.key_of(model, model.model))
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("latin-1"))
    assert CostModel.for_model(model).unusable is None
    assert json.loads(path.read_text())["layers"] == 3


def test_a_file_of_another_key_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    key = store.key_of(model, model.model)
    store.save(calm(calibrate(model, key)))
    path = store.path_of(key)
    assert path is not None
    assert store.load(key) is not None
    path.write_text(path.read_text().replace(key["device"], "another machine"))
    assert store.load(key) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "calibrate", calmly)
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert CostModel.for_model(tiny()).unusable is None
    known.forget()
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setenv("XDG_CACHE_HOME", str(closed))
    assert CostModel.for_model(tiny()).unusable is None


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")

    def homeless() -> Path:
        raise RuntimeError("no home")

    monkeypatch.setattr(Path, "home", homeless)
    assert store.path_of({}) is None
    assert store.load({}) is None
    store.save(CostModel({}))


def test_the_cache_lies_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    path = store.path_of({"a": "b"})
    assert path is not None
    assert os.path.commonpath([path, tmp_path / ".cache" / "radixmlp"]) == str(
        tmp_path / ".cache" / "radixmlp"
    )
