"""Request files as people write them: what is read, what is refused with a reason, and that memory stays flat."""

import io
import json
import tracemalloc
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmlp.optimized.jobs import requests as module
from radixmlp.optimized.jobs.requests import (
    BadLine,
    Passage,
    Request,
    RequestFileError,
    parse_request,
    read_requests,
)

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"))


def read(tmp_path, content, **options):
    file = tmp_path / "requests.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_requests(file, **options))


def reason(line):
    result = parse_request(line)
    assert isinstance(result, BadLine), result
    return result.reason


def test_every_kind_is_read(tmp_path):
    lines = [
        {"text": "a"},
        {"id": 7, "messages": [{"role": "user", "content": "b"}]},
        {"id": "x", "query": "q", "passages": ["p", {"id": 3, "text": "r"}], "query_id": "ignored"},
        {"query": "q", "passages": {"passage_text": ["p"]}},
        {"prompt": "p", "continuation": ""},
    ]
    got = read(tmp_path, "\n".join(map(json.dumps, lines)))
    assert got == [
        Request(1, None, "text", {"text": "a"}),
        Request(2, 7, "messages", {"messages": [{"role": "user", "content": "b"}]}),
        Request(3, "x", "pair", {"query": "q", "passages": [Passage("p"), Passage("r", 3)]}),
        Request(4, None, "pair", {"query": "q", "passages": [Passage("p")]}),
        Request(5, None, "continuation", {"prompt": "p", "continuation": ""}),
    ]


@given(texts=st.lists(TEXT), bom=st.booleans(), crlf=st.booleans(), blank=st.booleans(), ascii_=st.booleans())
def test_text_comes_back_as_it_was(tmp_path_factory, texts, bom, crlf, blank, ascii_):
    end = "\r\n" if crlf else "\n"
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_) for text in texts]
    body = (end + " \t" + end if blank else end).join(lines)
    got = read(
        tmp_path_factory.mktemp("requests"), (b"\xef\xbb\xbf" if bom and texts else b"") + body.encode()
    )
    assert [request.fields["text"] for request in got] == texts
    assert [request.line for request in got] == [1 + i * (2 if blank else 1) for i in range(len(texts))]


@given(st.lists(st.one_of(st.just(b'{"text": "good"}'), st.binary().filter(lambda b: b"\n" not in b))))
def test_any_bytes_give_one_answer_a_line_and_never_cost_the_good_ones(tmp_path_factory, lines):
    body = b"{}\n" + b"\n".join(lines)  # the first line decides what format the file is
    got = read(tmp_path_factory.mktemp("requests"), body)
    numbers = [item.line for item in got]
    assert numbers == sorted(set(numbers))
    good = [i for i, line in enumerate(lines, start=2) if line == b'{"text": "good"}']
    assert [item.line for item in got if isinstance(item, Request) and item.line in good] == good
    assert all(item.reason for item in got if isinstance(item, BadLine))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "a"', "not JSON: Expecting ',' delimiter at column"),
        ('{"text": "a"} {"text": "b"}', "not JSON: Extra data at column 15"),
        ("[1]", "expected a JSON object, got a list"),
        ('"text"', "expected a JSON object, got a string"),
        ("null", "got null"),
        ("3", "got a number"),
        ("{}", "the object has no keys"),
        ('{"txt": "a"}', "the object has 'txt'"),
        ('{"text": "a", "query": "b"}', "`text`, `query` in one request"),
        ('{"query": "q"}', "`query` without `passages`"),
        ('{"continuation": "q"}', "`continuation` without `prompt`"),
        ('{"text": 3}', "`text` is a number: expected a string"),
        ('{"text": true}', "`text` is true or false"),
        ('{"text": null}', "`text` is null"),
        ('{"text": "a", "text": "b"}', "'text' is given twice"),
        ('{"text": "a\\u0000"}', "a NUL character at character 2"),
        ('{"text": "ab\\ud83d"}', r"a lone surrogate (\ud83d) at character 3"),
        ('{"query": "q", "passages": []}', "`passages` is an empty list"),
        ('{"query": "q", "passages": "p"}', "`passages` is a string"),
        ('{"query": "q", "passages": ["p", 3]}', "`passages`[1] is a number"),
        ('{"query": "q", "passages": [{"id": 3}]}', "`passages`[0] has no `text`"),
        ('{"query": "q", "passages": [{"id": [], "text": "t"}]}', "`passages`[0].id is an empty list"),
        ('{"messages": []}', "`messages` is an empty list"),
        ('{"messages": ["m"]}', "`messages`[0] is a string: expected an object"),
        ('{"messages": [{"content": "c"}]}', "`messages`[0].role is null"),
        ('{"messages": [{"role": "user"}]}', "`messages`[0].content is null"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "content[0] is 'image_url': only parts of type text",
        ),
        (
            '{"messages": [{"role": "user", "content": "c", "name": "\\udc00"}]}',
            "`messages`[0].name holds a lone",
        ),
        ('{"text": "a", "id": {}}', "`id` is an empty object"),
        ('{"text": "a", "id": true}', "`id` is true or false"),
        ('{"text": "a", "id": 1e999}', "`id` is too large"),
        ('{"text": "a", "id": NaN}', "NaN is no JSON number"),
        ('{"text": "a", "score": -Infinity}', "-Infinity is no JSON number"),
        ("[" * 100_000, "nested too deeply"),
        ('{"text": "a", "id": ' + "9" * 5000 + "}", "not JSON we read"),
    ],
)
def test_a_bad_line_says_why(line, complaint):
    assert complaint in reason(line)


def test_tool_calls_and_text_parts_are_messages():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "t"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ]
    got = parse_request(json.dumps({"messages": messages}))
    assert isinstance(got, Request)
    assert got.fields["messages"] == messages


def test_bad_bytes_name_their_place(tmp_path):
    got = read(tmp_path, b'{"text": "a"}\n{"text": "\xff"}\n{"text": "\0"}\n{"text": "b"}')
    assert [item.line for item in got] == [1, 2, 3, 4]
    assert "byte 11 of the line is 0xff" in got[1].reason
    assert "NUL byte at byte 11" in got[2].reason


def test_a_byte_order_mark_in_the_middle_is_no_excuse(tmp_path):
    got = read(tmp_path, b'{"text": "a"}\n\xef\xbb\xbf{"text": "b"}')
    assert isinstance(got[1], BadLine)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_long_line_is_refused_and_the_next_one_read(tmp_path, end):
    line = b'{"text": "' + b"x" * 200_000 + b'"}'
    body = b'{"text": "a"}' + (end or b"\n") + line + end
    if end:
        body += b'{"text": "b"}'
    got = read(tmp_path, body, max_line_bytes=len(line) - 1)
    assert got[1].line == 2
    assert f"longer than {len(line) - 1:,} bytes" in got[1].reason
    assert [item.line for item in got[2:]] == ([3] if end else [])
    assert all(isinstance(item, Request) for item in read(tmp_path, body, max_line_bytes=len(line)))


@pytest.mark.parametrize(
    ("start", "complaint"),
    [
        ("{}".encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"PK\x03\x04", "zip"),
        (b"PAR1", "Parquet"),
        (b"\x28\xb5\x2f\xfd\0", "zstd"),
    ],
)
def test_another_format_is_named(tmp_path, start, complaint):
    with pytest.raises(RequestFileError, match=complaint):
        read(tmp_path, start)


def test_missing_files_and_folders_are_refused_at_the_call(tmp_path):
    with pytest.raises(RequestFileError, match="there is no file"):
        read_requests(tmp_path / "none.jsonl")
    with pytest.raises(RequestFileError, match="is a folder"):
        read_requests(tmp_path)


def test_an_empty_file_has_no_requests(tmp_path):
    assert read(tmp_path, b"") == []
    assert read(tmp_path, b"\xef\xbb\xbf") == []
    assert read(tmp_path, b"\n\r\n") == []


def test_standard_input(monkeypatch):
    stdin = SimpleNamespace(buffer=io.BytesIO(b'{"text": "a"}\n{"text": "b"}'))
    monkeypatch.setattr(module, "sys", SimpleNamespace(stdin=stdin))
    assert [item.fields["text"] for item in read_requests("-")] == ["a", "b"]
    assert not stdin.buffer.closed


def test_memory_holds_one_line_at_a_time(tmp_path):
    file = tmp_path / "requests.jsonl"
    line = json.dumps({"text": "x" * 10_000}) + "\n"
    file.write_text(line * 2_000)
    tracemalloc.start()
    try:
        assert sum(isinstance(item, Request) for item in read_requests(file)) == 2_000
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
