"""The two READMEs say the same: headings, code, links, pictures and measured numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from radixmlp.verify.measured import HOUSE_DEVICE, measured_file, read_document

Part = Callable[[str], ModuleType]


@pytest.fixture
def texts(root: Path) -> tuple[str, str]:
    return (root / "README.md").read_text("utf-8"), (root / "README.zh-CN.md").read_text("utf-8")


def outside(text: str) -> str:
    """Without code blocks and without the measured table."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!-- measured:begin -->.*<!-- measured:end -->", "", text, flags=re.DOTALL)


def test_the_same_headings(texts: tuple[str, str]) -> None:
    levels = [[line.split(" ")[0] for line in outside(t).splitlines() if line.startswith("#")] for t in texts]
    assert levels[0] == levels[1]


def test_the_same_code(texts: tuple[str, str]) -> None:
    blocks = [re.findall(r"^```.*?^```$", text, flags=re.MULTILINE | re.DOTALL) for text in texts]
    assert blocks[0] == blocks[1]


def test_the_same_pictures_and_links(texts: tuple[str, str]) -> None:
    pictures, links = (
        [re.findall(pattern, outside(text)) for text in texts]
        for pattern in (r"!\[[^]]*\]\(([^)]+)\)", r"(?<!!)\[[^]]*\]\(([^)]+)\)")
    )
    assert pictures[0] == pictures[1]
    assert "README.zh-CN.md" in links[0]
    assert "README.md" in links[1]
    own = ("README.md", "README.zh-CN.md")
    others = [sorted(link for link in found if link not in own) for found in links]
    assert others[0] == others[1]


def test_the_same_names_in_code_marks(texts: tuple[str, str]) -> None:
    """What stands in backticks is not translated, so none may be missing in either."""
    names = [set(re.findall(r"`([^`\n]+)`", re.sub(r"\s*\n\s*", " ", outside(text)))) for text in texts]
    assert names[0] == names[1]


def test_the_same_rows_in_tables(texts: tuple[str, str]) -> None:
    columns = [
        [line.count("|") for line in outside(text).splitlines() if line.startswith("|")] for text in texts
    ]
    assert columns[0] == columns[1]


def test_both_measured_tables_are_the_committed_measurement(
    part: Part, root: Path, texts: tuple[str, str]
) -> None:
    script, measured = part("figures.readme_measured"), read_document(measured_file(root, HOUSE_DEVICE))
    for language, text in zip(script.LANGUAGES, texts, strict=True):
        assert script.with_table(text, measured, language) == text, "redraw: radixmlp figures --readme"
    numbers = []
    for language in script.LANGUAGES:
        rows = [line.split(" | ")[1:5] for line in script.table(measured, language).splitlines()[6:]]
        numbers.append([[cell.replace(language.missed, "missed") for cell in row] for row in rows])
    assert len(numbers[0]) == len(script.shown(measured))
    assert all(row[0].startswith("**") for row in numbers[0])
    assert numbers[0] == numbers[1]


def test_the_table_is_of_the_asked_device(part: Part, root: Path) -> None:
    script = part("figures.readme_measured")
    assert script.chosen(HOUSE_DEVICE) == measured_file(root, HOUSE_DEVICE)
    assert script.chosen("some/file.json") == Path("some/file.json")
    with pytest.raises(SystemExit, match="no such file"):
        script.main(["zuse-z3"])
