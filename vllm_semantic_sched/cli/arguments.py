"""Arguments, checks and exit statuses that several commands share."""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from vllm_semantic_sched.policy.config.section import PolicyError

LOCAL_SERVER = "http://127.0.0.1:8000"  # of vLLM's default port


class Failure(Exception):
    """Ends a command with this message and exit status. 2: an option makes no sense."""

    def __init__(self, problem: object, status: int = 1) -> None:
        super().__init__(str(problem))
        self.status = status


def installing(extra: str) -> str:
    """The command that installs the packages of an extra; no registry has this project."""
    return f"pip install '.[{extra}]' in a checkout of this project"


@contextmanager
def failing(*errors: type[Exception], status: int = 1) -> Iterator[None]:
    """Decorator of a command, or block: any of these errors is a Failure."""
    try:
        yield
    except errors as error:
        raise Failure(error, status) from error


@contextmanager
def _naming_the_extra() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise Failure(f"{error}; {installing('lab')} installs the packages needed") from error


@contextmanager
def failing_in_lab() -> Iterator[None]:
    """Decorator of a command that needs the extra `lab`: wrong files, options or packages."""
    with failing(OSError, ValueError, ImportError), _naming_the_extra():
        yield


@contextmanager
def simulating() -> Iterator[None]:
    """Decorator of a command that simulates: exit status 2 if the scenario or a trace is invalid,
    1 if a file cannot be read or written."""
    from vllm_semantic_sched.sim.workload import WorkloadError

    with failing(OSError), failing(PolicyError, WorkloadError, status=2), _naming_the_extra():
        yield


@contextmanager
def serving() -> Iterator[None]:
    """Around a command that starts servers, as its decorator or as a block: exit status 2 for bad
    arguments, 1 for a failed run."""
    # Without this, SIGTERM would leave a server behind that the command started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with failing(RuntimeError), failing(ValueError, FileNotFoundError, status=2):
        yield


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
    the same key. Where one is required, it is this machine's by default."""
    add = parser.add_argument
    text = "address of the server"
    if required:
        text += f" (default: {LOCAL_SERVER})"
    add(
        "--server",
        metavar="URL",
        default=LOCAL_SERVER if required and not several else None,
        action="append" if several else "store",
        help=f"{text}; can be repeated" if several else text,
    )
    add(
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


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """Fields and values of the options `--set FIELD=VALUE`; Failure if one has another form."""
    changes = {}
    for setting in settings:
        field, equals, value = setting.partition("=")
        if not equals or not field:
            raise Failure(f"--set {setting}: expected FIELD=VALUE", 2)
        try:
            changes[field] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise Failure(f"--set {setting}: the value is not YAML", 2) from error
    return changes
