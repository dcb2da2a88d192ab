"""What the linter does not check of how the package reads. It limits branches and statements of a
function, and asks for docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_semantic_sched

PACKAGE = Path(vllm_semantic_sched.__file__).parent
FOLDERS = ("cli", "fleet", "lab", "operate")


def starred_literals(source: str) -> Iterator[int]:
    """Lines of calls with `*(a, b)` or `*[a, b]`. Unpacking a literal there only keeps several
    arguments on one line, and hides which parameters they are for."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            starred = [argument for argument in node.args if isinstance(argument, ast.Starred)]
            for argument in starred:
                if isinstance(argument.value, ast.Tuple | ast.List):
                    yield argument.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("f(*(a, b), c)", [1]),
        ("f(a,\n  *[b, c])", [2]),
        ("f(g(*(a, b)))", [1]),
        ("f(*names)", []),
        ("f(*(name for name in names))", []),
        ("f((a, b))", []),
    ],
)
def test_starred_literals_are_found(source: str, lines: list[int]) -> None:
    assert list(starred_literals(source)) == lines


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_call_unpacks_a_literal(folder: str) -> None:
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    assert paths
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in paths
        for line in starred_literals(path.read_text("utf-8"))
    ]
    assert not found
