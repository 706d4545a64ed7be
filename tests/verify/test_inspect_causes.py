"""Where sequences part, and the name of what keeps them apart."""

import random
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmlp.verify.inspect.causes import find_causes, without
from radixmlp.verify.inspect.excerpts import first_branch, segment_text
from radixmlp.verify.inspect.ragged import Tokens
from radixmlp.verify.inspect.tokenizing import ByteTokenizer
from radixmlp.verify.inspect.tree import Tree
from radixmlp.verify.inspect.values import common_length, differing_form, differing_values, value_at

RULES = "You answer questions of a shop's customers. Be brief, be polite, and promise nothing at all. "
TOPICS = ["spades", "rakes", "scythes", "hoses"]
BYTES = ByteTokenizer()


def encode(texts):
    return Tokens.of(BYTES.encode(texts, special=True))


def causes_of(texts):
    return find_causes(texts, Tree.of(encode(texts)), encode)


def rows(texts):
    return len({text[:n] for text in map(str.encode, texts) for n in range(1, len(text) + 1)})


random.seed(3)
VALUES = {
    "a date": ["2026-03-01", "2026-03-17", "2026-11-02", "2025-12-24"],
    "a date and time": [
        "2026-03-01T09:12:44Z",
        "2026-03-01T09:12:45Z",
        "2026-03-02T19:02:04Z",
        "2026-04-01T00:00:00Z",
    ],
    "a time of day": ["09:12", "19:44", "23:59:59", "7:05 pm"],
    "a UUID": [str(uuid.UUID(int=random.getrandbits(128))) for _ in range(4)],
    "a number": ["17", "170", "3", "12,500.75"],
    "an identifier": ["req_8f3a21c9", "req_91bb02de", "req_7c00a1b2", "req_5e5e5e51"],
    "an e-mail address": ["ann@example.com", "bob.t@example.org", "c+d@mail.example.net", "eve@example.com"],
    "a network address": ["10.0.0.7", "10.0.0.81:8080", "192.168.1.1", "172.16.0.9"],
}
WRITTEN_DATES = ["Monday, March 2, 2026", "Tue, 3 March 2026", "April 11 2026", "1st May 2026"]


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.parametrize("before", ["", "System header. Session: "])
def test_a_value_before_what_is_the_same_is_named_and_priced(kind, before):
    texts = [f"{before}{VALUES[kind][i % 4]} {RULES}Question {i // 4}: {TOPICS[i % 4]}?" for i in range(4)]
    found = causes_of(texts)
    assert [cause.what for cause in found.found] == [kind]
    cause = found.found[0]
    assert (cause.places, cause.sequences, cause.removable) == (1, 4, True)
    assert cause.before == before + texts[0][len(before) : common_length(texts)]
    assert cause.repeated >= 3 * len(RULES)
    without = [text.replace(VALUES[kind][i], "", 1) for i, text in enumerate(texts)]
    assert (found.rows_now, found.rows_without) == (rows(texts), rows(without))
    assert found.tokens_without == sum(map(len, without))


def test_written_dates_are_dates():
    texts = [f"Today is {date}. {RULES}{topic}" for date, topic in zip(WRITTEN_DATES, TOPICS, strict=True)]
    assert [cause.what for cause in causes_of(texts).found] == ["a date"]


def test_a_second_value_is_seen_behind_the_first():
    ids = VALUES["a UUID"]
    texts = [
        f"{time}\nRequest {one}\n{RULES}{i}"
        for i, (time, one) in enumerate(zip(VALUES["a date and time"], ids, strict=True))
    ]
    found = causes_of(texts)
    assert [cause.what for cause in found.found] == ["a date and time", "a UUID"]
    assert found.rows_without == rows([f"\nRequest \n{RULES}{i}" for i in range(4)])


def test_the_value_that_matters_is_found_behind_one_that_does_not():
    texts = [f"2026-01-{i % 3 + 1:02d} no {i}: {RULES}" for i in range(300)]
    found = causes_of(texts)
    assert [cause.what for cause in found.found] == ["a number"]
    assert found.rows_without < 0.1 * found.rows_now


@given(
    st.text("abc", max_size=9),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted).map(tuple)),
)
def test_parts_left_out(text, spans):
    kept = [c for i, c in enumerate(text) if not any(start <= i < end for start, end in spans)]
    assert without(text, spans) == "".join(kept)


@pytest.mark.parametrize("tail", ["", "!", " Thanks."])
def test_a_value_at_the_end_costs_nothing_and_is_no_cause(tail):
    for values in VALUES.values():
        assert not causes_of([f"{RULES}Ticket {value}{tail}" for value in values]).found


def test_ordinary_questions_are_no_cause():
    texts = [
        f"{RULES}Query: {topic} for {n} beginners\nPassage: {topic} cost {n} coins."
        for topic in TOPICS
        for n in range(3)
    ]
    found = causes_of(texts)
    assert not [cause for cause in found.found if cause.what != "a number"]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("white space", "Rules:\n" + RULES, "Rules: \n" + RULES),
        ("white space", RULES, " " + RULES),
        ("white space", "a b\r\n" + RULES, "a b\n" + RULES),
        ("upper and lower case", RULES, RULES.upper()),
        ("the Unicode form (NFC or NFD)", "Café rules: " + RULES, "Cafe\u0301 rules: " + RULES),
    ],
)
def test_the_same_words_written_differently(name, one, other):
    texts = [f"{way}{topic}" for way in (one, other) for topic in TOPICS]
    found = causes_of(texts)
    assert [cause.what for cause in found.found] == [name]
    assert not found.found[0].removable
    assert found.rows_without is None


def test_what_costs_little_is_not_worth_a_word():
    long = "".join(chr(33 + i % 90) for i in range(9000))
    texts = [f"{long}{i} the very same ending of it all" for i in range(3)]
    assert not causes_of(texts).found


@given(st.lists(st.text("ab1: -\n", max_size=30), min_size=1, max_size=6))
def test_any_texts_have_an_answer(texts):
    found = causes_of(texts)
    assert found.rows_now == rows(texts)
    assert (found.rows_without is None) == (not any(cause.removable for cause in found.found))
    assert differing_values(texts) is None or len(texts) > 1
    assert differing_form(texts) is None or len(texts) > 1


@given(st.lists(st.text("ab", max_size=9), min_size=1, max_size=5))
def test_common_length_is_that_of_the_longest_common_prefix(texts):
    length = common_length(texts)
    assert len({text[:length] for text in texts}) == 1
    assert any(len(text) == length for text in texts) or len({text[length] for text in texts}) > 1


def test_a_value_is_found_from_any_place_in_it():
    text = "at 2026-03-01 noon"
    assert {value_at(text, place).kind for place in range(3, 14)} == {"a date"}
    assert value_at(text, 1) is None
    assert value_at("abc123", 2) is None  # too short for an identifier, and no number of its own


def test_the_first_branch():
    tree = Tree.of(encode(["one two", "one three", "one three"]))
    shared, ways = first_branch(tree)
    assert segment_text(tree, shared, BYTES) == "one t"
    assert [(segment_text(tree, way, BYTES), int(tree.sequences[way])) for way in ways] == [
        ("wo", 1),
        ("hree", 2),
    ]
    assert first_branch(Tree.of(encode(["a", "b"])))[0] is None
    # A sequence without tokens shares nothing with the others.
    assert first_branch(Tree.of(encode(["a", ""])))[0] is None
