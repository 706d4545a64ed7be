"""Reading queries and passages: the three published shapes, and errors that name the line."""

import json
import re

import pytest

from radixmlp.verify import passages
from radixmlp.verify.passages import RankedPassages, load_passages

TEXTS = ["first passage", "second passage"]


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


@pytest.mark.parametrize(
    "shape",
    [TEXTS, [{"id": str(i), "text": text} for i, text in enumerate(TEXTS)], {"passage_text": TEXTS}],
    ids=["strings", "id and text", "ms marco"],
)
def test_reads_each_shape_of_passages(tmp_path, shape):
    file = write(
        tmp_path / "data.jsonl", {"query": "q", "passages": shape}, "", {"query": "r", "passages": shape}
    )
    assert load_passages(file) == [RankedPassages("q", TEXTS), RankedPassages("r", TEXTS)]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "not JSON"),
        ([1, 2], "expected an object"),
        ({"passages": ["p"]}, "`query` is None"),
        ({"query": "  ", "passages": ["p"]}, "`query`"),
        ({"query": "q"}, "`passages` must be"),
        ({"query": "q", "passages": []}, "`passages` must be"),
        ({"query": "q", "passages": {"text": ["p"]}}, "`passages` must be"),
        ({"query": "q", "passages": ["p", 7]}, "passage 1: 7"),
        ({"query": "q", "passages": [{"id": "x"}]}, "passage 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    good = {"query": "q", "passages": ["p"]}
    file = write(tmp_path / "data.jsonl", good, good, line)
    with pytest.raises(ValueError, match=rf"line 3.*{re.escape(complaint)}"):
        load_passages(file)


def test_an_empty_file_and_a_missing_one_are_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no queries"):
        load_passages(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_passages(tmp_path / "nowhere.jsonl")


def test_the_shipped_file_has_six_queries_of_ten_passages():
    entries = load_passages()
    assert [len(entry.passages) for entry in entries] == [10] * 6
    assert len({text for entry in entries for text in entry.passages}) == 60


def test_ms_marco_without_data_or_network_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(passages, "MSMARCO_FILE", tmp_path / "absent.jsonl")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ValueError, match=r"datasets.*JSONL"):
        passages.load_msmarco()


def test_ms_marco_from_the_hub_reads_rows_and_names_a_failed_download(monkeypatch):
    class Stream(list):
        def take(self, count):
            return self[:count]

    class Hub:
        reachable = True

        @classmethod
        def load_dataset(cls, name, config, split, streaming):
            assert (name, config, split, streaming) == ("microsoft/ms_marco", "v1.1", "validation", True)
            if not cls.reachable:
                raise ConnectionError("no route to host")
            return Stream({"query": f"q{i}", "passages": {"passage_text": TEXTS}} for i in range(5))

    monkeypatch.setitem(__import__("sys").modules, "datasets", Hub)
    assert passages.load_msmarco_from_hub(2) == [RankedPassages("q0", TEXTS), RankedPassages("q1", TEXTS)]
    Hub.reachable = False
    with pytest.raises(ValueError, match=r"no route to host.*check the network"):
        passages.load_msmarco_from_hub(2)
