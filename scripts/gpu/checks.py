"""Checks this project on the machine's accelerator, unattended, and writes a page: see
scripts/gpu_check.sh."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.answers import SCHEDULERS, URGENT
from gpu.steps import Run, Step, table

ROOT = Path(__file__).resolve().parents[2]
_PYTHON = sys.executable
_SEMSCHED = (_PYTHON, "-m", "vllm_semantic_sched.cli")
_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}  # without a compiler
_BF16 = "bf16"
_FP32 = "float32"
# The small model as it is served on a GPU, and as two schedules are comparable to the token.
_ON_GPU: dict[str, dict[str, Any]] = {
    _BF16: {
        "dtype": "bfloat16",
        "compilation_config": _GRAPHS | {"cudagraph_capture_sizes": [1, 2, 4, 8]},
        "gpu_memory_utilization": 0.1,
    },
    _FP32: {
        "dtype": "float32",
        "enforce_eager": True,
        "attention_backend": "TRITON_ATTN",
        "gpu_memory_utilization": 0.1,
    },
}
_ON_CPU: dict[str, dict[str, Any]] = {_FP32: {"dtype": "float32", "enforce_eager": True}}
_SIZES = [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256]
# A vocabulary of Llama-3.1's size: the last layer costs time in every step.
_LLAMA_ARGUMENTS = (
    "--load-format", "dummy",
    "--dtype", "bfloat16",
    "--max-model-len", "16384",
    "--max-num-batched-tokens", "2048",
    "--gpu-memory-utilization", "0.88",
    "--hf-overrides", '{"vocab_size": 128256}',
    "--no-enable-prefix-caching",
    "--compilation-config", json.dumps(_GRAPHS | {"cudagraph_capture_sizes": _SIZES}),
)  # fmt: skip
_LOADS: dict[str, tuple[str, float]] = {
    "fcfs": ("fcfs", 0.0),
    "ours-swap": ("semantic-true", 16.0),
    "priority": ("priority", 0.0),
    "ours": ("semantic-true", 0.0),
}
"""Scheduler and GiB of host memory, by label."""
_PREEMPTED = "preemptions"  # beginning of the counters' names
_EMULATED = "h100-8b"  # profile of the emulated device at the pace of that model


def has_gpu() -> bool:
    """Whether torch is there and sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def module(name: str, *arguments: object) -> list[str]:
    """The command of one of this folder's modules."""
    return [_PYTHON, "-m", f"gpu.{name}", *map(str, arguments)]


def check(args: argparse.Namespace) -> int:
    """A small model under vLLM's scheduler and ours; 1 if a step failed."""
    kinds = _ON_GPU if has_gpu() else _ON_CPU
    output = args.output
    model = output / "model"
    sections = (versions_section, answers_section, log_section("torch"), log_section("copies"))
    with Run("vllm-semantic-sched on this machine", output, args.limit, sections) as run:
        run.step(Step("versions", module("versions", output / "versions.json"), 120))
        study = ROOT / "scripts" / "studies"
        run.step(Step("torch", [_PYTHON, study / "torch_check.py"], 60))
        if run.step(Step("model", module("model", model), 90)):
            answers = [
                Step(f"{name}-{kind}", _answers(output, name, kind, kinds[kind], model, args), 240)
                for kind in kinds
                for name in SCHEDULERS
            ]
            beside = max(1, (os.cpu_count() or 1) // 2)
            for begin in range(0, len(answers), beside):
                run.together(answers[begin : begin + beside])
            run.judge("answers", problems_of(read_answers(output)))
        run.step(Step("copies", [_PYTHON, study / "kv_copy.py"], 120))
        parity = ROOT / "tests" / "parity"
        if parity.is_dir():  # a checkout, with the tests' packages
            # Not the test of what the recordings must contain: that depends on the machine's speed.
            command = [_PYTHON, "-m", "pytest", "-q", "-n", "0", parity, "-k", "not every_kind"]
            run.step(Step("decisions", command, 300))
    return _end(run)


def _answers(
    output: Path, name: str, kind: str, engine: Mapping[str, Any], model: Path, args: Any
) -> list[str]:
    given = ["--engine", json.dumps(engine), "--scale", args.scale]
    return module("answers", output / f"{name}-{kind}.json", name, model, *given)


def load(args: argparse.Namespace) -> int:
    """A model of 8 billion parameters without weights, under load; 1 if a step failed."""
    output = args.output
    model = args.model or output / "model"
    engine = list(_LLAMA_ARGUMENTS) if args.model is None else shlex.split(args.server_args)
    sections = (versions_section, load_section, steps_section)
    with Run("vllm-semantic-sched under load on this machine", output, args.limit, sections) as run:
        versions = module("versions", output / "versions.json", "--versions")
        run.step(Step("versions", versions, 60))
        if args.model is None:
            shape = ["bench", "make-model", model, "--shape", "llama-3.1-8b"]
            run.step(Step("model", [*_SEMSCHED, *shape], 60))
        for label in ("fcfs", "ours-swap", "priority"):
            run.step(_load_step(label, model, engine, args))
        profile = ["--analytic", "--model", model, "--output", output / "derived.yaml"]
        run.step(Step("derived", [*_SEMSCHED, "profile", *profile], 60))
        profile = ["--quiet", "--repeats", "2", "--max-tokens", args.profile_tokens]
        profile += ["--output", output / "measured.yaml", "--", model, *engine]
        profile += ["--max-num-seqs", args.seats]
        run.step(Step("measured", [*_SEMSCHED, "profile", *map(str, profile)], args.profile_limit))
        run.step(_load_step("ours", model, engine, args))
    return _end(run)


def _load_step(label: str, model: Path, engine: Sequence[str], args: argparse.Namespace) -> Step:
    scheduler, host = _LOADS[label]
    given = ["--seats", args.seats, "--seconds", args.seconds, "--scale", args.scale]
    given += ["--batch", args.batch, "--drain", args.drain]
    given += ["--host-gib", min(host, args.host_gib), f"--server-args={shlex.join(engine)}"]
    command = module("served", args.output, label, scheduler, model, *given)
    return Step(label, command, args.step_limit)


def _end(run: Run) -> int:
    print(f"page: {run.output / 'README.md'}")
    return int(run.failed)


# What the steps left


def read_answers(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """The answers' files by kind of engine and scheduler, as far as they are there."""
    answers: dict[str, dict[str, dict[str, Any]]] = {}
    for kind in (_BF16, _FP32):
        for name in SCHEDULERS:
            path = output / f"{name}-{kind}.json"
            if path.exists():
                answers.setdefault(kind, {})[name] = json.loads(path.read_text())
    return answers


def equal_answers(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    """How many requests got the same tokens."""
    return sum(second["tokens"].get(name) == tokens for name, tokens in first["tokens"].items())


def problems_of(answers: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """What is wrong: answers that are missing or, in float32, differ, and schedulers of ours that
    preempted nothing. In bfloat16 the size of a batch may change an answer."""
    problems = []
    for kind, runs in answers.items():
        for name, run in runs.items():
            first = runs.get("fcfs")
            if kind == _FP32 and first and equal_answers(first, run) < len(first["tokens"]):
                problems.append(f"{name}, {kind}: answers differ from those of fcfs")
            if run["wrong_lengths"]:
                problems.append(f"{name}, {kind}: other lengths than asked for")
            plan = {"ours": _PREEMPTED, "swap": f"{_PREEMPTED} swap"}.get(name)
            if plan and not any(counter.startswith(plan) for counter in run["counters"]):
                problems.append(f"{name}, {kind}: no {plan}")
    if not answers:
        problems.append("no scheduler served its requests")
    return problems


def versions_section(output: Path) -> str:
    """One line."""
    path = output / "versions.json"
    if not path.exists():
        return ""
    versions = json.loads(path.read_text())
    failed = versions.pop("failed")
    text = ", ".join(f"{name} {value}" for name, value in versions.items())
    return f"{text}. Not importable: {', '.join(failed)}" if failed else text


def answers_section(output: Path) -> str:
    """A row per run of the small model."""
    rows = []
    for kind, runs in read_answers(output).items():
        first = runs.get("fcfs")
        for name, run in runs.items():
            equal = "-"
            if first is not None:
                equal = f"{equal_answers(first, run)} of {len(first['tokens'])}"
            places = [run["order"].index(f"urgent{index}") + 1 for index in range(URGENT)]
            moved = [
                f"{counter}: {count:.0f}"
                for counter, count in run["counters"].items()
                if counter.startswith(_PREEMPTED)
            ]
            chosen = f"runner {run['runner']}, {run['attention']}, graphs {run['graphs']}"
            if run["asynchronous"]:
                chosen += ", asynchronous"
            rows.append(
                [
                    f"{name}, {kind}",
                    equal,
                    ", ".join(map(str, places)),
                    ", ".join(moved) or "-",
                    f"{run['step'] * 1e3:.2f}",
                    f"{run['started']:.0f}",
                    chosen,
                ]
            )
    if not rows:
        return ""
    head = (
        "run",
        "answers as fcfs",
        "urgent ones ended as number",
        "preemptions",
        "step, ms",
        "start, s",
        "vLLM",
    )
    return "## Answers\n\n" + table(head, rows)


def log_section(name: str) -> Callable[[Path], str]:
    """A section that quotes a step's log."""

    def section(output: Path) -> str:
        path = output / f"{name}.log"
        if not path.exists():
            return ""
        return f"## {name}\n\n```\n{path.read_text(errors='replace').strip()[-3000:]}\n```"

    return section


def load_section(output: Path) -> str:
    """A row per server, and one per level of each."""
    rows = []
    levels = []
    for label in _LOADS:
        path = output / f"{label}.json"
        if not path.exists():
            continue
        run = json.loads(path.read_text())
        everyone = run["all"]
        preemptions = run["counters"].get("vllm:num_preemptions_total", 0)
        rows.append(
            [
                label,
                f"{run['rate']:.2f}",
                f"{everyone['done']} of {everyone['sent']}",
                f"{run['tokens_per_second']:.0f}",
                f"{everyone['latency']:.2f}",
                f"{preemptions:.0f}",
                f"{run['start']:.0f}",
                run["errors"] or "-",
            ]
        )
        for level, figures in run["levels"].items():
            times = (f"{figures[key]:.2f}" for key in ("ttft", "ttft_p50", "ttft_p99", "latency"))
            levels.append([label, level, f"{figures['done']} of {figures['sent']}", *times])
    if not rows:
        return ""
    head = ("server", "requests/s", "done", "tokens/s", "latency, s", "preemptions", "start, s")
    first = table((*head, "errors"), rows)
    head = ("server", "level", "done", "TTFT mean, s", "p50", "p99", "latency of the done, s")
    note = "A request that was cut off before its first token counts with the time it had waited."
    return f"## Under load\n\n{first}\n\n{note}\n\n{table(head, levels)}"


def steps_section(output: Path) -> str:
    """Times of steps: those of the emulated device, derived ones, and measured ones."""
    from vllm_semantic_sched.policy.profile.formula import Batch, load_profile

    profiles = {"emulated device": load_profile(_EMULATED)}
    for name in ("derived", "measured"):
        if (output / f"{name}.yaml").exists():
            profiles[name] = load_profile(str(output / f"{name}.yaml"))
    if len(profiles) == 1:
        return ""
    rows: list[list[object]] = []
    for tokens in (128, 512, 2048):
        times = [profile.prefill_alone(tokens) for profile in profiles.values()]
        rows.append([f"prefill of {tokens:,} tokens", *_milliseconds(times)])
    for count in (1, 16, 64, 128):
        batch = Batch(decodes=count, context=1_000 * count)
        times = [profile.step(batch) for profile in profiles.values()]
        rows.append([f"decode step of {count}, 1,000 tokens each", *_milliseconds(times)])
    for what in ("load", "save"):
        times = [getattr(profile, what)(1_000) for profile in profiles.values()]
        rows.append([f"{what} of 1,000 tokens", *_milliseconds(times)])
    note = f"Milliseconds. The emulated device runs at the profile {_EMULATED}."
    return f"## Step times\n\n{note}\n\n{table(('', *profiles), rows)}"


def _milliseconds(seconds: Sequence[float]) -> list[str]:
    return [f"{1e3 * time:.2f}" for time in seconds]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; exits with 2 if it is wrong."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    for name, run in (("check", check), ("load", load)):
        part = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        part.set_defaults(run=run)
        add = part.add_argument
        add("--output", type=Path, default=ROOT / "gpu-check" / name, help="folder (%(default)s)")
        add("--limit", type=float, default=560.0, help="seconds for all steps (%(default)s)")
        add("--scale", type=float, default=1.0, help="of the lengths of requests (%(default)s)")
        if name == "check":
            continue
        add("--model", type=Path, help="another model than the shape of Llama-3.1-8B")
        add("--server-args", default="", help="arguments of vllm serve for --model, one string")
        add("--seats", type=int, default=128, help="max_num_seqs (%(default)s)")
        add("--seconds", type=float, default=35.0, help="of arrivals (%(default)s)")
        add("--drain", type=float, default=20.0, help="seconds for the rest (%(default)s)")
        add("--batch", type=int, default=160, help="requests that measure capacity (%(default)s)")
        add("--host-gib", type=float, default=16.0, help="most host memory for KV (%(default)s)")
        add("--step-limit", type=float, default=240.0, help="seconds of a server (%(default)s)")
        add("--profile-limit", type=float, default=110.0, help="of the profile (%(default)s)")
        add("--profile-tokens", type=int, default=4096, help="longest prompt (%(default)s)")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    args.output = args.output.resolve()
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()
