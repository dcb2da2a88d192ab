"""docs/features.md: each row has a state and a test, and each test can fail."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "features.md"
STATES = ("works", "degrades", "refuses", "untested")
RELEASES = ("0.31", "0.32", "0.33")


class Row(NamedTuple):
    """`tests`: node ids below tests/."""

    feature: str
    state: str
    release: str
    remarks: str
    tests: list[str]


def rows() -> list[Row]:
    """All rows of the page's tables."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [
        Row(feature, state, release, remarks, re.findall(r"`([^`]+)`", tests))
        for feature, state, release, remarks, tests in cells
        if feature != "feature"
    ]


def mutations() -> list[dict[str, str]]:
    """One way to break each row that works; see scripts/mutations.py."""
    files = sorted((ROOT / "tests" / "features" / "mutations").glob("*.yaml"))
    return [mutation for file in files for mutation in yaml.safe_load(file.read_text()) or []]


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.feature)
def test_row_names_its_state_and_tests_that_exist(row) -> None:
    assert row.state in STATES
    assert row.release in RELEASES
    assert row.tests or row.state == "untested", "no test"
    for test in row.tests:
        file, _, function = test.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), test
        assert not function or function in functions_in(path), test


def test_features_are_named_once() -> None:
    names = [row.feature for row in rows()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "row", [row for row in rows() if row.state == "works"], ids=lambda row: row.feature
)
def test_row_that_works_can_be_broken(row) -> None:
    """A mutation of the scheduler's part, which one of the row's tests has to find."""
    assert [
        m
        for m in mutations()
        if m["feature"] == row.feature and m["test"].partition("[")[0] in row.tests
    ]


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation["feature"])
def test_mutation_fits_the_code(mutation) -> None:
    assert mutation["feature"] in {row.feature for row in rows()}
    text = (ROOT / "vllm_semantic_sched" / mutation["file"]).read_text()
    assert text.count(mutation["old"]) == 1
    assert mutation["old"] != mutation["new"]
