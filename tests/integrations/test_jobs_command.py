"""`radixmlp embed`, `rerank` and `score` on a checkpoint in a folder: what they write is what the engine says."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from radixmlp import cli
from radixmlp.optimized.engine import Engine
from radixmlp.optimized.jobs.journal import Journal

PROMPT = " ".join(f"word{i}" for i in range(30))


@pytest.fixture
def folder(build: Callable[..., Any], saved: Callable[[Any], str], tokenizer: Any) -> Path:
    tokenizer.add_tokens(["yes", "no"])
    return Path(saved(build(AutoModelForCausalLM)))


def write(path: Path, lines: list[Any]) -> str:
    path.write_text(
        "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8"
    )
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_commands_write_what_the_engine_says(folder: Path, tmp_path: Path) -> None:
    engine = Engine.from_pretrained(folder)
    texts = [f"{PROMPT} word{i} word{i + 7}" for i in range(9)]
    source = write(tmp_path / "texts.jsonl", [{"text": text, "id": i} for i, text in enumerate(texts)])
    out = tmp_path / "out.npy"
    assert cli.main(["embed", source, "--model", str(folder), "--out", str(out), "--pooling", "mean"]) == 0
    np.testing.assert_allclose(np.load(out), engine.embed(texts, pooling="mean").numpy(), atol=1e-6)

    pairs = [{"query": f"word{i}", "passages": texts[i : i + 3]} for i in range(4)]
    source = write(tmp_path / "pairs.jsonl", pairs)
    arguments = ["--model", str(folder), "--max-batch-tokens", "200"]
    assert cli.main(["rerank", source, *arguments, "--out", str(tmp_path / "ranks.jsonl")]) == 0
    for pair, row in zip(pairs, rows_of(tmp_path / "ranks.jsonl"), strict=True):
        expected = engine.rerank(pair["query"], pair["passages"])
        torch.testing.assert_close(torch.tensor(row["scores"]), expected, atol=1e-6, rtol=1e-5)
        assert row["ranking"] == expected.argsort(descending=True, stable=True).tolist()

    lines = [{"prompt": text, "continuation": f" word{i} word1"} for i, text in enumerate(texts)]
    source = write(tmp_path / "lines.jsonl", [*lines, "no JSON"])
    assert cli.main(["score", source, "--model", str(folder), "--out", str(tmp_path / "scores.jsonl")]) == 1
    scores = engine.score(texts, [line["continuation"] for line in lines])
    got = rows_of(tmp_path / "scores.jsonl")
    torch.testing.assert_close(
        torch.tensor([row["logprob"] for row in got]), scores.logprobs, atol=1e-5, rtol=1e-5
    )
    assert [row["num_tokens"] for row in got] == scores.num_tokens.tolist()
    assert not list(tmp_path.glob("*.job"))


def test_wrong_use_says_what_to_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": PROMPT}, {"text": f"{PROMPT} {PROMPT}"}])
    out = tmp_path / "out.jsonl"
    model = ["--model", str(folder), "--out", str(out)]
    cases = [
        (["embed", str(tmp_path / "missing.jsonl"), *model], "cannot read"),
        (["embed", source, "--model", str(folder), "--out", str(tmp_path / "out.csv")], "ends in '.csv'"),
        (["embed", source, "--model", str(tmp_path / "nothing"), "--out", str(out)], "nothing"),
        (["embed", source, *model, "--attention", "none"], "no attention backend"),
        (["embed", source, *model, "--max-batch-tokens", "0"], "max_batch_tokens"),
        (["embed", source, *model, "--max-length", "40"], "line 2: request 1 has 60 tokens"),
    ]
    cases += [
        (["embed", source, "--model", str(folder), "--out", source, *more], "is the input")
        for more in ([], ["--restart"])
    ]
    (tmp_path / "link.jsonl").symlink_to(source)
    cases.append(
        (["embed", source, "--model", str(folder), "--out", str(tmp_path / "link.jsonl")], "is the input")
    )
    before = Path(source).read_bytes()
    for arguments, reason in cases:
        assert cli.main(arguments) == 2, arguments
        assert reason in capsys.readouterr().err
        assert not out.exists()
    assert Path(source).read_bytes() == before
    assert cli.main(["embed", source, *model, "--max-length", "40", "--truncate"]) == 0
    assert cli.main(["embed", source, *model]) == 2
    assert "exists" in capsys.readouterr().err
    assert cli.main(["embed", source, *model, "--restart"]) == 0


def test_killed_between_the_output_and_the_journals_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [{"text": PROMPT}])
    command = ["embed", source, "--model", str(folder), "--out", str(tmp_path / "out.jsonl")]
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", Journal.close)
        assert cli.main(command) == 0
    assert (tmp_path / "out.jsonl.job").exists()
    assert cli.main(command) == 0
    assert not (tmp_path / "out.jsonl.job").exists()


@pytest.mark.slow
def test_killed_commands_go_on(folder: Path, tmp_path: Path) -> None:
    texts = [{"text": f"{PROMPT} word{i} word{i % 13}", "id": i} for i in range(3000)]
    source, out = write(tmp_path / "in.jsonl", texts), tmp_path / "out.jsonl"
    command = [sys.executable, "-P", "-m", "radixmlp.cli", "embed", source, "--model", str(folder)]
    command += ["--max-batch-tokens", "256", "--out", str(out)]
    journal, moments, kills = tmp_path / "out.jsonl.job", random.Random(0), 0
    while True:
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while kills < 4 and process.poll() is None and not journal.exists():
            time.sleep(0.01)
        if kills < 4:
            time.sleep(moments.uniform(0.1, 4.0))
            process.send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=300)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said
        kills += 1
    assert b"3000 requests" in said
    rows = rows_of(out)
    assert [row["id"] for row in rows] == list(range(3000))
    engine = Engine.from_pretrained(folder)
    expected = engine.embed([entry["text"] for entry in texts])
    torch.testing.assert_close(
        torch.tensor([row["embedding"] for row in rows]), expected, atol=1e-5, rtol=1e-5
    )
