"""Measure what work costs on your engine, or derive it, and write an engine profile.

Starts the engine in this process with your model and options, serves random prompts of many
lengths and batch sizes, copies KV blocks to host memory and back, and fits the coefficients. Pass
the options of your server, and run the command in the server's environment on an otherwise idle
machine. To use the profile:
`--additional-config '{"semantic_sched": {"profile": "FILE"}}'`. With --analytic nothing runs: the
profile follows from the model's config.json and the device's peak figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_semantic_sched.cli.arguments import Failure, failing, positive
from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.profiling.live_engine import BadOptions, LiveEngine
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.profile import formula
from vllm_semantic_sched.policy.profile.devices import Device, device_named, known_devices
from vllm_semantic_sched.policy.profile.model_shape import ModelShape
from vllm_semantic_sched.policy.profile.roofline import Roofline

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.profiling.check import Point, Verdict

_THIS_MACHINE = "this"
_BLOCK = 16  # tokens in a KV block of a scenario, unless it says otherwise

_EXAMPLES = """\
examples:
  semsched profile --output my.yaml -- MODEL --dtype bfloat16 --max-model-len 8192
  semsched profile --check my.yaml -- MODEL --dtype bfloat16 --max-model-len 8192
  semsched profile --analytic --model DIR --device h100 --tensor-parallel 2 --output h100.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare how to get a profile, and the options of the engine that it is for."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="profile to write")
    add(
        "--check",
        metavar="PROFILE",
        help=(
            "measure the cost of preemptions and compare it with the predictions of this profile; "
            "--output is then a JSON report. Exit status 3 if a target is missed"
        ),
    )
    add(
        "--analytic",
        action="store_true",
        help="derive the profile of --model on --device instead of measuring one",
    )
    add("--model", type=Path, metavar="DIR", help="folder with the model's config.json")
    add(
        "--device",
        default=_THIS_MACHINE,
        metavar="NAME",
        help=(
            f"{', '.join(known_devices())}; or %(default)s, which measures the processor or GPU "
            "for two seconds (default: %(default)s)"
        ),
    )
    add("--tensor-parallel", type=positive, default=1, metavar="N", help="devices (default: 1)")
    add("--max-tokens", type=int, metavar="N", help="longest sequence (default: the engine's)")
    add("--max-batch", type=int, metavar="N", help="largest decode batch (default: all seats)")
    add("--repeats", type=positive, default=5, metavar="N", help="per point (default: 5)")
    add(
        "--statistic",
        choices=("median", "fastest"),
        default="median",
        help=(
            "how repeats are reduced; `fastest` if other programs disturb the measurement "
            "(default: %(default)s)"
        ),
    )
    add("--seed", type=int, default=0, help="of the random prompts (default: 0)")
    add("--quiet", action="store_true", help="no progress bar")
    add(
        "engine",
        nargs="*",
        metavar="-- MODEL [OPTION ...]",
        help="the model and engine options of `vllm serve`",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, derive or check a profile; 2 if an option is invalid, 3 if a checked one misses a
    target."""
    if args.analytic:
        return _derive(args)
    if args.output is None and args.check is None:
        raise Failure("needs --output or --check", 2)
    if not args.engine:
        raise Failure("needs -- MODEL, or --analytic --model DIR", 2)
    with failing(PolicyError, BadOptions, OSError, status=2):
        if args.check is not None:
            formula.load_profile(args.check)  # fails before minutes of work, not after
        if args.output is not None:
            args.output.parent.mkdir(parents=True, exist_ok=True)
        with closing(LiveEngine(args.engine, args.seed)) as engine:
            return _measure(args, engine) if args.check is None else _check(args, engine)


@failing(OSError, ValueError, AttributeError, TypeError, RuntimeError, status=2)
def _derive(args: argparse.Namespace) -> int:
    if args.model is None:
        raise Failure("--analytic needs --model", 2)
    config = json.loads((args.model / "config.json").read_text("utf-8"))
    model = ModelShape.from_config(args.model.resolve().name, config)
    source = None
    if args.device == _THIS_MACHINE:
        device = _measured_device(model)
        source = f"a benchmark of {device.name}"
    else:
        device = device_named(args.device)
    roofline = Roofline(model, device, args.tensor_parallel)
    profile = roofline.profile(source)
    _print_roofline(roofline, profile)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        formula.write_profile(profile, args.output)
        print(
            f"written: {args.output}\nto plan with it:\n"
            f"  semsched plan --rate 20 --output plan --set engine.profile={args.output} \\\n"
            f"    --set engine.kv_blocks={roofline.kv_tokens // _BLOCK} --set engine.batch=null"
        )
    return 0


def _measured_device(model: ModelShape) -> Device:
    import torch

    from vllm_semantic_sched.engine.startup.device_benchmark import measure_device

    if torch.cuda.is_available():
        kind = "cuda"
        name = torch.cuda.get_device_name()
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        kind = "cpu"
        name = "this processor"
        memory = psutil.virtual_memory().total
    dtype = "float32" if model.kv_bytes == 4 else "bfloat16"
    return measure_device(kind, name, dtype, model, memory / 1e9)


def _print_roofline(roofline: Roofline, profile: formula.EngineProfile) -> None:
    seconds = {f"prefill of {n:,} tokens": profile.prefill_alone(n) for n in (1000, 8000, 32_000)}
    for sequences in (1, 16, 64, 256):
        batch = formula.Batch(decodes=sequences, context=1_000 * sequences)
        seconds[f"decode step, batch of {sequences}, 1,000 tokens each"] = profile.step(batch)
    seconds["save or load the KV of 1,000 tokens"] = profile.load(1_000)
    print(f"{profile.model} on {profile.hardware}, {profile.source}")
    print_table("", ("", "ms"), ((name, f"{s * 1e3:,.1f}") for name, s in seconds.items()))
    weights = roofline.model.weights / 1e9
    print(f"weights {weights:,.1f} GB; KV cache of {roofline.kv_tokens:,} tokens beside them")


def _measure(args: argparse.Namespace, engine: LiveEngine) -> int:
    from vllm_semantic_sched.lab.profiling.measure import Repeats, make_grid, measure_profile

    grid = make_grid(engine, args.max_tokens, args.max_batch)
    repeats = Repeats(args.repeats, args.statistic, args.seed, args.quiet)
    profile = measure_profile(engine, grid, args.engine, repeats)
    formula.write_profile(profile, args.output)
    for kind, residual in profile.residuals.items():
        print(
            f"{kind}: error median {residual.median:.1%}, p90 {residual.p90:.1%}, "
            f"{residual.points} points"
        )
    print(f"written: {args.output}")
    return 0


def _check(args: argparse.Namespace, engine: LiveEngine) -> int:
    from vllm_semantic_sched.lab.profiling.check import judge, make_lengths, measure_points, report
    from vllm_semantic_sched.lab.profiling.measure import Repeats

    profile = formula.load_profile(args.check)
    longest = min(engine.max_model_len - 1, engine.kv_tokens, args.max_tokens or sys.maxsize)
    beyond = profile.beyond_range(longest)
    if beyond is not None:
        print(f"semsched profile: {beyond}", file=sys.stderr)
    lengths = make_lengths(longest)
    if not lengths:
        raise Failure(f"all points are longer than {longest} tokens", 2)
    repeats = Repeats(args.repeats, args.statistic, args.seed + 1, args.quiet)
    points = measure_points(engine, profile, lengths, repeats)
    verdict = judge(profile, points)
    _print_points(points, verdict)
    if args.output is not None:
        args.output.write_text(json.dumps(report(profile, points, verdict), indent=1) + "\n")
    return 0 if verdict.met else 3


def _print_points(points: Sequence[Point], verdict: Verdict) -> None:
    from vllm_semantic_sched.lab.profiling import check

    def cells(measured: float, predicted: float) -> tuple[str, str]:
        return f"{measured * 1e3:.2f}", f"{predicted * 1e3:.2f} ({predicted / measured - 1:+.0%})"

    columns = ("prompt", "generated", "recompute ms", "predicted", "swap ms", "predicted")
    rows = []
    for point in points:
        recompute = cells(point.recompute, point.predicted_recompute)
        swap = cells(point.swap, point.predicted_swap)
        rows.append((point.prompt, point.generated, *recompute, *swap))
    print_table("", columns, rows, words=0)
    for name, (median, p90) in (("recompute", verdict.recompute), ("swap", verdict.swap)):
        print(
            f"{name}: error median {median:.1%} (target {check.MEDIAN_TARGET:.0%}), "
            f"p90 {p90:.1%} (target {check.P90_TARGET:.0%}), {len(points)} points"
        )
    print(
        f"the chosen plan is the cheaper one, or within {check.GOOD_CHOICE - 1:.0%} of it: "
        f"{verdict.choice:.1%} (target {check.CHOICE_TARGET:.0%}); at least "
        f"{verdict.worst_choice:.1%} with copies 1 to {check.SLOWDOWNS[-1]:,.0f} times slower"
    )
