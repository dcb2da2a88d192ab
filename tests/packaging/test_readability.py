"""What the linter does not check of how the package reads. It limits branches and statements of a
function, and asks for docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_semantic_sched

PACKAGE = Path(vllm_semantic_sched.__file__).parent


def starred_literals(source: str) -> Iterator[int]:
    """Lines with `*(a, b)` or `*[a, b]` in a call, a list, a tuple or a set. Unpacking a literal
    only keeps several values on one line, and hides which parameters of a call they are for."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call():
                values = node.args
            case ast.List() | ast.Tuple() | ast.Set():
                values = node.elts
            case _:
                continue
        for value in values:
            if isinstance(value, ast.Starred) and isinstance(value.value, ast.Tuple | ast.List):
                yield value.lineno


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("f(*(a, b), c)", [1]),
        ("f(a,\n  *[b, c])", [2]),
        ("f(g(*(a, b)))", [1]),
        ("[*(a, b), c]", [1]),
        ("(*[a, b], c)", [1]),
        ("{\n  *(a, b),\n  *(c, d)\n}", [2, 3]),
        ("f(*names)", []),
        ("f(*(name for name in names))", []),
        ("f((a, b))", []),
        ("[*names, c]", []),
    ],
)
def test_starred_literals_are_found(source: str, lines: list[int]) -> None:
    assert list(starred_literals(source)) == lines


def test_no_literal_is_unpacked() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert paths
    lines = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in paths
        for line in starred_literals(path.read_text("utf-8"))
    ]
    assert not lines
