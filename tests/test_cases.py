"""The list of cases from the field names tests that exist, once for each case."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent
TEXT = (FOLDER / "CASES.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| ([A-N]\d\d(?:, [A-N]\d\d)*) \| (.+) \|$", TEXT, re.MULTILINE)
NAMED = re.findall(r"`(test_\w+\.py)::(\w+)`", TEXT)
# Whole sections that this list answers, with the rows each has.
SECTIONS = {
    "H": (2, 4, 6, 7),
    "I": (1, 2, 4, 5, 7, 8, 9),
    "J": (1, 2, 3, 4, 8, 9, 10),
    "K": (1, 3, 4, 5, 6, 7, 8),
    "L": (1, 3, 5, 6, 7, 8),
}


@cache
def names_in(name: str) -> frozenset[str]:
    """The test functions of a file of this folder; none if there is no such file."""
    path = FOLDER / name
    if not path.exists():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize(("file", "test"), sorted(set(NAMED)))
def test_each_test_named_exists(file: str, test: str) -> None:
    assert test in names_in(file), f"{file} has no {test}"


def test_each_mention_of_a_test_has_the_form_that_is_checked() -> None:
    mentions = re.findall(r"`([^`]*::[^`]*)`", TEXT)
    assert mentions
    assert len(mentions) == len(NAMED)


def test_each_row_is_answered() -> None:
    table_lines = [line for line in TEXT.splitlines() if re.match(r"\| [A-N]\d", line)]
    assert len(table_lines) == len(ROWS)
    for ids, answer in ROWS:
        assert "::" in answer or len(answer.split()) >= 4, f"{ids} has no answer"


def test_each_case_stands_once_and_whole_sections_are_whole() -> None:
    cases = [case for ids, _ in ROWS for case in ids.split(", ")]
    assert len(cases) == len(set(cases))
    for letter, numbers in SECTIONS.items():
        assert {f"{letter}{number:02}" for number in numbers} == {c for c in cases if c[0] == letter}


def test_other_files_named_exist() -> None:
    for path in re.findall(r"`(tests/[\w./]+)`", TEXT):
        assert (FOLDER.parent / path).exists(), path
