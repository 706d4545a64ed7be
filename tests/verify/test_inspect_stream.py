"""A file of any length is inspected in bounded memory."""

import json
import subprocess
import sys
import tracemalloc

import pytest

from radixmlp.optimized.jobs.requests import Request
from radixmlp.verify.inspect.counting import inspect_requests
from radixmlp.verify.inspect.inspection import Options
from radixmlp.verify.inspect.templates import find_templates
from radixmlp.verify.inspect.tokenizing import ByteTokenizer

BYTES = ByteTokenizer()


def requests(count):
    for i in range(count):
        yield Request(
            i + 1,
            None,
            "text",
            {"text": f"Name the topic of message {i % 97}: order {i * 7919 % 9973} is late"},
        )


def peak(count, options):
    """(most bytes held at once, what was found)."""
    tracemalloc.start()
    try:
        found = inspect_requests(requests(count), BYTES, find_templates(None, BYTES), options)
        return tracemalloc.get_traced_memory()[1], found
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_number_of_requests():
    options = Options(max_batch_tokens=2_000, pool_tokens=40_000, head_sequences=50)
    few, _ = peak(3_000, options)
    many, found = peak(9_000, options)
    assert many < 1.15 * few
    assert found.requests == found.main.surveys["prefix"].total.sequences == 9_000
    assert not found.head.complete
    assert len(found.head.texts) == 50
    assert found.main.whole is None
    assert found.main.surveys["prefix"].pools > 3


def test_pools_cost_little_over_one_pool():
    options = {"max_batch_tokens": 2_000, "head_sequences": 10}
    templates = find_templates(None, BYTES)
    whole, pools = (
        inspect_requests(requests(4_000), BYTES, templates, Options(**options, **more))
        for more in ({}, {"pool_tokens": 40_000})
    )
    assert whole.main.surveys["prefix"].pools == 1
    fifo, cut = (found.main.surveys["fifo"] for found in (whole, pools))
    assert [batch.sequences for batch in fifo.batches] == [batch.sequences for batch in cut.batches]
    assert pools.main.surveys["prefix"].total.rows < 1.5 * whole.main.surveys["prefix"].total.rows


PEAK = """
import json, resource, sys
from radixmlp.verify.inspect.command import main

code = main([sys.argv[1], "--tokenizer", "bytes", "--tree-lines", "0"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps([code, peak]))
"""


@pytest.mark.slow
def test_a_million_requests_stay_below_a_gigabyte_and_a_half(tmp_path):
    peaks = []
    for count in (200_000, 1_000_000):
        file = tmp_path / f"{count}.jsonl"
        with file.open("w") as lines:
            for i in range(count):
                lines.write(
                    f'{{"text": "Name the topic of message {i % 977}: order {i * 7919 % 1000003} is late"}}\n'
                )
        run = subprocess.run(
            [sys.executable, "-P", "-c", PEAK, str(file)], capture_output=True, text=True, timeout=900
        )
        assert run.returncode == 0, run.stderr
        code, used = json.loads(run.stdout.splitlines()[-1])
        assert code == 0
        assert f"{count:,} requests" in run.stdout
        peaks.append(used)
    assert peaks[1] < 1.5e9
    assert peaks[1] < 1.15 * peaks[0]
