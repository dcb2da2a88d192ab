"""The command `semsched`, one subcommand per job."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_semantic_sched import __version__

# name: (module with add_arguments and run, one line of help)
_COMMANDS = {
    "bench": (
        "vllm_semantic_sched.cli.bench",
        "compare schedulers on a real engine, measure scheduling overhead",
    ),
    "train": (
        "vllm_semantic_sched.cli.train",
        "train the predictor of urgency and output length",
    ),
    "evaluate": (
        "vllm_semantic_sched.cli.evaluate",
        "measure a predictor on labelled texts",
    ),
    "explain": (
        "vllm_semantic_sched.cli.explain",
        "show the urgency level and output length of a text, and the words that decided",
    ),
    "policy": (
        "vllm_semantic_sched.cli.policy",
        "list, explain and check policies, and make a running server reload its policy",
    ),
    "maintenance": (
        "vllm_semantic_sched.cli.maintenance",
        "pause a running server, change its model, and resume it; queued requests survive",
    ),
    "trace": (
        "vllm_semantic_sched.cli.trace",
        "turn a server's event log into a Gantt chart, a Chrome trace and a table",
    ),
    "profile": (
        "vllm_semantic_sched.cli.profile",
        "measure what work costs on your engine, and check a profile's predictions",
    ),
    "simulate": (
        "vllm_semantic_sched.cli.simulate",
        "try policies on a simulated engine: deterministic, fast, no GPU",
    ),
    "plan": (
        "vllm_semantic_sched.cli.plan",
        "find by simulation the largest load for a policy and the engines for a load",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; its exit status."""
    parser = argparse.ArgumentParser(
        prog="semsched", description="Urgency-first scheduling for vLLM."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, text) in _COMMANDS.items():
        # These modules import their heavy dependencies when they run, not before.
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=text, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return status
