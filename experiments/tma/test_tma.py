"""The descriptor kernel: values in the interpreter, bulk copies in the machine code, a report of every number.

Whether Triton interprets or compiles is settled when it is imported, so both run in processes of their own.
"""

from __future__ import annotations

import json
import math

import pytest

from radixmlp.verify.experiments import load_experiment

EXPERIMENT = load_experiment("tma")


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("triton")
    return json.loads(json.dumps(EXPERIMENT.measure(True, lambda _: None)))


@pytest.mark.slow
def test_values_and_machine_code(measured):
    assert all(case["error"] <= case["limit"] for case in measured["values"])
    assert {case["kernel"] for case in measured["values"]} == {
        "descriptors",
        "descriptors, specialised warps",
    }
    shipped, plain, specialised = measured["kernels"]
    assert shipped["tma"] == 0
    for each in (plain, specialised):
        assert each["tma"] > 0
        assert each["tma"] == each["instructions"]
        assert each["spills"] == 0
        assert each["wgmma"] > 0
    assert specialised["specialised"]
    assert not plain["specialised"]
    refused, compiled = measured["tried"]
    assert refused["reason"]
    assert refused["registers"] is None
    assert compiled["specialised"]


@pytest.mark.slow
def test_the_report_names_what_was_found(measured):
    text = EXPERIMENT.report(measured)
    assert all(each["tried"] in text for each in measured["tried"])
    assert ("Not timed" in text) == (not measured["timed"])


def test_a_wrong_kernel_is_neither_compiled_nor_timed(monkeypatch):
    def in_process(module, quick, **environment):
        assert module == "values"
        return [{"kernel": "descriptors", "error": math.nan, "limit": 1.0}]

    monkeypatch.setattr(EXPERIMENT, "_in_process", in_process)
    with pytest.raises(ValueError, match="nothing is compiled or timed"):
        EXPERIMENT.measure(True, lambda _: None)


def test_a_child_that_fails_is_an_error_with_its_output():
    with pytest.raises(RuntimeError, match=r"has no no_such_module\.py"):
        EXPERIMENT._in_process("no_such_module", True)
