"""Replays an event log through the simulator under other policies. The recorded policy is
simulated, too, and compared with what was measured: that is the error to expect of the others."""

import base64
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_semantic_sched.lab.profiling.fit import fit_profile
from vllm_semantic_sched.lab.profiling.live_engine import Step
from vllm_semantic_sched.operate.event_log import END_STATES, events_in
from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.config.section import parse_section
from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.overload.slo import targets
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile
from vllm_semantic_sched.predict import stored_buckets
from vllm_semantic_sched.sim.metrics import ALL, DepthHistory, Recorder
from vllm_semantic_sched.sim.predictor import Predictions
from vllm_semantic_sched.sim.request import SimRequest
from vllm_semantic_sched.sim.runner import FOLLOWED, Cell, Task, cells_of, run_task
from vllm_semantic_sched.sim.scenario import Scenario, parse_scenarios
from vllm_semantic_sched.sim.sections import Settings
from vllm_semantic_sched.sim.simulation import Given, simulate
from vllm_semantic_sched.sim.workload import Workload, WorkloadError

MEASURED = "measured"
"""Name of the cell with what was measured under the recorded policy."""
SAME = "simulated"
"""Name of the cell with the simulation under the recorded policy."""
METRICS = {"ttft_p99": "p99 time to first token", "e2e_mean": "mean latency"}
"""The metrics that are shown by level, and what they are called."""
LARGEST_ERROR = 0.15
"""Median error of the recorded policy's metrics beyond which no figure is to be trusted."""

_ENOUGH = 30  # requests of a level
_ENOUGH_STEPS = 16  # of steps with and without prefills, for a fit
_MOST_STEPS = 20_000


class UnusableLog(WorkloadError):
    """An event log has too little for a replay. The message says what is missing."""


class Recorded(NamedTuple):
    """A request of the log, with Unix times: `request.arrival` at the engine, `first_token` and
    `end`. `prediction` came `read_after` seconds after the arrival; None: not read, or in vain."""

    request: SimRequest
    first_token: float
    end: float
    prediction: Prediction | None
    read_after: float | None


@dataclass
class EngineLog:
    """What the log has of one engine: the latest line about it (`facts`), times of steps, requests
    by arrival, and how many cannot be replayed, by reason."""

    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    requests: list[Recorded] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def policy(self) -> Policy:
        """The policy that ordered the requests: vLLM's own, if the scheduler observed."""
        policy = parse_policy(self.facts["policy"], "the event log")
        return policy.in_stock_order() if policy.observe else policy


def read_log(path: Path) -> dict[int, EngineLog]:
    """The engines of a log and its renamed parts, by number. OSError if it cannot be read;
    UnusableLog if it has no line about an engine, or no request that can be replayed."""
    engines: defaultdict[int, EngineLog] = defaultdict(EngineLog)
    arrivals: dict[tuple[int, str], dict[str, Any]] = {}
    for event in events_in(path):
        if event.get("log") == "engine":
            engine = engines[int(event["engine"])]
            engine.facts = event
            engine.steps += _steps(event["steps"])
            del engine.steps[:-_MOST_STEPS]
        elif "request" in event:  # else about the log itself
            key = int(event["engine"]), str(event["request"])
            if event["from"] is None:
                arrivals[key] = event
            elif event["state"] in END_STATES:
                _end(engines[key[0]], arrivals.pop(key, None), event)
    for number, _ in arrivals:
        engines[number].skipped["unfinished"] += 1
    usable = {
        number: engine for number, engine in engines.items() if engine.facts and engine.requests
    }
    if not usable:
        raise UnusableLog(f"{path}: no finished requests with a line about their engine")
    for engine in usable.values():
        engine.requests.sort(key=lambda recorded: recorded.request.arrival)
    return usable


def _steps(rows: Sequence[Sequence[int]]) -> Iterator[Step]:
    for decodes, context, prefills, tokens, squares, microseconds in rows:
        batch = Batch(prefills, tokens, squares, decodes, context)
        yield Step(batch, max(1, microseconds) / 1e6)


def _end(engine: EngineLog, arrival: dict[str, Any] | None, end: dict[str, Any]) -> None:
    if arrival is None:
        engine.skipped["older than the log"] += 1
    elif end["state"] == "refused":
        engine.skipped["refused"] += 1
    elif not end["output_tokens"] or end.get("first_token") is None:
        engine.skipped["without a token"] += 1
    else:
        engine.requests.append(_recorded(arrival, end))


def _recorded(arrival: dict[str, Any], end: dict[str, Any]) -> Recorded:
    stated = arrival["level_from"] in ("hint", "priority", "service_tier")
    inherited = end["level_from"] == "session"  # the log does not say of which
    hint = int(arrival["level"]) if stated or inherited else None
    if end["level_from"] == "operator":  # replayed as if it had come at that level
        hint = int(end["level"])
    blocks = np.frombuffer(base64.b64decode(end.get("blocks", "")), np.uint8).reshape(-1, 3)
    hashes = tuple((blocks @ np.array([1 << 16, 1 << 8, 1])).tolist())
    prediction = None
    if "urgency" in end:
        length = tuple(end["length"]) if end.get("length") is not None else None
        prediction = Prediction(tuple(end["urgency"]), length)
    request = SimRequest(
        index=0,
        arrival=float(end.get("came", arrival["time"])),
        level=int(end["level"]),
        prompt_tokens=int(end["prompt_tokens"]),
        output_tokens=int(end["output_tokens"]),
        tenant=str(end.get("tenant", "")),
        hint=hint,
        limit=end.get("max_tokens"),
        shortest=int(end.get("min_tokens", 0)),
        blocks=hashes,
    )
    return Recorded(
        request,
        first_token=float(end["first_token"]),
        end=float(end["time"]),
        prediction=prediction,
        read_after=end.get("read_after"),
    )


@dataclass(frozen=True)
class WhatIf:
    """A cell for `MEASURED`, `SAME` and each other policy; the settings under which `SAME` was
    simulated; how far to trust the figures; a sentence about each other policy; and what the
    figures do not say."""

    cells: list[Cell]
    settings: Settings
    checks: list[str]
    verdicts: list[str]
    notes: list[str]


def replay(log: EngineLog, policies: dict[str, Policy]) -> WhatIf:
    """Simulate the requests of a log under its own policy and under others, by name."""
    profile, fitted = _profile(log)
    recorded = _scenario(log, SAME, log.policy, profile)
    depth = DepthHistory(log.policy.levels)
    given = _given(log, log.policy)
    runs = simulate(recorded, SAME, keep_seats=True, depth=depth, given=given).runs
    seats = itertools.chain(*(run.spans for run in runs[:FOLLOWED]))
    simulated = Recorder(recorded.slos(SAME))
    measured = Recorder(recorded.slos(SAME))
    for run, real in zip(runs, log.requests, strict=True):
        simulated.add(run)
        shift = run.request.arrival - real.request.arrival
        run.refused = ""
        if run.started is None:
            run.started = run.request.arrival
        run.first_token = real.first_token + shift
        run.finish = real.end + shift
        measured.add(run)
    cells = [
        Cell(measured.levels(), depth=[], spans=(), point={}, scheduler=MEASURED),
        Cell(simulated.levels(), depth.points(), tuple(seats), point={}, scheduler=SAME),
    ]
    verdicts = []
    for name, policy in policies.items():
        task = Task(_scenario(log, name, policy, profile), name, 0, _given(log, policy))
        cells += cells_of([task], [run_task(task)])
        verdicts.append(_verdict(cells[0], cells[-1], task.scenario.slos(name)))
    return WhatIf(
        cells,
        recorded.settings,
        checks=list(_check(errors(cells))),
        verdicts=verdicts,
        notes=list(_doubts(log, policies, fitted, cells)),
    )


def errors(cells: Sequence[Cell]) -> dict[tuple[str, str], float]:
    """Relative errors of the second cell by level of the first one and metric that is shown."""
    measured = cells[0].levels
    simulated = cells[1].levels
    return {
        (level, metric): simulated[level][metric] / row[metric] - 1.0
        for level, row in measured.items()
        for metric in METRICS
        if row.get(metric) and level in simulated
    }


def _profile(log: EngineLog) -> tuple[EngineProfile, bool]:
    """The engine's step times, and whether they were fitted to measured steps."""
    base = parse_section(EngineProfile, log.facts["profile"], "the event log")
    prefilling = sum(step.batch.prefills > 0 for step in log.steps)
    if min(prefilling, len(log.steps) - prefilling) < _ENOUGH_STEPS:
        return base, False
    return fit_profile(base, log.steps)[0], True


def _scenario(log: EngineLog, name: str, policy: Policy, profile: EngineProfile) -> Scenario:
    names = ("seats", "asynchronous", "token_budget", "block_size", "kv_blocks", "prefix_caching")
    delays = [real.read_after for real in log.requests if real.read_after is not None] or [0.0]
    content = {
        "description": "",
        "workload": {"arrivals": "poisson", "requests": len(log.requests)},
        "predictor": {"latency": max(0.0, statistics.median(delays))},
        # Logs of earlier versions do not say whether steps were scheduled asynchronously.
        "engine": {name: log.facts[name] for name in names if name in log.facts},
        "schedulers": {name: {"levels": policy.levels, "default_level": 0}},
    }
    (scenario,) = parse_scenarios(content, "the event log")
    policies = {name: policy}
    return replace(scenario, profile=profile, assumed_profile=profile, policies=policies)


def _given(log: EngineLog, policy: Policy) -> Given:
    """The requests and predictions of a log, for a policy with another number of levels, too."""
    start = log.requests[0].request.arrival
    buckets = stored_buckets(policy.predictor.model) or LengthBuckets((), (1.0,))
    requests = []
    predictions = []
    for index, real in enumerate(log.requests):
        requests.append(
            replace(
                real.request,
                index=index,
                arrival=real.request.arrival - start,
                level=min(real.request.level, policy.levels - 1),
            )
        )
        prediction = real.prediction
        if (
            prediction is not None
            and prediction.length
            and len(prediction.length) != len(buckets.means)
        ):
            prediction = Prediction(prediction.urgency)  # the lengths are of another model
        predictions.append(prediction)
    workload = Workload(
        arrivals=np.array([request.arrival for request in requests]),
        levels=np.array([request.level for request in requests]),
        prompts=np.array([request.prompt_tokens for request in requests]),
        outputs=np.array([request.output_tokens for request in requests]),
        recorded=requests,
    )
    return workload, Predictions(predictions, buckets)


def _doubts(
    log: EngineLog, policies: dict[str, Policy], fitted: bool, cells: Sequence[Cell]
) -> Iterator[str]:
    """What the figures do not say, most important first."""
    yield (
        "Compared with vLLM on an emulated GPU, predictions for other policies were off by at most "
        "3 % for mean latency, and by at most a third for p99 TTFT "
        "(docs/measurements/simulator-validation.md)."
    )
    if not fitted:
        yield "The log has too few timed steps: step times are those of the server's profile."
    rows = cells[0].levels.items()
    few = [level for level, row in rows if level != ALL and row["count"] < _ENOUGH]
    if few:
        yield f"Fewer than {_ENOUGH} requests: level {', '.join(few)}; p99 is the slowest of them."
    if log.skipped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(log.skipped.items()))
        yield f"Requests left out: {reasons}."
    unread = sum(real.prediction is None and real.request.hint is None for real in log.requests)
    if unread:
        yield f"{unread} requests have neither hint nor prediction: they run at the default level."
    last_level = max(real.request.level for real in log.requests)
    for name, policy in policies.items():
        if policy.levels <= last_level:
            yield f"{name} has {policy.levels} levels: less urgent requests count at its last one."
        if policy.predictor.model is not None:
            yield f"{name} reads with another model; the predictions are those of the log."
    if log.facts.get("prefix_caching") and not any(real.request.blocks for real in log.requests):
        yield "The log has no hashes of KV blocks: the prefix cache is not simulated."
    yield (
        "Arrivals and answers are those of the log: clients that would send more, less or give up "
        "at other times are not simulated, nor is KV swap or what happens before the engine (HTTP)."
    )


def _check(relative_errors: dict[tuple[str, str], float]) -> Iterator[str]:
    """How well the recorded policy is simulated. Empty if no level can be compared."""
    if not relative_errors:
        return
    level, metric = max(relative_errors, key=lambda key: abs(relative_errors[key]))
    largest = abs(relative_errors[level, metric])
    median = statistics.median(map(abs, relative_errors.values()))
    where = f"{_level_name(level)}, {METRICS[metric]}"
    yield (
        "Check: simulated under its own policy, the recorded load differs from the measured "
        f"one by {median:.0%} in the median, at most {largest:.0%} ({where})."
    )
    if median > LARGEST_ERROR:
        yield f"That is more than {LARGEST_ERROR:.0%}: the results below are unreliable."


def _level_name(level: str) -> str:
    return "all levels" if level == ALL else f"level {level}"


def _verdict(measured: Cell, cell: Cell, slos: Sequence[Slo]) -> str:
    """One sentence about a policy: the most and the least urgent level, and SLOs."""
    both = [level for level in cell.levels if level != ALL and level in measured.levels]
    if not both:
        return f"{cell.scheduler}: no level in common with the log."
    first = both[0]
    last = both[-1]
    now = measured.levels[first]["ttft_p99"]
    then = cell.levels[first]["ttft_p99"]
    text = f"{cell.scheduler}: level {first} p99 TTFT would be {then:.3g} s instead of {now:.3g}"
    if last != first:
        ratio = cell.levels[last]["e2e_mean"] / measured.levels[last]["e2e_mean"]
        text += f", level {last} would take {ratio:.2g} times as long"
    with_slo = [level for level in cell.levels if level != ALL and targets(slos[int(level)])]
    kept = {level: cell.levels[level]["slo_met"] * 100 for level in with_slo}
    missed = [level for level in with_slo if kept[level] < slos[int(level)].percentile]
    if missed:
        return f"{text}; the SLO of level {', '.join(missed)} would be missed."
    if with_slo:
        return f"{text}; no SLO would be missed."
    return f"{text}; no level has an SLO."
