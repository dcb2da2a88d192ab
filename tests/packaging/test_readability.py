"""What keeps the package readable: functions that fit on a screen."""

import ast
from pathlib import Path

import vllm_semantic_sched

PACKAGE = Path(vllm_semantic_sched.__file__).parent
LONGEST = 50  # lines


def test_every_function_fits_on_a_screen() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name}, {node.end_lineno - node.lineno + 1} lines"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not long
