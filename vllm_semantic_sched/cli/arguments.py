"""Arguments, checks and exit statuses that several commands share."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import yaml

from vllm_semantic_sched.policy.facts.section import PolicyError

Run = Callable[[argparse.Namespace], int]
"""Runs a command and returns its exit status."""


class BadOption(ValueError):
    """An option has a value that makes no sense. The message names the option."""


def fail(command: str, problem: object, status: int = 1) -> int:
    """Print why a command fails; returns its exit status."""
    print(f"semsched {command}: {problem}", file=sys.stderr)
    return status


def failing(command: str, *errors: type[Exception], status: int = 1) -> Callable[[Run], Run]:
    """Decorate a command: any of these errors ends it with a message and this exit status."""

    def decorate(run: Run) -> Run:
        def guarded(args: argparse.Namespace) -> int:
            try:
                return run(args)
            except errors as error:
                return fail(command, error, status)

        return guarded

    return decorate


def simulating(command: str) -> Callable[[Run], Run]:
    """Decorate a command that simulates: exit status 2 if the scenario, a trace or an option is
    invalid, 1 if a file cannot be read or written."""

    def decorate(run: Run) -> Run:
        def guarded(args: argparse.Namespace) -> int:
            from vllm_semantic_sched.sim.engine import RequestTooLarge
            from vllm_semantic_sched.sim.workload import TraceError

            invalid = (PolicyError, TraceError, RequestTooLarge, BadOption)
            return failing(command, OSError)(failing(command, *invalid, status=2)(run))(args)

        return guarded

    return decorate


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
    add = parser.add_argument
    text = "for example http://127.0.0.1:8000" + ("; can be repeated" if several else "")
    action = "append" if several else "store"
    add("--server", metavar="URL", required=required, action=action, help=text)
    text = "the server's API key, if it has one (default: $VLLM_API_KEY)"
    add("--api-key", default=os.environ.get("VLLM_API_KEY"), help=text)


def add_scenario_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of every command that simulates."""
    add = parser.add_argument
    add("--workers", type=positive, default=1, metavar="N", help="processes (default: 1)")
    text = "change a field of the scenario, as in workload.requests=100; can be repeated"
    add("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)
    add("--quiet", action="store_true", help="no progress bar")


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """Fields and values of the options `--set FIELD=VALUE`; BadOption if one has another form."""
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
