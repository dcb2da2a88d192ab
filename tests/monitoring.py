"""Reads the shipped dashboard and alert rules, for the tests of them."""

from collections.abc import Iterator

import promql_parser
from alerts import RULES


def rule_queries() -> Iterator[tuple[str, str]]:
    """Name and PromQL."""
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def selectors(query: str) -> list[tuple[str, dict[str, str]]]:
    """Metric and labels that must be equal, of each series that a query reads."""
    found = []

    def visit(node) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            equal = {
                matcher.name: matcher.value
                for matcher in node.matchers.matchers
                if matcher.op == promql_parser.MatchOp.Equal
            }
            found.append((node.name, equal))

    promql_parser.walk(promql_parser.parse(query), visit)
    return found
