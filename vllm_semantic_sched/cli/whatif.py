"""Replay a server's event log under other policies, in the simulator.

Tells what the recorded traffic would have met: times to first token and end-to-end latencies by
urgency level, and which SLOs would be missed.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_semantic_sched.cli.arguments import Failure, simulating
from vllm_semantic_sched.cli.console import make_console, print_table, save_page
from vllm_semantic_sched.lab.report import runs
from vllm_semantic_sched.lab.report.content import names_text, number_text
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.sim.runner import Cell

_MOST_POLICIES = 5  # in a table of 100 columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the log, the policies to try and the folder for the results."""
    add = parser.add_argument
    add("log", type=Path, metavar="FILE", help="the event log; rotated parts are read as well")
    add(
        "--policy",
        action="append",
        required=True,
        metavar="NAME|FILE",
        help=f"policy to try; can be repeated, {_MOST_POLICIES} in all",
    )
    add(
        "--output", type=Path, metavar="DIR", help="folder for results.csv, results.json and a page"
    )


@simulating()
def run(args: argparse.Namespace) -> None:
    """Print how far to trust the replay, two tables, a sentence per policy and what the figures do
    not say; 1 if a file cannot be read or written, 2 if the log or a policy is unusable."""
    from vllm_semantic_sched.lab.whatif import METRICS, SAME, read_log, replay

    if len(args.policy) > _MOST_POLICIES:
        raise Failure(f"--policy: {len(args.policy)} policies; at most {_MOST_POLICIES}", 2)
    policies = {Path(name).stem: load_policy(name) for name in args.policy}
    console = make_console()
    for number, log in sorted(read_log(args.log).items()):
        answer = replay(log, policies)
        seconds = log.requests[-1].request.arrival - log.requests[0].request.arrival
        title = f"engine {number}: {len(log.requests)} requests in {seconds:.3g} s"
        console.print("\n".join(answer.checks), soft_wrap=False, width=100)
        for metric, name in METRICS.items():
            _print_table(answer.cells, metric, f"{name}, s; {title}")
        lines = [*answer.verdicts, *answer.notes]
        console.print("\n".join(lines), soft_wrap=False, width=100)
        if args.output is not None:
            folder = args.output / f"engine-{number}" if number else args.output
            folder.mkdir(parents=True, exist_ok=True)
            about = {"description": "\n".join([f"{title}.", *answer.checks, *lines])}
            settings = answer.settings.model_copy(update=about)
            written = runs.write_results(folder, settings, answer.cells)
            first, *_ = METRICS
            page = runs.simulation_page(
                settings,
                answer.cells,
                first,
                reference=SAME,
                title=f"semsched whatif: replay of {args.log.name} under {names_text(policies)}",
            )
            written += save_page(page, folder)
            console.print("written: " + " ".join(map(str, written)), soft_wrap=True)


def _print_table(cells: Sequence[Cell], metric: str, title: str) -> None:
    """A row per level, a column per cell."""
    columns = ("level", "requests", *(cell.scheduler for cell in cells))
    rows = []
    for level in runs.level_names(cells):
        count = runs.metric_values(cells, level, "count")[0]
        figures = [count, *runs.metric_values(cells, level, metric)]
        rows.append([level, *map(number_text, figures)])
    print_table(title, columns, rows)
