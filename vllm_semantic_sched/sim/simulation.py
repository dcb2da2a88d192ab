"""One run: a workload through a predictor and an engine under one policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.prediction import Prediction
from vllm_semantic_sched.policy.profile import EngineProfile
from vllm_semantic_sched.policy.reservation import EngineCapacity
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.cost import SlowestOfBatch, StepCost, SumOfTokens
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.events import EventQueue, Order
from vllm_semantic_sched.sim.predictor import PredictorQueue, draw_predictions
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.workload import draw_requests

_WORKLOAD_STREAM, _PREDICTOR_STREAM = 1, 2


@dataclass(frozen=True, slots=True)
class Result:
    """What became of all requests, in order of arrival, and how many steps it took."""

    runs: list[Run]
    steps: int


def simulate(
    scenario: Scenario,
    scheduler: str,
    repeat: int = 0,
    keep_spans: bool = False,
    before_step: Callable[[Engine], None] | None = None,
) -> Result:
    """Run one scheduler on one draw of the workload. All schedulers get the same draw.

    Args:
        repeat: which of the scenario's repeats.
        before_step: called when the engine has decided on a step, for checks.

    Raises:
        TraceError: a trace cannot be read.
        RequestTooLarge: a request does not fit into the engine.
    """
    settings, policy = scenario.settings, scenario.policies[scheduler]
    seed = settings.seed + repeat
    requests = draw_requests(
        settings.workload, policy.levels, np.random.default_rng([seed, _WORKLOAD_STREAM])
    )
    predictions, buckets = draw_predictions(
        settings.predictor,
        requests,
        policy.levels,
        np.random.default_rng([seed, _PREDICTOR_STREAM]),
    )
    events = EventQueue()
    core = SchedulingCore(policy, scenario.profile, clock=lambda: events.now)
    if _reads_predictions(policy):
        core.buckets = buckets
    engine = make_engine(core, settings.engine, scenario.profile, keep_spans)
    simulation = _Simulation(scenario, core, engine, events, requests, predictions, before_step)
    return Result(simulation.run(), simulation.steps)


def make_engine(
    core: SchedulingCore, model: EngineModel, profile: EngineProfile, keep_spans: bool = False
) -> Engine:
    """The engine that a scenario describes."""
    cost: StepCost
    if model.kind == "paper":
        cost = SlowestOfBatch(profile)
    else:
        batch = model.batch or profile.batch
        cost = SumOfTokens(profile.model_copy(update={"batch": batch}))
    core.set_capacity(EngineCapacity(model.seats, model.kv_blocks, model.block_size))
    return Engine(
        core,
        cost,
        BlockPool(model.kv_blocks, model.block_size),
        seats=model.seats,
        token_budget=None if model.kind == "paper" else model.token_budget,
        host=BlockPool(model.host_blocks, model.block_size) if model.swap else None,
        keep_spans=keep_spans,
    )


def _reads_predictions(policy: Policy) -> bool:
    return policy.predictor.enabled and (policy.uses_urgency or policy.uses_length)


class _Simulation:
    def __init__(
        self,
        scenario: Scenario,
        core: SchedulingCore,
        engine: Engine,
        events: EventQueue,
        requests: list[SimRequest],
        predictions: list[Prediction],
        before_step: Callable[[Engine], None] | None,
    ) -> None:
        self.steps = 0
        self._settings = scenario.settings
        self._core = core
        self._engine = engine
        self._requests = requests
        self._predictions = predictions
        self._before_step = before_step
        self._events = events
        self._predictor = PredictorQueue(
            self._events, core.policy.predictor, scenario.settings.predictor, self._predicted
        )
        self._reads = _reads_predictions(core.policy)
        self._longest = max((request.output_tokens for request in requests), default=1)
        self._runs: list[Run] = []
        self._busy = False

    def run(self) -> list[Run]:
        if self._requests:
            self._expect(0)
        self._events.run()
        return self._runs

    def _expect(self, index: int) -> None:
        arrival = self._requests[index].arrival
        self._events.at(arrival, Order.ARRIVAL, lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        request = self._requests[index]
        extra_args = {"urgency": request.level} if self._settings.workload.hints else None
        hint = self._core.read_hints(extra_args, 0)
        # As in the engine: a text whose level is known is read for its length alone.
        awaits = self._reads and (hint.level is None or self._core.policy.uses_length)
        job = self._core.new_job(
            str(index),
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            # One limit for all clients: it must not tell the policy the length of an answer.
            max_output_tokens=self._longest,
            hint=hint,
            awaits_prediction=awaits,
            tenant=request.tenant,
        )
        run = Run(request, job, self._predictions[index] if awaits else None)
        self._runs.append(run)
        if awaits:
            self._predictor.submit(run)
        if not (awaits and self._settings.predictor.hold):
            self._submit(run)
        if index + 1 < len(self._requests):
            self._expect(index + 1)
        else:
            self._predictor.drain()

    def _predicted(self, batch: list[Run]) -> None:
        for run in batch:
            if run.finish is None:
                self._engine.predicted(run)
                if self._settings.predictor.hold:
                    self._submit(run)

    def _submit(self, run: Run) -> None:
        self._engine.submit(run)
        if not self._busy:
            self._busy = True
            self._events.at(self._events.now, Order.ENGINE, self._begin_step)

    def _begin_step(self) -> None:
        seconds = self._engine.begin_step(self._events.now)
        self._busy = seconds is not None
        if seconds is not None:
            self.steps += 1
            if self._before_step is not None:
                self._before_step(self._engine)
            self._events.at(self._events.now + seconds, Order.ENGINE, self._end_step)

    def _end_step(self) -> None:
        self._engine.end_step(self._events.now)
        self._begin_step()
