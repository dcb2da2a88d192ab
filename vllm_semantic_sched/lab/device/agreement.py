"""The same load on the emulated device and in the simulator, and how far their figures differ."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

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
    `busy`: seconds in which the device computed; `tokens`: of all answers; `found`: whose KV the
    prefix cache had when their requests got a seat."""

    levels: dict[str, Latencies]
    steps: int
    busy: float
    tokens: int
    found: int = 0

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

    @property
    def found(self) -> float:
        """Error in the tokens found in the prefix cache; 0 if neither found any."""
        if not self.device.found:
            return float("inf") if self.simulated.found else 0.0
        return self.simulated.found / self.device.found - 1.0

    def _errors(self, metric: Callable[[Latencies], float]) -> dict[str, float]:
        errors = {}
        for name, level in self.device.levels.items():
            simulated = self.simulated.levels.get(name)
            errors[name] = metric(simulated) / metric(level) - 1.0 if simulated else float("nan")
        return errors


def agreement(load: Sequence[LoadRequest], config: EngineConfig) -> Agreement:
    """Run a load, whose clients state levels, on the device, then in the simulator. The scheduler
    is ours."""
    with VirtualEngine(config) as engine:
        found = _note_found(engine)
        engine.send(load)
        engine.run()
        device = replace(device_figures_of(engine), found=sum(found))
        scenario = scenario_of(engine)
    return Agreement(device, _simulated(simulate_load(load, scenario, config.max_model_len)))


def _note_found(engine: VirtualEngine) -> list[int]:
    """Tokens found in the prefix cache, one number for each seat from now on."""
    manager = engine.scheduler.kv_cache_manager
    record, found = manager.record_prefix_cache_stats, list[int]()

    def note(request: Any, tokens: int) -> None:
        found.append(tokens)
        record(request, tokens)

    manager.record_prefix_cache_stats = note
    return found


def device_figures_of(engine: VirtualEngine) -> Figures:
    """The figures of an engine that has served its load."""
    answered = [record for record in engine.records.values() if record.reason == _ANSWERED]
    return Figures(
        levels=_levels((_level(record), record.ttft, record.latency) for record in answered),
        steps=len(engine.steps),
        busy=sum(step.busy for step in engine.steps),
        tokens=sum(len(record.tokens) for record in answered),
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
    requests = []
    for index, sent in enumerate(load):
        blocks: tuple[int, ...] = ()
        if engine.prefix_caching:
            blocks = tuple(_block_hashes(sent, engine.block_size))
        requests.append(
            SimRequest(
                index=index,
                arrival=sent.arrival,
                level=_level(sent),
                prompt_tokens=len(sent.prompt),
                output_tokens=sent.answer,
                hint=sent.level,
                limit=limit,
                blocks=blocks,
            )
        )
    workload = Workload(
        arrivals=np.array([request.arrival for request in requests]),
        levels=np.array([request.level for request in requests]),
        prompts=np.array([request.prompt_tokens for request in requests]),
        outputs=np.array([request.output_tokens for request in requests]),
        recorded=requests,
    )
    unread = Predictions([None] * len(requests), LengthBuckets((), (1.0,)))
    return simulate(scenario, _NAME, given=(workload, unread))


def _level(request: LoadRequest | Record) -> int:
    if request.level is None:
        raise ValueError(f"request {request.name} states no level")
    return request.level


def _block_hashes(request: LoadRequest, size: int) -> Iterator[int]:
    """A number for each whole block of a request and its answer, the same where all tokens up to
    its end are. No two requests have the same answer."""
    state = blake2b(digest_size=8)
    for end in range(size, len(request.prompt) + request.answer + 1, size):
        state.update(repr(request.prompt[end - size : end]).encode())
        if end > len(request.prompt):
            state.update(request.name.encode())
        yield int.from_bytes(state.digest(), "little")


def _simulated(simulation: Simulation) -> Figures:
    times = []
    for run in simulation.runs:
        if not run.refused:
            assert run.first_token is not None and run.finish is not None
            begin = run.request.arrival
            times.append((run.request.level, run.first_token - begin, run.finish - begin))
    tokens = sum(run.request.output_tokens for run in simulation.runs if not run.refused)
    found = sum(run.found for run in simulation.runs)
    return Figures(_levels(times), simulation.steps, simulation.busy, tokens, found)


def _levels(answered: Iterable[tuple[int, float, float]]) -> dict[str, Latencies]:
    """From level, time to first token and latency of each request."""
    rows = sorted(answered)
    groups: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        groups.setdefault(str(row[0]), []).append(row)
    groups = dict(sorted(groups.items()))
    groups[ALL] = rows
    return {name: _latencies(group) for name, group in groups.items()}


def _latencies(rows: Sequence[tuple[int, float, float]]) -> Latencies:
    _, ttft, latency = np.array(rows).T
    return Latencies(
        count=len(rows),
        ttft_p99=float(np.percentile(ttft, 99)),
        e2e_mean=float(latency.mean()),
    )
