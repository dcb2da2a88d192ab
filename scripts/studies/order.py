"""Waiting times by what the order of requests depends on: real texts in the simulator.

The shipped predictor reads the benchmark's requests (a message of a known level and a real question
with the length of its own answer). Their load then runs in the simulator under policies that differ
in order and admission. Prints the mean normalized waiting time of FCFS relative to each policy's,
and the waiting times by level. Then the error of the wait that the default policy expects for each
waiting request (`semsched level REQUEST`): asked once a second for all that wait another second at
least, relative to the wait that came, over these loads and a burst.
Needs the data folder (SEMSCHED_DATA).

example:
  python scripts/studies/order.py --output order --overload 2 6
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import main, write_json

from vllm_semantic_sched.cli.console import print_table
from vllm_semantic_sched.lab.bench.client import Progress
from vllm_semantic_sched.lab.bench.workload import (
    LEVELS,
    MIXES,
    BenchRequest,
    WorkloadConfig,
    make_workload,
)
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction

if TYPE_CHECKING:
    from vllm_semantic_sched.policy.facts.job import Job
    from vllm_semantic_sched.policy.record.lifecycle import Transition
    from vllm_semantic_sched.sim.engine import Engine
    from vllm_semantic_sched.sim.predictor import Predictions
    from vllm_semantic_sched.sim.scenario import Scenario
    from vllm_semantic_sched.sim.workload import Workload

Policy = dict[str, Any]

_STRICT: Policy = {"weighted_levels": {"factor": None}}
_NO_PEAK: Policy = {"kv_peak": {"enabled": False}}
VARIANTS: dict[str, Policy] = {
    "urgency alone": _STRICT,
    **{f"factor {factor}": {"weighted_levels": {"factor": factor}} for factor in (2, 4, 8, 16)},
    "factor 4, KV peak": {"kv_peak": {"enabled": True}},
    "throughput": {"policy": "throughput"} | _NO_PEAK,
    "throughput, KV peak": {"policy": "throughput", "kv_peak": {"enabled": True}},
}
"""Changes to the policy `ems`, or to another one, by name."""

KNOWN: dict[str, Policy] = {"known: urgency alone": _STRICT, "known: factor 4": {}}
"""Policies for requests that state level and length."""

_ENGINE = {"profile": "cpu-2core-tiny", "seats": 16, "kv_blocks": 96, "block_size": 32}
_READER = {"latency": 0.01, "latency_per_request": 0.008}
_CHARACTERS_PER_TOKEN = 4
_LOOK = 1.0  # seconds between two looks at the queue, and the least wait that counts
_ERRORS = {"median": 0.2, "p90": 0.5}  # of an expected wait: the goals


@dataclass(frozen=True)
class Row:
    """A policy on one load.

    Attributes:
        gain: mean normalized waiting time of FCFS / that of the policy, over all requests.
        throughput: output tokens per second, relative to FCFS.
        shortages: preemptions because the KV blocks ran out.
        levels: mean normalized waiting time by level, ms per token.
    """

    gain: float
    throughput: float
    shortages: float
    levels: tuple[float, ...]


class _Shortages:
    """Counts preemptions under KV pressure (`policy.record.lifecycle.Listener`)."""

    def __init__(self) -> None:
        self.count = 0
        self._engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """Begin at an engine's first step."""
        if self._engine is None:
            self._engine = engine
            engine.core.lifecycle.listeners.append(self)

    def moved(self, transition: Transition) -> None:
        self.count += transition.reason == "kv_shortage"

    def first_token(self, job: object) -> None:
        pass

    def held(self, job: object, seconds: float) -> None:
        pass


def simulated(
    policy: Policy, workload: Workload, predictions: Predictions, known: bool = False
) -> tuple[dict[str, dict[str, float]], int]:
    """Metrics by level (`sim.metrics.METRICS`), and preemptions under KV pressure. If `known`,
    requests state their level; `predictions` then hold their exact lengths."""
    from vllm_semantic_sched.sim.metrics import Recorder
    from vllm_semantic_sched.sim.simulation import simulate

    # Without holds, which delay the others whatever their order.
    scenario = _scenario({"protect": {"level": None}} | policy, known)
    recorder = Recorder(scenario.slos("policy"))
    shortages = _Shortages()
    simulate(
        scenario,
        "policy",
        finished=recorder.add,
        before_step=shortages.watch,
        given=(workload, predictions),
    )
    return recorder.levels(), shortages.count


def _scenario(policy: Policy, hints: bool) -> Scenario:
    from vllm_semantic_sched.sim.scenario import parse_scenarios

    content = {
        "workload": {"requests": 1, "hints": hints},
        "predictor": _READER,
        "engine": _ENGINE,
        "schedulers": {"policy": {"policy": "ems"} | policy},
    }
    return parse_scenarios(content)[0]


@dataclass(frozen=True)
class WaitErrors:
    """Relative errors of expected waits: of how many, the median and 90th percentile, and the
    median of expected by true ones."""

    samples: int
    median: float
    p90: float
    ratio: float


class _ExpectedWaits:
    """Asks once a second when each request that waits for its first seat is expected to start."""

    def __init__(self) -> None:
        self._next = 0.0
        self._expected: list[tuple[Job, float, float]] = []  # job, asked at, seconds

    def watch(self, engine: Engine) -> None:
        """Ask if it is time."""
        from vllm_semantic_sched.policy.position import position_of
        from vllm_semantic_sched.sim.snapshot import EngineSnapshot

        now = engine.now()
        if now < self._next:
            return
        self._next = now + _LOOK
        snapshot = EngineSnapshot(engine)
        for job in engine.core.waiting:
            position = position_of(engine.core, snapshot, job) if job.started is None else None
            if position is not None and position.seconds is not None:
                self._expected.append((job, now, position.seconds))

    def errors(self) -> WaitErrors:
        """Compare with the waits that came."""
        waits = [
            (seconds, job.started - now)
            for job, now, seconds in self._expected
            if job.started is not None and job.started - now >= _LOOK
        ]
        expected, true = np.array(waits).T
        relative = np.abs(expected / true - 1.0)
        median, p90 = np.percentile(relative, [50, 90])
        ratio = np.median(expected / true)
        return WaitErrors(len(waits), float(median), float(p90), float(ratio))


def expected_waits(workload: Workload, predictions: Predictions, hints: bool = False) -> WaitErrors:
    """Errors of the expected waits under the default policy; with `hints` clients state levels."""
    from vllm_semantic_sched.sim.simulation import simulate

    # The simulator keeps accounts of the load only under a policy that may refuse requests.
    bounded = {"admission": {"queue": {"requests": 10 * len(workload)}}}
    waits = _ExpectedWaits()
    simulate(
        _scenario(bounded, hints),
        "policy",
        finished=lambda run: None,
        before_step=waits.watch,
        given=(workload, predictions),
    )
    return waits.errors()


def load_of(requests: Sequence[BenchRequest], overload: float) -> Workload:
    """The requests, arriving `overload` times as fast as the engine under FCFS serves them."""
    from vllm_semantic_sched.sim.predictor import Predictions
    from vllm_semantic_sched.sim.workload import Workload

    prompts = [max(1, len(request.text) // _CHARACTERS_PER_TOKEN) for request in requests]
    workload = Workload(
        arrivals=np.zeros(len(requests)),
        levels=np.array([request.level for request in requests], dtype=np.int8),
        prompts=np.array(prompts),
        outputs=np.array([request.output_tokens for request in requests]),
    )
    nothing = Predictions([], LengthBuckets((), (1.0,)))
    together, _ = simulated({"policy": "fcfs"}, workload, nothing)
    seconds = workload.outputs.sum() / together["all"]["tokens_per_second"]
    arrivals = np.array([request.arrival for request in requests])
    return replace(workload, arrivals=arrivals * seconds / overload / arrivals[-1])


def with_burst(workload: Workload) -> Workload:
    """The same requests: after a quarter of them all others come at once."""
    arrivals = workload.arrivals.copy()
    quarter = len(arrivals) // 4
    arrivals[quarter:] = arrivals[quarter]
    return replace(workload, arrivals=arrivals)


def exact(workload: Workload) -> Predictions:
    """The true levels and lengths as predictions."""
    from vllm_semantic_sched.sim.predictor import Predictions

    lengths = sorted(set(workload.outputs.tolist()))
    rows = [
        Prediction(
            tuple(float(possible == level) for possible in range(LEVELS)),
            tuple(float(length == tokens) for length in lengths),
        )
        for level, tokens in zip(workload.levels, workload.outputs, strict=True)
    ]
    return Predictions(rows, LengthBuckets(tuple(lengths[1:]), tuple(map(float, lengths))))


def compare(workload: Workload, read: Predictions) -> dict[str, Row]:
    """Run every policy on a load."""
    base, _ = simulated({"policy": "fcfs"}, workload, read)
    runs = {name: simulated(policy, workload, read) for name, policy in VARIANTS.items()}
    known = exact(workload)
    runs |= {name: simulated(policy, workload, known, True) for name, policy in KNOWN.items()}

    def ratio(metric: str, levels: dict[str, dict[str, float]]) -> float:
        return levels["all"][metric] / base["all"][metric]

    return {
        name: Row(
            1 / ratio("normalized_waiting", levels),
            ratio("tokens_per_second", levels),
            shortages,
            tuple(1e3 * levels[str(level)]["normalized_waiting"] for level in range(LEVELS)),
        )
        for name, (levels, shortages) in runs.items()
    }


def mean_of(rows: Sequence[Row]) -> Row:
    """Mean of each figure."""
    fields = zip(*((row.gain, row.throughput, row.shortages) for row in rows), strict=True)
    levels = np.mean([row.levels for row in rows], axis=0)
    return Row(*(float(np.mean(field)) for field in fields), tuple(levels.tolist()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--output", required=True, type=Path, help="folder for order.json")
    add("--requests", type=int, default=400, metavar="N", help="per load (default: %(default)s)")
    add("--seeds", type=int, default=4, metavar="N", help="loads (default: %(default)s)")
    add("--overload", type=float, nargs="+", default=[2.0, 6.0], metavar="X",
        help="arrivals relative to what the engine can serve (default: 2 6)")  # fmt: skip
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Read the texts, simulate, print and write `order.json`; always 0."""
    from vllm_semantic_sched.predict.model import TextPredictor
    from vllm_semantic_sched.sim.predictor import Predictions

    predictor = TextPredictor.load()
    written = []
    assert predictor.length_buckets is not None
    bar = Progress(not args.quiet).bar("simulating", len(MIXES) * args.seeds * len(args.overload))
    rows_by_load: dict[tuple[str, float], list[dict[str, Row]]] = {}
    waits: dict[tuple[str, str], list[WaitErrors]] = {}
    with bar as advance:
        for mix in MIXES:
            for seed in range(args.seeds):
                config = WorkloadConfig(requests=args.requests, mix=mix, seed=seed)
                requests = make_workload(config).requests
                readings = predictor.predict([request.text for request in requests])
                read = Predictions(readings, predictor.length_buckets)
                for overload in args.overload:
                    load = load_of(requests, overload)
                    rows_of = rows_by_load.setdefault((mix, overload), [])
                    rows_of.append(compare(load, read))
                    errors_of = waits.setdefault((mix, f"overload {overload:g}"), [])
                    errors_of.append(expected_waits(load, read))
                    advance()
                burst = with_burst(load_of(requests, 1.0))
                for name, hints in (("burst", False), ("burst, levels stated", True)):
                    errors_of = waits.setdefault((mix, name), [])
                    errors_of.append(expected_waits(burst, read, hints))
    for (mix, overload), runs in rows_by_load.items():
        columns = ("policy", "gain", "throughput", "KV shortages", *map(str, range(LEVELS)))
        means = {name: mean_of([run[name] for run in runs]) for name in runs[0]}
        rows = (
            (name, f"{row.gain:.2f}", f"{row.throughput:.2f}", f"{row.shortages:.0f}",
             *(f"{value:.0f}" for value in row.levels))
            for name, row in means.items()
        )  # fmt: skip
        print_table(f"{mix} mix, overload {overload:g}; ms per token by level", columns, rows)
        head = {"mix": mix, "overload": overload}
        written += [head | {"policy": name} | asdict(row) for name, row in means.items()]
    print_table(
        "relative error of expected waits; goals: "
        + ", ".join(f"{name} {goal:.0%}" for name, goal in _ERRORS.items()),
        ("mix", "load", "asked", *_ERRORS, "expected / true"),
        [
            (
                *load_name,
                sum(errors.samples for errors in runs),
                *(f"{np.mean([getattr(errors, name) for errors in runs]):.0%}" for name in _ERRORS),
                f"{np.mean([errors.ratio for errors in runs]):.2f}",
            )
            for load_name, runs in waits.items()
        ],
        words=2,
    )
    written += [
        {"mix": mix, "load": load_name, "expected_waits": [asdict(errors) for errors in runs]}
        for (mix, load_name), runs in waits.items()
    ]
    write_json(args.output / "order.json", written)
    print(f"written: {args.output / 'order.json'}")
    return 0


if __name__ == "__main__":
    main(__doc__, add_arguments, run)
