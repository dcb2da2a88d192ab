"""Codes of the tasks whose exceptions are counted, and the log's words for them."""

import ast
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import vllm_semantic_sched
from vllm_semantic_sched.engine.guard import TASKS, Guard, logger
from vllm_semantic_sched.policy.record import lifecycle

PACKAGE = Path(vllm_semantic_sched.__file__).parent
NAMING = {"guard", "_guard", "guarded", "_guarded", "failed", "_fall_back"}
"""Functions and methods whose first argument is the code of a task."""


def codes_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        arguments = [value.value for value in node.args if isinstance(value, ast.Constant)]
        if name in NAMING:
            yield from arguments[:1]
        elif arguments[:1] == ["policy_errors"]:
            yield from arguments[1:2]


def test_each_code_in_the_package_has_words_and_is_used() -> None:
    used = set(lifecycle._TASKS.values())
    for path in PACKAGE.rglob("*.py"):
        used.update(codes_in(path.read_text("utf-8")))
    assert used == TASKS.keys()


def test_codes_are_short_words_and_distinct_in_the_log() -> None:
    assert all(re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", code) for code in TASKS)
    assert len(set(TASKS.values())) == len(TASKS)


def test_error_is_counted_by_code_and_logged_in_words_once(monkeypatch, caplog) -> None:
    counted: list[tuple[str, str]] = []
    guard = Guard(lambda name, task: counted.append((name, task)))
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            with guard("waits"):
                raise RuntimeError("broken")
    assert counted == [("policy_errors", "waits")] * 2
    [record] = caplog.records
    assert "while recording why requests wait" in record.message


def test_codes_are_found() -> None:
    source = 'with self.guard("a"):\n    self._guard.failed("b")\nadd("policy_errors", "c")'
    assert set(codes_in(source)) == {"a", "b", "c"}
