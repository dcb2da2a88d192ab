"""The package stays small enough to be read: who lets it grow raises a limit here, and says why."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "vllm_semantic_sched"
SERVING = ("policy", "predict", "engine")


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_package_has_at_most_32_000_lines() -> None:
    assert lines_in(PACKAGE) <= 32_000
    assert sum(lines_in(PACKAGE / room) for room in SERVING) <= 15_700


def test_no_function_is_longer_than_50_lines() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= 50
    ]
    assert not long
