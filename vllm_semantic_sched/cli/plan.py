"""Find by simulation the largest load that a policy can serve, the number of engines that a load
needs, and the effect of another policy on both."""

import argparse
import itertools
import textwrap
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_semantic_sched.cli import arguments
from vllm_semantic_sched.cli.console import make_console, print_table, save_page
from vllm_semantic_sched.lab.report.plan import plan_page, rate, rows, write_plan
from vllm_semantic_sched.policy.config.files import shipped_names
from vllm_semantic_sched.policy.overload.slo import targets
from vllm_semantic_sched.sim.plan import QUESTIONS, answer
from vllm_semantic_sched.sim.runner import mapped
from vllm_semantic_sched.sim.scenario import load_scenarios


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the scenario, its changes and the folder for the results."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        textwrap.fill(
            "The scenario describes engine and workload. The SLOs come from the tiers of a "
            "policy, or from the scenario's `slos`. An SLO is met if all targets of its level "
            "were met for the SLO's percentage of requests.",
            96,
        )
        + f"\n\nshipped scenarios: {', '.join(shipped_names('scenario'))}"
        + "\n\nexamples:\n  semsched plan --output plan --workers 2"
        "\n  semsched plan --policy tiers --policy my-tiers.yaml --rate 12 --output plan"
        "\n  semsched plan --scenario my.yaml --trace requests.jsonl --output plan"
    )
    add = parser.add_argument
    add("--scenario", default="capacity", metavar="FILE|NAME", help="default: %(default)s")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the results")
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
        help="replay JSON lines, or the Azure trace conv or code",
    )
    add("--engines", type=arguments.positive, metavar="N", help="engines (default: the scenario's)")
    arguments.add_scenario_arguments(parser)


@arguments.simulating()
def run(args: argparse.Namespace) -> None:
    """Make a plan; 1 if a file cannot be written, 2 if the scenario or an option is invalid."""
    scenario, *others = load_scenarios(args.scenario, _changes(args))
    if others:
        problem = "a plan needs a scenario without a sweep"
        raise arguments.Failure(f"--scenario {args.scenario}: {problem}", 2)
    for scheduler in scenario.policies:
        if not any(map(targets, scenario.slos(scheduler))):
            raise arguments.Failure(
                f"{scheduler} has no SLO for any level: set `slo` in its tiers, or `slos` in "
                "the scenario",
                2,
            )
    args.output.mkdir(parents=True, exist_ok=True)
    pairs = itertools.product(scenario.policies, QUESTIONS)
    tasks = [(scenario, scheduler, question) for scheduler, question in pairs]
    results = mapped(answer, tasks, args.workers)
    bar = tqdm(results, total=len(tasks), unit="question", disable=args.quiet)
    answers = {(trial.scheduler, trial.question): trial for trial in bar}
    console = make_console()
    now = answers[next(iter(scenario.policies)), "now"].trials[0]
    console.print(
        f"{scenario.settings.description} {rate(now):.3g} requests/s on {now.engines} engine(s)",
        soft_wrap=True,
    )
    print_table("", ("", *scenario.policies), rows(scenario, answers))
    written = [*write_plan(args.output, scenario, answers)]
    written += save_page(plan_page(scenario, answers), args.output)
    console.print("written: " + " ".join(map(str, written)))


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if args.policy:
        changes["schedulers"] = {Path(name).stem: {"policy": name} for name in args.policy}
    if args.rate is not None:
        changes |= {"workload.arrivals": "poisson", "workload.rate": args.rate}
    if args.trace is not None:
        kind, _, name = args.trace.partition(":")
        if kind == "azure":
            changes |= {"workload.arrivals": "azure", "workload.path": name}
        else:
            changes |= {"workload.arrivals": "jsonl", "workload.path": args.trace}
    if args.engines is not None:
        changes["engine.replicas"] = args.engines
    return changes | arguments.parse_changes(args.set)
