"""What keeps the package readable: a size that can be read, and functions that fit on a screen.

Who lets the package grow raises a limit here, and says why. (34,500: the emulated device.)
"""

import ast
from pathlib import Path

import vllm_semantic_sched

PACKAGE = Path(vllm_semantic_sched.__file__).parent
SERVING = ("policy", "predict", "engine")
LONGEST = 50  # lines


def lines_in(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_package_has_at_most_34_500_lines() -> None:
    assert lines_in(PACKAGE) <= 34_500
    assert sum(lines_in(PACKAGE / room) for room in SERVING) <= 15_750


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
