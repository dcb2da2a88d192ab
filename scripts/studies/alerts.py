"""Evaluate the shipped alerts and every query of the dashboard with a real Prometheus.

It scrapes a real server once a second while the server is disturbed as in `chaos.py`. Then each
query must evaluate without an error. Queries without data and alerts that were pending or firing
are printed: a query has no data if what it counts has not happened. Needs `prometheus` and
`promtool` (Debian's package `prometheus`).
"""

import argparse
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import chaos
import yaml
from common import main

from vllm_semantic_sched.cli.console import make_console, print_table
from vllm_semantic_sched.lab.bench.command_line import print_problems
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer, free_port

FOLDER = Path(__file__).parents[2] / "configs" / "deploy" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
_START_SECONDS = 30.0
_SCRAPES = 5  # seconds between the end of the load and the evaluation


def panel_queries() -> Iterator[tuple[str, str]]:
    """Title and PromQL of each panel's queries, with Grafana's variables filled in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", "5m")
            for variable in ("$instance", "$engine"):
                query = query.replace(variable, ".*")
            yield panel["title"], query


class Prometheus:
    """A running Prometheus, by its base address without a trailing slash."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, promql: str) -> list[dict[str, Any]]:
        """Return the series of an instant query; ValueError if Prometheus refused it."""
        series = self._get("query", query=promql)["result"]
        return series if isinstance(series, list) else []

    def rules(self) -> list[dict[str, Any]]:
        """Return the alert rules with `name`, `state`, `health` and `lastError`."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        address = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as reply:
                return dict(json.load(reply)["data"])
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from error


@contextmanager
def prometheus(target: str, output: Path) -> Iterator[Prometheus]:
    """Run a Prometheus with the shipped rules that scrapes `target` (host:port) every second.
    RuntimeError if it does not start within 30 s."""
    config = output / "prometheus.yaml"
    document = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(FOLDER / "alerts.yaml")],
        "scrape_configs": [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}],
    }
    config.write_text(yaml.safe_dump(document))
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={config}", f"--web.listen-address={address}"]
    command += [f"--storage.tsdb.path={output / 'series'}", "--log.level=warn"]
    shutil.rmtree(output / "series", ignore_errors=True)
    with (output / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(f"http://{address}/-/ready", process)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("Prometheus did not start: see prometheus.log")


def evaluate(server: Prometheus) -> tuple[dict[str, int], list[str]]:
    """Return how many series each panel's queries have together, and the queries that failed."""
    series: dict[str, int] = {}
    problems = []
    for title, promql in panel_queries():
        try:
            series[title] = series.get(title, 0) + len(server.query(promql))
        except ValueError as error:
            problems.append(f"panel {title!r}: {error}")
    return series, problems


def states(server: Prometheus, seconds: int) -> dict[str, set[str]]:
    """Return the states other than inactive that each alert had in the last seconds."""
    query = f"count by (alertname, alertstate) (last_over_time(ALERTS[{seconds}s]))"
    states_of: dict[str, set[str]] = {rule["alert"]: set() for rule in RULES}
    for series in server.query(query):
        labels = series["metric"]
        states_of[labels["alertname"]].add(labels["alertstate"])
    return states_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--model", required=True, type=Path, help="model folder (see `bench make-model`)")
    add("--output", required=True, type=Path, help="folder for logs and series")
    add("--requests", type=int, default=1000, help="of the disturbed run (%(default)s)")
    add("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Check the rules, disturb a server, evaluate; 1 if a rule or a query fails."""
    subprocess.run(["promtool", "check", "rules", str(FOLDER / "alerts.yaml")], check=True)
    policy = args.output / "policy.yaml"
    policy.write_text(chaos.BASE_POLICY)
    config = ServerConfig(
        model=args.model,
        log=args.output / "server.log",
        seats=8,
        num_blocks=40,
        scheduler_args=chaos.server_arguments(policy, 0.003),
    )
    begin = time.monotonic()
    with VllmServer(config) as server, prometheus(server.url[7:], args.output) as monitor:
        report = chaos.disturb(server, policy, args.requests, 60, 40, args.seed)
        time.sleep(_SCRAPES)
        series, problems = evaluate(monitor)
        rules = monitor.rules()
        seen = states(monitor, int(time.monotonic() - begin))
    for rule in rules:
        if rule["health"] != "ok":
            problems.append(f"alert {rule['name']}: {rule['lastError']}")
    rows = ((name, ", ".join(sorted(had)) or "inactive") for name, had in seen.items())
    print_table("states of the alerts during the run", ("alert", "states"), rows)
    print_table("series of each panel of the dashboard", ("panel", "series"), series.items())
    console = make_console()
    queries = len(list(panel_queries()))
    console.print(f"{len(rules)} rules and {queries} queries of the dashboard evaluated")
    return print_problems(console, [*problems, *report.problems])


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
