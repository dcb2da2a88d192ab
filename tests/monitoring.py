"""Reads the shipped dashboard and alert rules, for the tests of them."""

import json
from collections.abc import Iterator
from pathlib import Path

import promql_parser
import yaml

FOLDER = Path(__file__).parents[1] / "configs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Title and PromQL, with Grafana's variables filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m")
            for variable in ("$instance", "$engine"):
                query = query.replace(variable, ".*")
            yield panel["title"], query


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
