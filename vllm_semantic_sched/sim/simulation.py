"""One run: a workload through a predictor and an engine under one policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import reading_level
from vllm_semantic_sched.policy.facts.job import StatedLength
from vllm_semantic_sched.policy.placement import Placed
from vllm_semantic_sched.sim.assembly import make_engine
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.events import EventQueue, Order
from vllm_semantic_sched.sim.metrics import DepthHistory
from vllm_semantic_sched.sim.predictor import (
    Predictions,
    PredictorQueue,
    draw_instant,
    draw_predictions,
)
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.routing import Router
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.workload import Workload, draw_workload

Given = tuple[Workload, Predictions | None]
"""Requests and their predictions (None: drawn as the scenario says)."""

_WORKLOAD_STREAM, _PREDICTOR_STREAM, _INSTANT_STREAM = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Result:
    """Requests in order of arrival, unless `finished` got them, and the engines' steps."""

    runs: list[Run]
    steps: int


def simulate(
    scenario: Scenario,
    scheduler: str,
    repeat: int = 0,
    keep_seats: bool = False,
    before_step: Callable[[Engine], None] | None = None,
    finished: Callable[[Run], None] | None = None,
    depth: DepthHistory | None = None,
    given: Given | None = None,
    watch: Callable[[SchedulingCore], None] | None = None,
) -> Result:
    """Run one scheduler on one draw of the workload. All schedulers get the same draw.

    Args:
        repeat: number of the repeat.
        keep_seats: record each request's times in seats.
        before_step: called when an engine has decided on a step, for checks.
        finished: gets each finished or refused request; then none is kept.
        depth: records the number of waiting requests.
        given: instead of the requests that the scenario describes.
        watch: called with each engine's core before the first request.

    Raises:
        TraceError: a trace cannot be read.
        RequestTooLarge: a request does not fit into the engine.
    """
    settings, policy = scenario.settings, scenario.policies[scheduler]

    def random(stream: int) -> np.random.Generator:
        return np.random.default_rng([settings.seed + repeat, stream])

    if given is None:
        drawn = draw_workload(settings.workload, policy.levels, random(_WORKLOAD_STREAM))
        given = drawn, None
    workload, predictions = given
    if predictions is None:
        read = (settings.predictor, workload, policy.levels)
        predictions = draw_predictions(*read, random(_PREDICTOR_STREAM))
    instant = draw_instant(settings.predictor, workload, policy.levels, random(_INSTANT_STREAM))
    runs: list[Run] = []
    simulation = _Simulation(scenario, policy, workload, predictions, instant, keep_seats)
    simulation.before_step = before_step
    simulation.depth = depth
    simulation.finished = finished or runs.append
    if watch is not None:
        for replica in simulation.replicas:
            watch(replica.core)
    simulation.run()
    runs.sort(key=lambda run: run.request.index)
    return Result(runs, simulation.steps)


class _Simulation:
    """Generates arrivals, routes them to engines and runs the events. For the attributes see
    `simulate`; `steps` counts those of all engines."""

    def __init__(
        self,
        scenario: Scenario,
        policy: Policy,
        workload: Workload,
        predictions: Predictions,
        instant: Predictions | None,
        keep_seats: bool,
    ) -> None:
        self.scenario = scenario
        self.events = EventQueue()
        self.steps = 0
        self.finished: Callable[[Run], None] = lambda run: None
        self.before_step: Callable[[Engine], None] | None = None
        self.depth: DepthHistory | None = None
        self._workload = workload
        self._predictions = predictions
        self._instant = instant
        self._longest = int(workload.outputs.max(initial=1))
        self._depths: list[int] = []
        model = scenario.settings.engine
        self._router = Router(model.routing, model.replicas, policy.levels)
        self._placed: dict[int, Placed] = {}
        self.replicas = []
        for number in range(model.replicas):
            core = SchedulingCore(policy, scenario.assumed_profile, clock=lambda: self.events.now)
            if policy.reads(hinted=False):
                core.estimates.buckets = predictions.buckets
            self.replicas.append(_Replica(number, core, self, keep_seats))

    def run(self) -> None:
        if len(self._workload):
            self._expect(0)
        self.events.run()

    def decided(self, engine: Engine) -> None:
        """Record that an engine has decided on a step."""
        self.steps += 1
        self.note_depth()
        if self.before_step is not None:
            self.before_step(engine)

    def note_depth(self) -> None:
        """Record the number of waiting requests if it has changed."""
        if self.depth is None:
            return
        depths = [
            sum(counts) for counts in zip(*(r.engine.waiting for r in self.replicas), strict=True)
        ]
        if depths != self._depths:
            self._depths = depths
            self.depth.record(self.events.now, depths)

    def done(self, run: Run) -> None:
        """Record that a request is finished or refused."""
        self._router.leave(self._placed.pop(run.request.index))
        self.finished(run)

    def _expect(self, index: int) -> None:
        arrival = float(self._workload.arrivals[index])
        self.events.at(arrival, Order.ARRIVAL, lambda: self._arrive(index))

    def _arrive(self, index: int) -> None:
        request = self._workload.request(index)
        settings = self.scenario.settings
        limits = settings.workload.limits
        any_core = self.replicas[0].core
        stated = request.hint
        if stated is None and settings.workload.hints:
            stated = request.level
        extra_args = None if stated is None else {"urgency": stated}
        hint = any_core.read_hints(extra_args, 0)
        reads = any_core.policy.reads(hinted=hint.level is not None)
        prediction = self._predictions.each[index] if reads else None
        awaits = prediction is not None
        instant = self._instant.each[index] if awaits and self._instant is not None else None
        level = reading_level(any_core.policy, hint, instant)
        placed = self._placed[index] = self._router.choose(level)
        replica = self.replicas[placed.engine]
        job = replica.core.arrive(
            replica.core.draft(
                str(index),
                prompt_tokens=request.prompt_tokens,
                # One limit for all clients must not tell the policy the length of an answer.
                max_output_tokens=request.limit
                or (request.output_tokens if limits else self._longest),
                hint=hint,
                awaits_prediction=awaits,
                tenant=request.tenant,
                provisional=instant,
                stated=_stated(request),
            ),
            request.arrival,
        )
        run = Run(request, job, prediction, engine=replica.number)
        if awaits:
            replica.predictor.submit(run, level)
        if not (awaits and settings.predictor.hold):
            replica.submit(run)
        if index + 1 < len(self._workload):
            self._expect(index + 1)
        else:
            for each in self.replicas:
                each.predictor.drain()


class _Replica:
    """One of several engines at work: takes requests and steps while there is something to do."""

    def __init__(
        self,
        number: int,
        core: SchedulingCore,
        simulation: _Simulation,
        keep_seats: bool,
    ) -> None:
        scenario, settings = simulation.scenario, simulation.scenario.settings
        self.number = number
        self.core = core
        self.engine = make_engine(
            core, settings.engine, scenario.profile, keep_seats, simulation.done, settings.seed
        )
        self.predictor = PredictorQueue(
            simulation.events, core.policy.predictor, settings.predictor, self._predicted
        )
        self._simulation = simulation
        self._events = simulation.events
        self._holds = settings.predictor.hold
        self._busy = False
        self._arrival_seconds = settings.engine.arrival
        self._taken_in = 0  # since the last step

    def submit(self, run: Run) -> None:
        """A request arrives at the queue."""
        self._taken_in += 1
        self.engine.submit(run, self._events.now)
        self._simulation.note_depth()
        if not self._busy:
            self._busy = True
            self._events.at(self._events.now, Order.ENGINE, self._begin_step)

    def _predicted(self, batch: list[Run]) -> None:
        for run in batch:
            if run.finish is not None or run.refused:
                continue
            if self._holds:  # known before the request arrives at the queue
                self.core.predicted(run.job, run.prediction)
                self.submit(run)
            else:
                self.engine.predicted(run)

    def _begin_step(self) -> None:
        # As long as nothing else happens the next step follows here, past the event queue.
        while (seconds := self._decided()) is not None:
            end = self._events.now + seconds
            if not self._events.advance(end):
                self._events.at(end, Order.ENGINE, self._end_step)
                return
            self._finish_step()
            self._skip_steps()

    def _skip_steps(self) -> None:
        if self._simulation.before_step is None:  # which is told of every step
            steps, seconds = self.engine.skip_steps(self._events.quiet)
            self._events.skip(seconds)
            self._simulation.steps += steps

    def _end_step(self) -> None:
        self._finish_step()
        self._begin_step()

    def _finish_step(self) -> None:
        for run in self.engine.end_step(self._events.now):
            self._simulation.done(run)

    def _decided(self) -> float | None:
        """Let the engine decide on a step; its seconds, None if there is nothing to do."""
        seconds = self.engine.begin_step(self._events.now)
        self._busy = seconds is not None
        if seconds is not None:
            seconds += self._taken_in * self._arrival_seconds
            self._taken_in = 0
            self._simulation.decided(self.engine)
        return seconds


def _stated(request: SimRequest) -> StatedLength:
    exact = request.shortest and request.shortest == request.limit
    return StatedLength(request.shortest, request.shortest if exact else None)
