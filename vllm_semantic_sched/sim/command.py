"""Simulate schedulers on an engine model: same policy code as in the engine, no GPU."""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path
from typing import Any

from vllm_semantic_sched.policy.errors import PolicyError
from vllm_semantic_sched.policy.files import shipped_names

_CHARTS = 12  # Gantt charts and queue depths per call at most
_DEFAULT_METRIC = "normalized_waiting"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = (
        textwrap.fill(f"shipped scenarios: {', '.join(shipped_names('scenario'))}", 96)
        + "\n\nexample:\n  semsched simulate --scenario paper-table1 --output results --workers 2"
        "\n  semsched simulate --validate --output validation -- MODEL --max-num-seqs 8"
        "\n  semsched simulate --keys      (every key of a scenario file and its meaning)"
    )
    add = parser.add_argument
    add("--scenario", metavar="FILE|NAME", help="a scenario file, or the name of a shipped one")
    add("--output", type=Path, metavar="DIR", help="where results and pictures go")
    add("--workers", type=_positive, default=1, metavar="N", help="processes (default: 1)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the scenario, as workload.requests=100; can be repeated",
    )
    add(
        "--metric",
        default=_DEFAULT_METRIC,
        help="what the table and the picture show (default: %(default)s); the files hold all",
    )
    add(
        "--validate",
        action="store_true",
        help="compare the simulator with your real engine under four loads and three schedulers; "
        "takes --output, --requests, and after -- the model and engine options of `vllm serve`",
    )
    add(
        "--requests",
        type=_positive,
        default=80,
        metavar="N",
        help="with --validate: per load (default: %(default)s)",
    )
    add("engine_options", nargs="*", metavar="-- MODEL [OPTION ...]", help="with --validate")
    add("--keys", action="store_true", help="explain every key of a scenario file and exit")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Run a scenario; 2 if the scenario or an option is invalid, 1 if a run fails."""
    from vllm_semantic_sched.sim.engine import RequestTooLarge
    from vllm_semantic_sched.sim.trace import TraceError

    if args.keys:
        _print_keys()
        return 0
    try:
        return _validate(args) if args.validate else _run(args)
    except (PolicyError, TraceError, RequestTooLarge, BadOption) as error:
        print(f"semsched simulate: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"semsched simulate: {error}", file=sys.stderr)
        return 1


def _validate(args: argparse.Namespace) -> int:
    import json

    from tqdm import tqdm

    from vllm_semantic_sched.bench.paced_engine import EngineFailed
    from vllm_semantic_sched.bench.validate import (
        LOADS,
        SCHEDULERS,
        print_validation,
        report,
        validate,
    )

    if args.output is None or not args.engine_options:
        raise BadOption("--validate needs --output, and after -- a model and engine options")
    try:
        with tqdm(total=len(LOADS) * len(SCHEDULERS), unit="run", disable=args.quiet) as bar:
            found = validate(
                args.engine_options, args.requests, args.output, list(LOADS), bar.update
            )
    except EngineFailed as error:
        print(f"semsched simulate: {error}", file=sys.stderr)
        return 1
    print_validation(found)
    path = args.output / "validation.json"
    path.write_text(json.dumps(report(found), indent=1) + "\n", encoding="utf-8")
    print(f"written: {path}")
    return 0


class BadOption(ValueError):
    """An option that the parser lets pass and that makes no sense. The message names it."""


def _run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from vllm_semantic_sched.cli.console import make_console
    from vllm_semantic_sched.sim.metrics import METRICS, is_promised
    from vllm_semantic_sched.sim.output import (
        print_results,
        title_of,
        write_results,
        write_trace,
    )
    from vllm_semantic_sched.sim.plots import draw_depths, draw_lines
    from vllm_semantic_sched.sim.runner import cells_of, mapped, run_task, tasks_of
    from vllm_semantic_sched.sim.scenario import load_scenarios
    from vllm_semantic_sched.spans import draw_gantt

    if args.scenario is None or args.output is None:
        raise BadOption("--scenario and --output are needed")
    if args.metric not in METRICS:
        raise BadOption(f"--metric {args.metric}: unknown; valid: {', '.join(METRICS)}")
    scenarios = load_scenarios(args.scenario, parse_changes(args.set))
    settings = scenarios[0].settings
    if args.metric == "slo_met" and not any(
        is_promised(slo)
        for scenario in scenarios
        for scheduler in scenario.policies
        for slo in scenario.slos(scheduler)
    ):
        raise BadOption("--metric slo_met: neither the scenario nor a policy promises anything")
    # Before the work, not after it.
    args.output.mkdir(parents=True, exist_ok=True)
    tasks = tasks_of(scenarios)
    with mapped(run_task, tasks, args.workers) as stream:
        bar = tqdm(stream, total=len(tasks), unit="run", disable=args.quiet)
        cells = cells_of(tasks, list(bar))
    console = make_console()
    print_results(console, settings, cells, args.metric)
    written = write_results(args.output, settings, cells)
    picture = args.output / f"{args.metric}.png"
    draw_lines(cells, args.metric, picture, list(settings.sweep[0]) if settings.sweep else [])
    written.append(picture)
    written.append(args.output / "queue-depth.png")
    draw_depths(cells[:_CHARTS], written[-1])
    for number, cell in enumerate([cell for cell in cells if cell.spans][:_CHARTS]):
        name = f"{number}-{cell.scheduler}"
        written += [args.output / f"gantt-{name}.png", args.output / f"trace-{name}.json"]
        draw_gantt(cell.spans, written[-2], title_of(cell))
        write_trace(written[-1], cell)
    console.print("written: " + " ".join(map(str, written)), soft_wrap=True)
    return 0


def parse_changes(settings: list[str]) -> dict[str, Any]:
    """The fields and values of `--set FIELD=VALUE` options.

    Raises:
        BadOption: one is not of that form.
    """
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


def _print_keys() -> None:
    from vllm_semantic_sched.policy.command import describe_keys
    from vllm_semantic_sched.sim.sections import Settings

    print(describe_keys(Settings), end="")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
