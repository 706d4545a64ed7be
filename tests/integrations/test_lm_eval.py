"""lm-evaluation-harness on a local multiple-choice task: an enabled model gives the dense scores."""

from __future__ import annotations

import inspect
import random
import runpy
import sys
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import radixmlp
from radixmlp.optimized.integration.lm_eval import RadixHFLM
from radixmlp.verify import lm_eval_bench, rules, smollm2
from radixmlp.verify.lm_eval_task import Variant
from radixmlp.verify.lm_eval_task import local_task as local_topics

TASK = "local_choices"


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"word{rng.randrange(400)}" for _ in range(count))


def documents(count: int, seed: int) -> list[dict[str, Any]]:
    """Questions with four choices of one to four tokens; some choices start alike, some questions as well."""
    rng = random.Random(seed)
    start = words(rng, 3)
    found = []
    for number in range(count):
        question = f"{start if number % 2 else ''} {words(rng, rng.randint(2, 6))}".strip()
        first = words(rng, 1)
        choices = [first, f"{first} {words(rng, 1)}", words(rng, 1), words(rng, rng.randint(2, 4))]
        found.append({"question": question, "choices": choices, "answer": rng.randrange(4)})
    return found


def local_task(shots: int = 5, output_type: str = "multiple_choice") -> ConfigurableTask:
    splits = {"train": documents(6, 0), "test": documents(10, 1)}
    config = {
        "task": TASK,
        "custom_dataset": lambda **_: datasets.DatasetDict(
            {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
        ),
        "training_split": "train",
        "fewshot_split": "train",
        "test_split": "test",
        "output_type": output_type,
        "doc_to_text": "Question: {{question}} ? Answer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "num_fewshot": shots,
        "fewshot_config": {"sampler": "first_n"},
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
        ],
    }
    return ConfigurableTask(config=config)


def run(
    lm: Any, shots: int = 5
) -> tuple[dict[str, float], list[list[tuple[float, bool]]], list[list[float]]]:
    """(scores, the answers of each item, whether each item was right by each metric)."""
    result = evaluate(lm, {TASK: local_task(shots)}, bootstrap_iters=0, log_samples=True)
    scores = {k: v for k, v in result["results"][TASK].items() if k.startswith("acc") and "stderr" not in k}
    samples = sorted(result["samples"][TASK], key=lambda sample: sample["doc_id"])
    answers = [sample["filtered_resps"] for sample in samples]
    return scores, answers, [[sample["acc"], sample["acc_norm"]] for sample in samples]


def same(got: Any, expected: Any, close: Any) -> None:
    """Equal scores and predictions item by item; log-probabilities to 1e-5 of the largest."""
    assert got[0] == expected[0]
    assert got[2] == expected[2]
    for place in (0, 1):
        ours, theirs = ([answer[place] for item in run[1] for answer in item] for run in (got, expected))
        if place:
            assert ours == theirs
        else:
            close(ours, theirs)


def predictions(answers: list[list[tuple[float, bool]]]) -> list[int]:
    return [max(range(len(item)), key=lambda choice: item[choice][0]) for item in answers]


@pytest.fixture
def model(build: Callable[..., Any]) -> Any:
    return build(AutoModelForCausalLM)


@pytest.fixture
def dense(model: Any, tokenizer: Any) -> Any:
    return run(HFLM(model, tokenizer=tokenizer, batch_size=8))


def test_hflm_with_an_enabled_model(model: Any, tokenizer: Any, dense: Any, close: Any) -> None:
    radixmlp.enable(model)
    got = run(HFLM(model, tokenizer=tokenizer, batch_size=8))
    same(got, dense, close)
    assert predictions(got[1]) == predictions(dense[1])
    assert len(set(predictions(dense[1]))) > 1
    stats = model.radixmlp_stats
    assert stats.compacted >= 4
    assert not stats.dense
    assert stats.rows < 0.35 * stats.slots


@pytest.mark.parametrize("batch_size", [1, 8, "auto"])
def test_loglikelihoods_from_compact_rows(
    model: Any, tokenizer: Any, dense: Any, close: Any, batch_size: Any
) -> None:
    lm = RadixHFLM(model, tokenizer=tokenizer, batch_size=batch_size, max_batch_size=16)
    got = run(lm)
    same(got, dense, close)
    stats = model.radixmlp_stats
    if batch_size == 1:
        assert stats.dense["little to share"] == stats.batches
    else:
        assert stats.compacted >= 2
        assert stats.rows < 0.35 * stats.slots
        assert stats.index_seconds > 0


def test_the_head_runs_on_the_continuations_alone(model: Any, tokenizer: Any) -> None:
    lm = RadixHFLM(model, tokenizer=tokenizer, batch_size=64)
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda _module, args, _out: rows.append(args[0].shape[1]))
    requests = [
        Instance("loglikelihood", {}, ("word1 word2 word3 word4", f" word{i} word{i + 1}"), i)
        for i in range(9)
    ]
    lm.loglikelihood(requests, disable_tqdm=True)
    assert rows == [1 + 9]  # the context's last token, and the first token of each continuation


def test_answers_come_in_the_order_of_the_requests_and_reach_the_cache(
    model: Any, tokenizer: Any, close: Any
) -> None:
    """Also inputs given twice, and one input cut into context and continuation at different places."""
    pairs = [
        ("word1 word2", " word3 word4 word5"),
        ("word1 word2 word3", " word4 word5"),
        ("word9", " word8"),
        ("word1 word2 word3 word4", " word5"),
        ("word1 word2 word3 word4", " word6"),
        ("word9", " word8"),
        ("", "word7 word8"),
    ]
    requests = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
    # With its cache, `HFLM` reads a shorter continuation of an input off the rows of the longest one's beginning.
    own = HFLM(model, tokenizer=tokenizer, logits_cache=False).loglikelihood(requests, disable_tqdm=True)
    lm = RadixHFLM(model, tokenizer=tokenizer, batch_size=3)
    stored: dict[Any, Any] = {}
    lm.cache_hook.add_partial = lambda kind, key, answer: stored.update({(kind, *key): answer})
    got = lm.loglikelihood(requests, disable_tqdm=True)
    close([answer[0] for answer in got], [answer[0] for answer in own])
    assert [answer[1] for answer in got] == [answer[1] for answer in own]
    assert {("loglikelihood", *pair): answer for pair, answer in zip(pairs, got, strict=True)} == stored


def test_rolling_loglikelihoods_and_truncation(model: Any, tokenizer: Any, close: Any) -> None:
    texts = [" ".join(f"word{i % (7 + place)}" for i in range(30 + place)) for place in range(3)]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), place) for place, text in enumerate(texts)]
    long = [
        Instance("loglikelihood", {}, (text, " word1 word2 word3"), place) for place, text in enumerate(texts)
    ]
    results = []
    for kind in (HFLM, RadixHFLM):
        lm = kind(model, tokenizer=tokenizer, batch_size=4, max_length=16)
        answers = lm.loglikelihood(long, disable_tqdm=True)
        results.append(
            [*lm.loglikelihood_rolling(rolling, disable_tqdm=True), *(answer[0] for answer in answers)]
        )
    close(results[1], results[0])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_requests(model: Any, tokenizer: Any, close: Any, data: st.DataObject) -> None:
    token = st.integers(20, 23)
    sides = st.tuples(st.lists(token, min_size=1, max_size=8), st.lists(token, min_size=1, max_size=4))
    requests = [(None, *pair) for pair in data.draw(st.lists(sides, min_size=1, max_size=8))]
    size, most = data.draw(st.integers(1, 4)), data.draw(st.integers(4, 16))
    options = {"tokenizer": tokenizer, "batch_size": size, "max_length": most, "logits_cache": False}
    lms = [kind(model, **options) for kind in (HFLM, RadixHFLM)]
    own, got = (lm._loglikelihood_tokens(requests, disable_tqdm=True) for lm in lms)
    close([answer[0] for answer in got], [answer[0] for answer in own])


def test_what_cannot_be_compacted_is_scored_as_ever(model: Any, tokenizer: Any) -> None:
    """Virtual tokens of prompt tuning stand before every sequence: the harness' own code runs."""
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    torch.nn.init.normal_(tuned.prompt_encoder["default"].embedding.weight)
    own = run(HFLM(tuned, tokenizer=tokenizer, batch_size=8), 1)
    got = run(RadixHFLM(tuned, tokenizer=tokenizer, batch_size=8), 1)
    assert got[0] == own[0]
    assert torch.allclose(torch.tensor(got[1]), torch.tensor(own[1]), rtol=1e-5)
    assert tuned.radixmlp_stats.compacted == 0


def test_an_adapted_model(model: Any, tokenizer: Any, dense: Any, close: Any) -> None:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "up_proj"])).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    own = run(HFLM(adapted, tokenizer=tokenizer, batch_size=8))
    assert own[1] != dense[1]
    same(run(RadixHFLM(adapted, tokenizer=tokenizer, batch_size=8)), own, close)
    assert adapted.radixmlp_stats.compacted >= 4


def test_generation(model: Any, tokenizer: Any) -> None:
    prompts = [
        f"word1 word2 word3 word4 word5 word{6 + place}" + " word9" * (place % 2) for place in range(6)
    ]
    options = {"until": ["word0"], "max_gen_toks": 6}
    requests = [
        Instance("generate_until", {}, (prompt, options), place) for place, prompt in enumerate(prompts)
    ]
    own = HFLM(model, tokenizer=tokenizer, batch_size=3).generate_until(requests, disable_tqdm=True)
    lm = RadixHFLM(model, tokenizer=tokenizer, batch_size=3)
    assert lm.generate_until(requests, disable_tqdm=True) == own
    assert model.radixmlp_stats.compacted == 2


def test_mixed_precision(model: Any, tokenizer: Any, dense: Any) -> None:
    options = {"tokenizer": tokenizer, "batch_size": 8, "mixed_precision_dtype": "bfloat16"}
    exact, own = (torch.tensor(found[1])[..., 0] for found in (dense, run(HFLM(model, **options))))
    got = torch.tensor(run(RadixHFLM(model, **options))[1])[..., 0]
    assert model.radixmlp_stats.compacted >= 4
    assert (own - exact).norm() > 1e-4 * exact.norm()
    assert (got - exact).norm() <= 1.2 * (own - exact).norm()


def test_it_is_found_by_name_and_loads_a_checkpoint(
    model: Any, saved: Callable[..., str], tokenizer: Any, dense: Any, close: Any
) -> None:
    lm = get_model("radixmlp").create_from_arg_obj(
        {"pretrained": saved(model), "dtype": "float32"}, {"batch_size": 8, "device": "cpu"}
    )
    assert type(lm) is RadixHFLM
    same(run(lm), dense, close)
    assert lm.model.radixmlp_stats.compacted


def test_settings_of_an_enabled_model_stay(model: Any, tokenizer: Any) -> None:
    radixmlp.enable(model, threshold=0.0)
    lm = RadixHFLM(model, tokenizer=tokenizer, batch_size=8)
    run(lm, 1)
    assert model.radixmlp_stats.compacted == 0
    with pytest.raises(radixmlp.UnsupportedAttentionError, match="nonsense"):
        RadixHFLM(radixmlp.disable(model), tokenizer=tokenizer, attention="nonsense")


def test_requests_that_cannot_be_scored_are_named(model: Any, tokenizer: Any) -> None:
    lm = RadixHFLM(model, tokenizer=tokenizer, max_length=4)
    for request in ((None, [], [5]), (None, [5], []), (None, [5], [5] * 5)):
        with pytest.raises(ValueError, match="request 1 has"):
            lm._loglikelihood_tokens([(None, [5], [6]), request], disable_tqdm=True)


def test_no_requests(model: Any, tokenizer: Any) -> None:
    for size in (0, 4, "auto"):
        assert RadixHFLM(model, tokenizer=tokenizer, batch_size=size)._loglikelihood_tokens([]) == []


def test_without_the_harness_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsourcefile(RadixHFLM)
    assert source is not None
    monkeypatch.setitem(sys.modules, "lm_eval.api.registry", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'radixmlp\[integrations\]'"):
        runpy.run_path(source)


@pytest.mark.slow
def test_the_benchmark_on_smollm2() -> None:
    """The same predictions in fp32, and every batch on the trie."""
    result = lm_eval_bench.main(["--items-per-round", "2", "--rounds", "1"])
    assert result["wrong"] is None
    assert result["differing_items"] == 0
    assert result["largest_difference"] <= 1e-5
    assert result["items"] == 2
    assert 3 < result["r"] < result["compact_r"]
    assert 1 < result["ceiling_with_expansion"] < result["ceiling"] < result["r"]
    assert [bar.name for bar in lm_eval_bench.bars_of(result)]


@pytest.mark.slow
def test_smollm2_in_bf16_is_as_close_to_fp32_as_dense_is() -> None:
    def scores(kind: Any, dtype: torch.dtype, enabled: bool) -> torch.Tensor:
        model = smollm2.load_model(dtype, "sdpa").eval()
        if enabled:
            radixmlp.enable(model)
        variant = Variant(kind(model, tokenizer=smollm2.load_tokenizer(), batch_size=8))
        variant.run(local_topics(), [0, 1])
        assert not variant.dense_reasons
        return torch.tensor([answer[0] for item in (0, 1) for answer in variant.answers[item]])

    truth = scores(HFLM, torch.float32, False)
    allowed = rules.LARGEST_FACTOR * (scores(HFLM, torch.bfloat16, False) - truth).abs().max()
    allowed += rules.floor_of(torch.bfloat16, float(truth.abs().max()))
    for kind in (HFLM, RadixHFLM):
        assert (scores(kind, torch.bfloat16, True) - truth).abs().max() <= allowed
