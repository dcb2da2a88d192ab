"""Find by simulation how much load a policy can take, how many engines a load needs, and what
another policy would change."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.errors import PolicyError
from vllm_semantic_sched.policy.files import shipped_names

_DEFAULT_SCENARIO = "capacity"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched plan`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        textwrap.fill(
            "The scenario says what engine there is and who asks; the tiers of a policy, or the "
            "scenario's `slos`, say what is promised. A promise holds if its percentage of "
            "requests got everything that their level is promised.",
            96,
        )
        + f"\n\nshipped scenarios: {', '.join(shipped_names('scenario'))}"
        + "\n\nexamples:\n  semsched plan --output plan --workers 2"
        "\n  semsched plan --policy fcfs --policy tiers --rate 12 --output plan"
        "\n  semsched plan --scenario my.yaml --trace requests.jsonl --output plan"
    )
    add = parser.add_argument
    add("--scenario", default=_DEFAULT_SCENARIO, metavar="FILE|NAME", help="default: %(default)s")
    add("--output", type=Path, required=True, metavar="DIR", help="where results go")
    add(
        "--policy",
        action="append",
        default=[],
        metavar="FILE|NAME",
        help="plan for this policy instead of the scenario's; can be repeated to compare",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=float, metavar="R", help="requests per second on average")
    load.add_argument(
        "--trace",
        metavar="FILE|azure:NAME",
        help="replay JSON lines, or the Azure trace conv, code",
    )
    add("--engines", type=int, metavar="N", help="engines there are (default: the scenario's)")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the scenario, as engine.seats=64; can be repeated",
    )
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Plan; 2 if the scenario or an option is invalid, 1 if a run fails."""
    from vllm_semantic_sched.sim.command import BadOption
    from vllm_semantic_sched.sim.engine import RequestTooLarge
    from vllm_semantic_sched.sim.trace import TraceError

    try:
        return _run(args)
    except (PolicyError, TraceError, RequestTooLarge, BadOption) as error:
        print(f"semsched plan: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"semsched plan: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from vllm_semantic_sched.cli.console import make_console
    from vllm_semantic_sched.sim.command import BadOption, parse_changes
    from vllm_semantic_sched.sim.metrics import is_promised
    from vllm_semantic_sched.sim.plan import QUESTIONS, answer
    from vllm_semantic_sched.sim.plan_report import draw_plan, print_plan, write_plan
    from vllm_semantic_sched.sim.runner import mapped
    from vllm_semantic_sched.sim.scenario import load_scenarios

    scenario, *others = load_scenarios(args.scenario, _load(args) | parse_changes(args.set))
    if others:
        raise BadOption(f"--scenario {args.scenario}: it has a sweep; a plan has none")
    for scheduler in scenario.policies:
        if not any(is_promised(slo) for slo in scenario.slos(scheduler)):
            raise BadOption(
                f"{scheduler} promises nothing to any level: give its tiers `slo`, or the "
                "scenario `slos`"
            )
    args.output.mkdir(parents=True, exist_ok=True)
    tasks = [
        (scenario, scheduler, question) for scheduler in scenario.policies for question in QUESTIONS
    ]
    with mapped(answer, tasks, args.workers) as stream:
        answers = list(tqdm(stream, total=len(tasks), unit="question", disable=args.quiet))
    console = make_console()
    print_plan(console, scenario, answers)
    written = write_plan(args.output, scenario, answers)
    draw_plan(args.output / "plan.png", answers)
    console.print("written: " + " ".join(map(str, [*written, args.output / "plan.png"])))
    return 0


def _load(args: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if args.policy:
        changes["schedulers"] = {Path(name).stem: {"policy": name} for name in args.policy}
    if args.rate is not None:
        changes["workload.arrivals"] = "poisson"
        changes["workload.rate"] = args.rate
    if args.trace is not None:
        kind, _, name = args.trace.partition(":")
        azure = kind == "azure"
        changes["workload.arrivals"] = "azure" if azure else "jsonl"
        changes["workload.path"] = name if azure else args.trace
    if args.engines is not None:
        changes["engine.replicas"] = args.engines
    return changes
