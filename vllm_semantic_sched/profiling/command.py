"""Measure what work costs on your engine, and write an engine profile.

Starts the engine inside this process with your model and options, serves random prompts of many
lengths and batch sizes, copies KV blocks to host memory and back, and fits the coefficients. Give
the options of your server and run it in the server's environment, on a machine that does nothing
else. The profile is used with
`--additional-config '{"semantic_sched": {"profile": "FILE"}}'`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from vllm_semantic_sched.policy.facts.profile import load_profile, write_profile
from vllm_semantic_sched.policy.facts.section import PolicyError

if TYPE_CHECKING:
    from vllm_semantic_sched.profiling.live_engine import LiveEngine

T = TypeVar("T")

_EXAMPLES = """\
examples:
  semsched profile --output my.yaml -- MODEL --dtype bfloat16 --max-model-len 8192
  semsched profile --check my.yaml -- MODEL --dtype bfloat16 --max-model-len 8192
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `semsched profile`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="profile to write; a picture goes beside it")
    add(
        "--check",
        metavar="PROFILE",
        help="measure what preempting would cost and compare with this profile's predictions; "
        "--output then takes the figures as JSON. Exit status 3 if a target is missed",
    )
    add("--max-tokens", type=int, metavar="N", help="no longer sequences (default: the engine's)")
    add("--max-batch", type=int, metavar="N", help="no larger decode batches (default: all seats)")
    add("--repeats", type=int, default=5, metavar="N", help="of every point (default: 5)")
    add(
        "--statistic",
        choices=("median", "fastest"),
        default="median",
        help="what repeats are reduced to; `fastest` where other programs disturb the "
        "measurement (default: %(default)s)",
    )
    add("--seed", type=int, default=0, help="of the random prompts (default: 0)")
    add("--quiet", action="store_true", help="no progress bar")
    add(
        "engine",
        nargs="+",
        metavar="-- MODEL [OPTION ...]",
        help="the model and engine options as given to `vllm serve`",
    )


def run(args: argparse.Namespace) -> int:
    """Measure; 2 if an option is invalid, 3 if a checked profile misses a target."""
    if args.output is None and args.check is None:
        print("semsched profile: --output or --check is needed", file=sys.stderr)
        return 2
    if args.repeats < 1:
        print(f"semsched profile: --repeats {args.repeats}: at least 1", file=sys.stderr)
        return 2
    from vllm_semantic_sched.profiling.live_engine import BadOptions, live_engine

    try:
        if args.check is not None:
            load_profile(args.check)  # before minutes of work, not after
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
        with live_engine(args.engine, args.seed) as engine:
            return _measure(args, engine) if args.check is None else _check(args, engine)
    except (PolicyError, BadOptions, OSError) as error:
        print(f"semsched profile: {error}", file=sys.stderr)
        return 2


def _measure(args: argparse.Namespace, engine: LiveEngine) -> int:
    from vllm_semantic_sched.profiling.measure import make_grid, make_profile, measure
    from vllm_semantic_sched.profiling.plots import draw

    grid = make_grid(engine, args.max_tokens, args.max_batch)
    stream = measure(engine, grid, args.repeats, args.statistic, args.seed)
    points = args.repeats * (len(grid.prefills) + len(grid.decodes))
    found = _last(stream, points, args.quiet)
    profile = make_profile(engine, grid, found, args.engine, args.repeats, args.statistic)
    write_profile(profile, args.output)
    picture = args.output.with_suffix(".png")
    draw(profile, found, picture)
    for kind, residual in profile.residuals.items():
        print(
            f"{kind}: error median {residual.median:.1%}, p90 {residual.p90:.1%}, "
            f"{residual.points} points"
        )
    print(f"written: {args.output} {picture}")
    return 0


def _check(args: argparse.Namespace, engine: LiveEngine) -> int:
    from vllm_semantic_sched.profiling.check import check, judge, make_points, print_points, report

    profile = load_profile(args.check)
    longest = min(engine.max_model_len - 1, engine.kv_tokens, args.max_tokens or sys.maxsize)
    beyond = profile.beyond_range(longest)
    if beyond is not None:
        print(f"semsched profile: {beyond}", file=sys.stderr)
    pairs = make_points(longest)
    if not pairs:
        print(f"semsched profile: no point is as short as {longest} tokens", file=sys.stderr)
        return 2
    stream = check(engine, profile, pairs, args.repeats, args.statistic, args.seed + 1)
    points = _last(stream, args.repeats * len(pairs), args.quiet)
    verdict = judge(profile, points)
    print_points(points, verdict)
    if args.output is not None:
        args.output.write_text(json.dumps(report(profile, points, verdict), indent=1) + "\n")
    return 0 if verdict.met else 3


def _last(stream: Iterator[T | None], points: int, quiet: bool) -> T:
    """Run through the points with a progress bar; what came at the end."""
    from tqdm import tqdm

    last: T | None = None
    with tqdm(total=points, unit="point", disable=quiet) as bar:
        for last in stream:
            bar.update(last is None)
    assert last is not None
    return last
