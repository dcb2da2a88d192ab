"""Arguments and checks that several commands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_semantic_sched.policy.facts.section import PolicyError


class BadOption(ValueError):
    """An option has a value that makes no sense. The message names the option."""


def fail(command: str, problem: object, status: int = 1) -> int:
    """Print why a command fails; returns its exit status."""
    print(f"semsched {command}: {problem}", file=sys.stderr)
    return status


def positive(text: str) -> int:
    """Type of an argument that must be a positive integer."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def add_server_arguments(
    parser: argparse.ArgumentParser, required: bool = True, several: bool = False
) -> None:
    """Declare the address and the API key of a running server, or the addresses of `several` with
    the same key."""
    parser.add_argument(
        "--server",
        metavar="URL",
        required=required,
        action="append" if several else "store",
        help="for example http://127.0.0.1:8000" + ("; can be repeated" if several else ""),
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VLLM_API_KEY"),
        help="the server's API key, if it has one (default: $VLLM_API_KEY)",
    )


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every command that simulates."""
    add = parser.add_argument
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: 1)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the scenario, as in workload.requests=100; can be repeated",
    )
    add("--quiet", action="store_true", help="no progress bar")


def run_simulation(
    command: str, run: Callable[[argparse.Namespace], int], args: argparse.Namespace
) -> int:
    """Run a command that simulates and return its exit status: 2 if the scenario, a trace or an
    option is invalid, 1 if a file cannot be written."""
    from vllm_semantic_sched.sim.engine import RequestTooLarge
    from vllm_semantic_sched.sim.workload import TraceError

    try:
        return run(args)
    except (PolicyError, TraceError, RequestTooLarge, BadOption, OSError) as error:
        return fail(command, error, 1 if isinstance(error, OSError) else 2)


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """Fields and values of the options `--set FIELD=VALUE`; BadOption if one has another form."""
    import yaml

    changes = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals or not field:
            raise BadOption(f"--set {setting}: expected FIELD=VALUE")
        try:
            changes[field] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise BadOption(f"--set {setting}: the value is not YAML") from error
    return changes
