"""The same load on the emulated device and in the simulator, and how far their figures differ."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.virtual import (
    EngineConfig,
    Record,
    VirtualEngine,
    policy_keys,
)
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets
from vllm_semantic_sched.sim.predictor import Predictions
from vllm_semantic_sched.sim.request import SimRequest
from vllm_semantic_sched.sim.scenario import Scenario, parse_scenarios
from vllm_semantic_sched.sim.simulation import Simulation, simulate
from vllm_semantic_sched.sim.workload import Workload

ALL = "all"  # levels
_NAME = "policy"  # of the only scheduler of the scenario
_ANSWERED = "stop"


@dataclass(frozen=True)
class Latencies:
    """Of the answered requests of a level, in seconds."""

    count: int
    ttft_p99: float
    e2e_mean: float


@dataclass(frozen=True)
class Figures:
    """One run. `levels`: by level (`"0"`, ...) and over all, without levels that got no answer;
    `busy`: seconds in which the device computed; `tokens`: of all answers."""

    levels: dict[str, Latencies]
    steps: int
    busy: float
    tokens: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per busy second."""
        return self.tokens / self.busy


@dataclass(frozen=True)
class Agreement:
    """A load on the device and in the simulator. Errors are relative to the device."""

    device: Figures
    simulated: Figures

    @property
    def e2e(self) -> dict[str, float]:
        """Errors in mean latency, by level and over all."""
        return self._errors(lambda level: level.e2e_mean)

    @property
    def ttft_p99(self) -> dict[str, float]:
        """Errors in p99 time to first token, by level and over all."""
        return self._errors(lambda level: level.ttft_p99)

    @property
    def steps(self) -> float:
        """Error in the number of steps."""
        return self.simulated.steps / self.device.steps - 1.0

    @property
    def tokens(self) -> float:
        """Error in output tokens per busy second."""
        return self.simulated.tokens_per_second / self.device.tokens_per_second - 1.0

    def _errors(self, metric: Callable[[Latencies], float]) -> dict[str, float]:
        found, levels = self.simulated.levels, self.device.levels
        return {
            name: metric(found[name]) / metric(level) - 1.0 if name in found else float("nan")
            for name, level in levels.items()
        }


def agreement(load: Sequence[LoadRequest], config: EngineConfig) -> Agreement:
    """Run a load, whose clients state levels, on the device, then in the simulator. The scheduler
    is ours."""
    with VirtualEngine(config) as engine:
        engine.send(load)
        engine.run()
        device = device_figures_of(engine)
        scenario = scenario_of(engine)
    return Agreement(device, _simulated(simulate_load(load, scenario, config.max_model_len)))


def device_figures_of(engine: VirtualEngine) -> Figures:
    """The figures of an engine that has served its load."""
    answered = [one for one in engine.records.values() if one.reason == _ANSWERED]
    return Figures(
        _levels((_level(one), one.ttft, one.latency) for one in answered),
        len(engine.steps),
        sum(step.busy for step in engine.steps),
        sum(len(one.tokens) for one in answered),
    )


def scenario_of(engine: VirtualEngine) -> Scenario:
    """The device and its policy as the simulator sees them."""
    config = engine.config
    content = {
        "workload": {"arrivals": "poisson", "requests": 1},  # it is given its requests
        "engine": {
            "profile": config.profile,
            "assumed_profile": config.given_profile,
            "seats": config.seats,
            "asynchronous": config.asynchronous,
            "token_budget": config.budget,
            "block_size": config.block_size,
            # One is vLLM's null block.
            "kv_blocks": engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            "prefix_caching": config.prefix_cache,
            "swap": config.swap_gib is not None,
        },
        "schedulers": {_NAME: policy_keys(config)},
    }
    return parse_scenarios(content, "the device")[0]


def simulate_load(load: Sequence[LoadRequest], scenario: Scenario, limit: int) -> Simulation:
    """Run a load in the simulator. `limit`: `max_tokens` of all requests."""
    engine = scenario.settings.engine
    requests = [
        SimRequest(
            *(index, one.arrival, _level(one), len(one.prompt), one.answer),
            hint=one.level,
            limit=limit,
            blocks=tuple(_block_hashes(one, engine.block_size)) if engine.prefix_caching else (),
        )
        for index, one in enumerate(load)
    ]
    rows = [(one.arrival, one.level, one.prompt_tokens, one.output_tokens) for one in requests]
    arrivals, levels, prompts, outputs = map(np.array, zip(*rows, strict=True))
    workload = Workload(arrivals, levels, prompts, outputs, recorded=requests)
    unread = Predictions([None] * len(requests), LengthBuckets((), (1.0,)))
    return simulate(scenario, _NAME, given=(workload, unread))


def _level(one: LoadRequest | Record) -> int:
    if one.level is None:
        raise ValueError(f"request {one.name} states no level")
    return one.level


def _block_hashes(one: LoadRequest, size: int) -> Iterator[int]:
    """A number for each whole block of a request and its answer, the same where all tokens up to
    its end are. No two requests have the same answer."""
    state = blake2b(digest_size=8)
    for end in range(size, len(one.prompt) + one.answer + 1, size):
        state.update(repr(one.prompt[end - size : end]).encode())
        if end > len(one.prompt):
            state.update(one.name.encode())
        yield int.from_bytes(state.digest(), "little")


def _simulated(simulation: Simulation) -> Figures:
    times = []
    for run in simulation.runs:
        if not run.refused:
            assert run.first_token is not None and run.finish is not None
            begin = run.request.arrival
            times.append((run.request.level, run.first_token - begin, run.finish - begin))
    tokens = sum(run.request.output_tokens for run in simulation.runs if not run.refused)
    return Figures(_levels(times), simulation.steps, simulation.busy, tokens)


def _levels(answered: Iterable[tuple[int, float, float]]) -> dict[str, Latencies]:
    """From level, time to first token and latency of each request."""
    rows = sorted(answered)
    groups = {str(at): [row for row in rows if row[0] == at] for at in {row[0] for row in rows}}
    return {name: _latencies(group) for name, group in (*sorted(groups.items()), (ALL, rows))}


def _latencies(rows: Sequence[tuple[int, float, float]]) -> Latencies:
    _, first, latency = np.array(rows).T
    return Latencies(len(rows), float(np.percentile(first, 99)), float(latency.mean()))
