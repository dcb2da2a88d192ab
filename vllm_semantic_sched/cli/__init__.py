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
        "vllm_semantic_sched.predict.train",
        "train the predictor of urgency and output length",
    ),
    "evaluate": (
        "vllm_semantic_sched.predict.evaluate",
        "measure a predictor on labelled texts",
    ),
    "explain": (
        "vllm_semantic_sched.predict.explain",
        "say how urgent a text is taken to be, how long its answer, and which words decided",
    ),
    "policy": (
        "vllm_semantic_sched.policy.command",
        "list the shipped policies, explain every knob, check a policy file",
    ),
    "maintenance": (
        "vllm_semantic_sched.admin.maintenance",
        "pause a running server, change its model, go on; queued requests survive",
    ),
    "trace": (
        "vllm_semantic_sched.trace.command",
        "turn a server's event log into a Gantt chart, a Chrome trace and a table",
    ),
    "profile": (
        "vllm_semantic_sched.profiling.command",
        "measure what work costs on your engine, and how well a profile predicts it",
    ),
    "simulate": (
        "vllm_semantic_sched.sim.command",
        "try policies on a simulated engine: deterministic, fast, no GPU",
    ),
    "plan": (
        "vllm_semantic_sched.sim.plan_command",
        "find the load that a policy can take and the engines that a load needs, by simulation",
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


if __name__ == "__main__":
    sys.exit(main())
