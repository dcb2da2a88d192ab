"""`semsched bench`: measurements on a real engine, each a command of its own."""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from vllm_semantic_sched.bench import (
    chaos_command,
    flood,
    kv_copy,
    model_command,
    overhead,
    prediction_latency,
    predictor,
    reproduction,
    retention,
    run_command,
    simulator,
    tiers,
)

_COMMANDS = {
    "run": (run_command, "compare schedulers under the same load on a real vllm serve"),
    "overhead": (overhead, "time of schedule() with many waiting requests"),
    "predictor": (predictor, "cost of a prediction, alone and beside a busy engine"),
    "prediction-latency": (prediction_latency, "what a slower predictor costs the requests"),
    "kv-copy": (kv_copy, "speed of KV swap's copies against a plain copy"),
    "reproduction": (reproduction, "the paper's figures and tables beside the printed numbers"),
    "retention": (retention, "what plans of preemption cost under load"),
    "simulator": (simulator, "time and memory of the simulator as runs grow"),
    "tiers": (tiers, "premium, standard and background traffic under overload"),
    "flood": (flood, "one tenant floods the server while another goes on as before"),
    "chaos": (chaos_command, "disturb a real server in every way at once and see what holds"),
    "make-model": (model_command, "write a small random-weight model with a real tokenizer"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Mount the commands below `parser`."""
    commands = parser.add_subparsers(dest="bench_command", required=True)
    for name, (module, text) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=text, description=text))


def run(args: argparse.Namespace) -> int:
    """Run the chosen command and return its exit status (2: bad arguments)."""
    # Without this a plain kill would leave the server that a benchmark started behind.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(_COMMANDS[args.bench_command][0].run(args))
    except (ValueError, FileNotFoundError) as error:
        print(f"semsched bench: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"semsched bench: {error}", file=sys.stderr)
        return 1


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    _parser = argparse.ArgumentParser(prog="semsched bench", description=__doc__)
    add_arguments(_parser)
    sys.exit(run(_parser.parse_args()))
