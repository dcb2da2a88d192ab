"""Compare the simulator with a real engine: the same loads on both.

Runs four loads under three schedulers on the real engine and in the simulator, prints the error of
the simulator for each metric and level, and writes `validation.json`.

With --whatif: records three other loads with an engine that only observes, predicts from its event
log what two policies would do (`semsched whatif`), runs the same arrivals under both, and compares.

examples:
  python scripts/studies/validation.py --output validation -- MODEL --max-num-seqs 8
  python scripts/studies/validation.py --whatif --output whatif -- MODEL --max-num-seqs 8
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from common import main, write_json
from paced_engine import PacedProcess

from vllm_semantic_sched.cli.console import make_console, make_table
from vllm_semantic_sched.lab.bench.client import Progress

if TYPE_CHECKING:
    from vllm_semantic_sched.sim.scenario import Scenario

LOADS: dict[str, dict[str, Any]] = {
    "light": {"arrivals": "poisson", "load": 0.4},
    "overloaded": {"arrivals": "poisson", "load": 1.6},
    "spiky": {"arrivals": "bursts", "load": 0.8},
    "KV-bound": {
        "arrivals": "poisson",
        "load": 1.1,
        "prompt": {"kind": "uniform", "low": 150, "high": 350},
        "output": {"kind": "uniform", "low": 40, "high": 120},
    },
}
"""Loads by name. `load` is the offered load relative to the engine's capacity."""

SCHEDULERS: dict[str, dict[str, Any]] = {
    "FCFS": {"base": "fcfs"},
    "priority": {"base": "priority", "preemption": {"enabled": False}, "stage": {"mode": "off"}},
    "semantic": {"base": "semantic"},
}
"""Policies. No predictor: clients state the level, and the length is a limit."""

PROFILE = "cpu-2core-small"
"""The engine profile that the schedulers are given."""

METRICS = ("e2e_mean", "normalized_waiting")
TARGET = 0.15
# A smaller difference between two schedulers counts as none.
_DISTINCT = 0.10
_UNREAD = {"predictor": {"enabled": False}}
_COMMON = {**_UNREAD, "correct_profile": False}
_LENGTHS = {
    "prompt": {"kind": "uniform", "low": 16, "high": 120},
    "output": {"kind": "uniform", "low": 8, "high": 64},
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """A metric of one level (or `all`) under one scheduler and load, in seconds."""

    load: str
    scheduler: str
    level: str
    metric: str
    real: float
    simulated: float

    @property
    def error(self) -> float:
        """Error of the simulator relative to the real engine."""
        return self.simulated / self.real - 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """A load under a scheduler: preemptions, and the pace of the engine.

    The pace is the time of the engine's steps relative to the same steps before and after the load.
    """

    preemptions: int
    simulated_preemptions: int
    pace: float


@dataclass(frozen=True)
class Validation:
    """All comparisons, and their runs by load and scheduler."""

    comparisons: list[Comparison]
    runs: dict[tuple[str, str], Run]

    def wrong_orders(self) -> list[str]:
        """Return the pairs of schedulers that the simulator puts in the wrong order.

        Only pairs that differ by a tenth or more on the real engine count.
        """
        found = {(c.load, c.level, c.metric, c.scheduler): c for c in self.comparisons}
        wrong = []
        for (load, level, metric, one), first in found.items():
            for other in SCHEDULERS:
                second = found.get((load, level, metric, other))
                if second is None or one >= other:
                    continue
                real = first.real / second.real
                simulated = first.simulated / second.simulated
                if abs(real - 1.0) >= _DISTINCT and (real < 1.0) != (simulated < 1.0):
                    wrong.append(f"{load}, level {level}, {metric}: {one} and {other}")
        return wrong


def validate(
    options: Sequence[str],
    requests: int,
    folder: Path,
    loads: Sequence[str],
    progress: Callable[[], object],
) -> Validation:
    """Run every load under every scheduler on the real engine and in the simulator.

    Args:
        options: of `vllm serve`, beginning with the model.
        requests: per load.
        folder: where a trace and a profile per run are written.
        progress: called after each run.

    Raises:
        EngineFailed: the engine did not start or ended by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    comparisons: list[Comparison] = []
    runs = {}
    unit: float | None = None
    with ExitStack() as stack:
        engines = {}
        for scheduler, policy in SCHEDULERS.items():
            file = folder / f"policy-{scheduler}.yaml"
            file.write_text(yaml.safe_dump(policy | _COMMON))
            engine = stack.enter_context(PacedProcess(options, str(file), PROFILE, unit))
            engines[scheduler] = engine
            unit = engine.unit  # one unit for all clocks, so that their times can be compared
        for name in loads:
            load = prepare_load(name, requests)
            for scheduler, engine in engines.items():
                result = engine.serve(load) | {"name": name}
                found, run = compare(result, scheduler, SCHEDULERS[scheduler] | _COMMON, folder)
                comparisons += found
                runs[name, scheduler] = run
                progress()
    return Validation(comparisons, runs)


def _bursts(count: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Bursts of up to 24 requests; a load of 0.9."""
    loads = prepare_load("spiky", count)
    return [one | {"arrival": one["arrival"] * 0.8 / 0.9} for one in loads]


def _azure(count: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Production arrivals and lengths (Azure 2023, conversations) at a load of 1.1; lengths are
    divided by 8, for a small model."""
    from vllm_semantic_sched.sim.sections import WorkloadModel
    from vllm_semantic_sched.sim.workload import draw_workload

    model = WorkloadModel(arrivals="azure", path="conv", requests=count)
    trace = draw_workload(model, 5, random)
    arrivals = trace.arrivals / trace.arrivals[-1] / 1.1
    prompts, outputs = (np.clip(each // 8, 4, 300) for each in (trace.prompts, trace.outputs))
    columns = zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [
        {"arrival": arrival, "prompt_tokens": prompt, "output_tokens": output}
        for arrival, prompt, output in columns
    ]


def _prefixes(count: int, random: np.random.Generator) -> list[dict[str, Any]]:
    """Five long system prompts, and short questions after them; without the prefix cache the load
    would be 1.6."""
    arrivals = np.cumsum(random.exponential(1 / (1.6 * count), count))
    shared = random.integers(100, 260, 5)
    which = random.integers(0, 5, count)
    return [
        {
            "arrival": float(arrival),
            "prompt_tokens": int(shared[which[index]] + random.integers(8, 60)),
            "output_tokens": int(random.integers(8, 64)),
            "prefix": [int(which[index]) + 1, int(shared[which[index]])],
        }
        for index, arrival in enumerate(arrivals)
    ]


WHATIF_LOADS: dict[str, Callable[[int, np.random.Generator], list[dict[str, Any]]]] = {
    "bursts": _bursts,
    "azure": _azure,
    "prefixes": _prefixes,
}
WHATIF_POLICIES = ("ems", "tiers")
_OBSERVED = "observed"


def validate_whatif(
    options: Sequence[str], requests: int, folder: Path, progress: Callable[[], object]
) -> list[Comparison]:
    """Record loads while observing, predict `WHATIF_POLICIES`, run them, and compare.

    Args and raises: as for `validate`.
    """
    from vllm_semantic_sched.lab.whatif import METRICS, read_log, replay
    from vllm_semantic_sched.policy.config import load_policy, parse_policy
    from vllm_semantic_sched.policy.facts.files import read_config

    folder = folder.absolute()
    found: list[Comparison] = []
    unit: float | None = None
    with ExitStack() as stack:
        engines = {}
        for name in (_OBSERVED, *WHATIF_POLICIES):
            policy: dict[str, Any] = {"observe": True}
            if name != _OBSERVED:
                policy, _ = read_config(name, kind="policy")
            log = folder / f"{name}.jsonl"
            policy |= _UNREAD | {"events": {"path": str(log)}}
            file = folder / f"policy-{name}.yaml"
            file.write_text(yaml.safe_dump(policy))
            engine = stack.enter_context(PacedProcess(options, str(file), PROFILE, unit, logs=True))
            engines[name], unit = engine, engine.unit
        for load, draw in WHATIF_LOADS.items():
            random = np.random.default_rng([11, len(load)])
            drawn = draw(requests, random)
            for one in drawn:
                one["level"] = int(random.choice(3, p=[1 / 6, 2 / 6, 3 / 6]))
            needed: float | None = None
            logs = {}
            for name, engine in engines.items():
                result = engine.serve(drawn, needed)
                needed = result["unit"]
                copy = folder / f"{load}-{name}.jsonl"
                shutil.copy(folder / f"{name}.jsonl.1", copy)
                logs[name] = read_log(copy)[0]
                progress()
            policies = {
                name: parse_policy(load_policy(name).model_dump(exclude_unset=True) | _UNREAD)
                for name in WHATIF_POLICIES
            }
            predicted = replay(logs[_OBSERVED], policies).cells
            for cell in predicted[1:]:
                name = cell.scheduler if cell.scheduler in logs else _OBSERVED
                measured = replay(logs[name], {}).cells[0].levels
                found += [
                    Comparison(load, name, level, metric, row[metric], cell.levels[level][metric])
                    for level, row in measured.items()
                    for metric in METRICS
                ]
    return found


def print_whatif(found: Sequence[Comparison]) -> None:
    """Print a row per load and policy, and the errors in total."""
    console = make_console()
    levels = list(dict.fromkeys(one.level for one in found))
    rows = dict.fromkeys((one.load, one.scheduler, one.metric) for one in found)
    table = make_table("measured s, error", "load", "policy", "metric", *levels, words=3)
    for key in rows:
        row = {one.level: one for one in found if (one.load, one.scheduler, one.metric) == key}
        cells = (f"{row[at].real:.3g} {row[at].error:+.0%}" if at in row else "-" for at in levels)
        table.add_row(*key, *cells)
    console.print(table)
    for metric in dict.fromkeys(one.metric for one in found):
        errors = [abs(one.error) for one in found if one.metric == metric]
        within = sum(error <= TARGET for error in errors)
        console.print(
            f"{metric}: median {np.median(errors):.1%}, {within} of {len(errors)} within "
            f"{TARGET:.0%}, largest {max(errors):.1%}"
        )


def compare(
    result: dict[str, Any], scheduler: str, policy: dict[str, Any], folder: Path
) -> tuple[list[Comparison], Run]:
    """Simulate the load of a run on the real engine, and compare the metrics of both.

    Args:
        result: what `paced_engine.serve_load` returns, and the load's `name`.
    """
    from vllm_semantic_sched.sim.metrics import ALL, Recorder
    from vllm_semantic_sched.sim.simulation import simulate

    scenario = make_scenario(result, scheduler, policy, folder)
    slos = scenario.slos(scheduler)
    simulated, real = Recorder(slos), Recorder(slos)
    runs = simulate(scenario, scheduler).runs
    for run, (arrival, first, finish) in zip(runs, result["served"], strict=True):
        simulated.add(run)
        shift = run.request.arrival - arrival  # a replayed trace begins at 0
        run.first_token, run.finish = first + shift, finish + shift
        real.add(run)
    ours, theirs = simulated.levels(), real.levels()
    found = [
        Comparison(result["name"], scheduler, level, metric, row[metric], ours[level][metric])
        for level, row in theirs.items()
        for metric in METRICS
    ]
    preempted = int(ours[ALL]["recomputes"] + ours[ALL]["swaps"])
    return found, Run(result["preemptions"], preempted, result["pace"])


def prepare_load(name: str, requests: int) -> list[dict[str, Any]]:
    """Draw a load; arrivals are in units of the time that the engine needs for all requests."""
    from vllm_semantic_sched.sim.sections import Lengths, WorkloadModel
    from vllm_semantic_sched.sim.workload import draw_workload

    shape = LOADS[name]
    model = WorkloadModel(
        arrivals=shape["arrivals"],
        requests=requests,
        rate=requests * shape["load"],
        max_burst=24,
        gap=12 / (requests * shape["load"]),
        prompt=Lengths(**shape.get("prompt", _LENGTHS["prompt"])),
        output=Lengths(**shape.get("output", _LENGTHS["output"])),
    )
    workload = draw_workload(model, 5, np.random.default_rng([7, len(name)]))
    return [
        {
            "arrival": float(workload.arrivals[index]),
            "prompt_tokens": int(workload.prompts[index]),
            "output_tokens": int(workload.outputs[index]),
            "level": int(workload.levels[index]),
        }
        for index in range(len(workload))
    ]


def make_scenario(
    result: dict[str, Any], scheduler: str, policy: dict[str, Any], folder: Path
) -> Scenario:
    """Write the profile and the trace of a run into `folder`; returns their scenario."""
    from vllm_semantic_sched.sim.scenario import parse_scenarios

    stem = f"{result['name']}-{scheduler}"
    profile_file, trace = folder / f"{stem}.yaml", folder / f"{stem}.jsonl"
    profile_file.write_text(yaml.safe_dump(result["profile"]))
    trace.write_text("".join(json.dumps(request) + "\n" for request in result["requests"]))
    content = {
        "workload": {"arrivals": "jsonl", "path": str(trace), "hints": True, "limits": True},
        "engine": {
            "kind": "vllm",
            "profile": str(profile_file),
            "assumed_profile": PROFILE,  # as the real scheduler does
            "arrival": result["seconds_per_arrival"],
            **result["shape"],
        },
        "schedulers": {scheduler: policy},
    }
    return parse_scenarios(content, stem)[0]


def report(validation: Validation) -> dict[str, Any]:
    """Return the contents of `validation.json`."""
    return {
        "comparisons": [asdict(one) | {"error": one.error} for one in validation.comparisons],
        "runs": [
            {"load": load, "scheduler": scheduler} | asdict(run)
            for (load, scheduler), run in validation.runs.items()
        ],
        "wrong_orders": validation.wrong_orders(),
    }


def print_validation(validation: Validation) -> None:
    """Print a row per load and scheduler, the error of each level, and the errors in total."""
    console = make_console()
    for metric in METRICS:
        chosen = [one for one in validation.comparisons if one.metric == metric]
        levels = list(dict.fromkeys(one.level for one in chosen))
        columns = ("load", "scheduler", *levels, "preemptions real / simulated", "pace")
        table = make_table(f"{metric}: real s, error of the simulator", *columns, words=2)
        for (load, scheduler), run in validation.runs.items():
            row = {
                one.level: f"{one.real:.3g} {one.error:+.0%}"
                for one in chosen
                if (one.load, one.scheduler) == (load, scheduler)
            }
            table.add_row(
                load,
                scheduler,
                *(row.get(level, "-") for level in levels),
                f"{run.preemptions} / {run.simulated_preemptions}",
                f"{run.pace:.2f}",
            )
        console.print(table)
    errors = [abs(one.error) for one in validation.comparisons]
    within = sum(error <= TARGET for error in errors)
    console.print(
        f"{within} of {len(errors)} errors are within {TARGET:.0%}; median "
        f"{np.median(errors):.1%}, largest {max(errors):.1%}"
    )
    wrong = validation.wrong_orders()
    console.print(f"schedulers in the wrong order: {'; '.join(wrong) or 'none'}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--output", required=True, type=Path, help="folder for traces, profiles and results")
    add("--requests", type=int, default=80, metavar="N", help="per load (default: %(default)s)")
    add("--whatif", action="store_true", help="validate `semsched whatif` instead")
    add("--quiet", action="store_true", help="no progress bar")
    add(
        "engine_options",
        nargs="+",
        metavar="-- MODEL [OPTION ...]",
        help="the model and engine options of `vllm serve`",
    )


def run(args: argparse.Namespace) -> int:
    """Validate, print and write `validation.json`; always 0."""
    if args.requests < 1:
        raise ValueError("--requests must be at least 1")
    if args.whatif:
        runs = len(WHATIF_LOADS) * (1 + len(WHATIF_POLICIES))
        with Progress(not args.quiet).bar("validating", runs) as advance:
            errors = validate_whatif(args.engine_options, args.requests, args.output, advance)
        print_whatif(errors)
        document = [asdict(one) | {"error": one.error} for one in errors]
        write_json(args.output / "whatif.json", document)
        return 0
    bar = Progress(not args.quiet).bar("validating", len(LOADS) * len(SCHEDULERS))
    with bar as advance:
        found = validate(args.engine_options, args.requests, args.output, list(LOADS), advance)
    print_validation(found)
    path = args.output / "validation.json"
    write_json(path, report(found))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
