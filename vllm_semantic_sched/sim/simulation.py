"""One run: a workload through a predictor and an engine under one policy."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import reading_level, reading_order
from vllm_semantic_sched.policy.facts.job import StatedDeadlines, StatedLength
from vllm_semantic_sched.policy.placement import Placed, Placement
from vllm_semantic_sched.sim.baselines import Feedback, SessionOrder, boosted, due
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
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.sections import Baselines, Routing
from vllm_semantic_sched.sim.workload import Workload, draw_workload

Given = tuple[Workload, Predictions]

# Second part of the seeds of the random generators, which must not depend on each other.
_WORKLOAD_STREAM = 1
_PREDICTOR_STREAM = 2
_INSTANT_STREAM = 3


def simulate(
    scenario: Scenario,
    scheduler: str,
    repeat: int = 0,
    keep_seats: bool = False,  # record each request's times in seats
    before_step: Callable[[Engine], None] | None = None,  # called when a step is decided on
    finished: Callable[[Run], None] | None = None,  # gets each request that ends; none is kept
    depth: DepthHistory | None = None,  # records the number of waiting requests
    given: Given | None = None,  # instead of the requests that the scenario describes
    watch: Callable[[SchedulingCore], None] | None = None,  # gets each core before all requests
) -> Simulation:
    """Run one scheduler on the draw of the workload of a repeat, the same for all schedulers.
    WorkloadError if a trace cannot be read or a request does not fit into the engine.
    """
    settings = scenario.settings
    model = settings.predictor
    policy = scenario.policies[scheduler]
    levels = policy.levels

    def random(stream: int) -> np.random.Generator:
        return np.random.default_rng([settings.seed + repeat, stream])

    if given is None:
        workload = draw_workload(
            settings.workload,
            levels,
            random(_WORKLOAD_STREAM),
            settings.engine.block_size,
        )
        predictions = draw_predictions(model, workload, levels, random(_PREDICTOR_STREAM))
    else:
        workload, predictions = given
    simulation = Simulation(
        scenario=scenario,
        workload=workload,
        predictions=predictions,
        instant=draw_instant(model, workload, levels, random(_INSTANT_STREAM)),
        router=Router(settings.engine.routing, settings.engine.replicas, levels),
        finished=finished,
        before_step=before_step,
        depth=depth,
    )
    for _ in range(settings.engine.replicas):
        replica = _Replica(policy, simulation, keep_seats)
        if scheduler in settings.gate.schedulers:
            replica.core.gated_level = settings.gate.level
        replica.set_baseline(settings.baselines, scheduler)
        simulation.replicas.append(replica)
        if watch is not None:
            watch(replica.core)
    simulation.expect_next()
    simulation.events.run()
    simulation.runs.sort(key=lambda run: run.request.index)
    return simulation


class Router(Placement):
    """Assigns each arriving request to one of several independent engines, see `Routing`."""

    def __init__(self, routing: Routing, engines: int, levels: int) -> None:
        # With one level all requests are equally urgent.
        self._last_level = levels - 1 if routing == "urgency_aware" else 0
        self._in_turn = itertools.cycle(range(engines)) if routing == "round_robin" else None
        super().__init__(engines, self._last_level + 1)

    def choose(self, level: int) -> Placed:
        """Choose an engine for a request of this level, and count it there until `leave`."""
        level = min(level, self._last_level)
        if self._in_turn is not None:
            return self.count(next(self._in_turn), level)
        return self.place(level)


@dataclass
class Simulation:
    """Generates arrivals, routes them to engines and runs the events. For the attributes see
    `simulate`; `runs` are those that nobody else gets, in order of arrival; `steps`, and `busy`,
    their seconds, are those of all engines."""

    scenario: Scenario
    workload: Workload
    predictions: Predictions
    instant: Predictions | None
    router: Router
    finished: Callable[[Run], None] | None
    before_step: Callable[[Engine], None] | None
    depth: DepthHistory | None
    runs: list[Run] = field(default_factory=list)
    steps: int = 0
    busy: float = 0.0
    replicas: list[_Replica] = field(default_factory=list)
    events: EventQueue = field(default_factory=EventQueue)
    placed: dict[int, Placed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._longest = int(self.workload.outputs.max(initial=1))  # tokens of an answer
        self._followers = self.workload.followers()
        follow = set(self._followers.values())
        # Requests that come at times known in advance.
        self._timed = (index for index in range(len(self.workload)) if index not in follow)

    def note_depth(self) -> None:
        """Record the number of waiting requests per level, over all engines, if wanted."""
        if self.depth is not None:
            waiting = [replica.engine.waiting for replica in self.replicas]
            self.depth.record(self.events.now, list(map(sum, zip(*waiting, strict=True))))

    def done(self, run: Run) -> None:
        """Record that a request is finished or refused. What waits for its answer comes next, or
        never if it was refused."""
        index = run.request.index
        self.router.leave(self.placed.pop(index))
        if index in self._followers and not run.refused:
            self._follow(self._followers[index])
        if self.finished is None:
            self.runs.append(run)
        else:
            self.finished(run)

    def expect_next(self) -> None:
        """Schedule the next arrival whose time is known in advance."""
        index = next(self._timed, None)
        if index is None:
            for replica in self.replicas:
                replica.predictor.drain()
            return
        arrival = float(self.workload.arrivals[index])

        def arrive() -> None:
            self._arrive(self.workload.request(index))
            self.expect_next()

        self.events.at(arrival, Order.ARRIVAL, arrive)

    def _follow(self, index: int) -> None:
        """Schedule a request whose session has got its last answer now."""
        assert self.workload.pauses is not None
        arrival = self.events.now + float(self.workload.pauses[index])
        request = replace(self.workload.request(index), arrival=arrival)
        self.events.at(arrival, Order.ARRIVAL, lambda: self._arrive(request))

    def _arrive(self, request: SimRequest) -> None:
        index = request.index
        settings = self.scenario.settings
        any_core = self.replicas[0].core  # all have the same policy
        policy = any_core.policy
        stated = request.hint
        if stated is None and settings.workload.hints:
            stated = request.level
        extra_args = {} if stated is None else {"urgency": stated}
        hint = any_core.read_hints(extra_args, priority=0, tenant=request.tenant)
        reads = policy.reads(hinted=hint.level is not None)
        prediction = self.predictions.by_request[index] if reads else None
        awaits = prediction is not None
        instant = None
        if awaits and self.instant is not None:
            instant = self.instant.by_request[index]
        placed = self.router.choose(reading_level(policy, hint, instant))
        self.placed[index] = placed
        replica = self.replicas[placed.engine]
        # One limit for all clients must not tell the policy the length of an answer.
        limit = request.output_tokens if settings.workload.limits else self._longest
        # An answer that must reach its limit is exactly as long.
        exact = request.shortest > 0 and request.shortest == request.limit
        stated_length = StatedLength(
            shortest=request.shortest, longest=request.shortest if exact else None
        )
        turn = None
        if request.session and policy.sessions.memory is not None:
            now = replica.core.lifecycle.clock()
            turn = replica.core.sessions.begin(request.tenant, request.session, now)
        job = replica.core.draft(
            str(index),
            prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.limit or limit,
            hint=hint,
            awaits_prediction=awaits,
            tenant=request.tenant,
            provisional=instant,
            stated=stated_length,
            session=turn,
        )
        job.deadlines = StatedDeadlines(answer=request.deadline)
        if settings.predictor.hold:
            replica.core.arrive(job, request.arrival)
        run = Run(request, job, prediction, engine=placed.engine)
        if awaits:
            replica.predictor.submit(run, reading_order(policy, hint, instant))
        if not (awaits and settings.predictor.hold):
            replica.submit(run)


class _Replica:
    """One of several engines at work: takes requests and steps while there is something to do."""

    def __init__(self, policy: Policy, simulation: Simulation, keep_seats: bool) -> None:
        scenario = simulation.scenario
        settings = scenario.settings
        events = simulation.events
        self._events = events
        self.core = SchedulingCore(policy, scenario.assumed_profile, clock=lambda: events.now)
        if policy.reads(hinted=False):
            self.core.estimates.buckets = simulation.predictions.buckets
        self.engine = Engine(
            self.core,
            settings.engine,
            scenario.profile,
            keep_seats,
            simulation.done,
            settings.seed,
        )
        self.predictor = PredictorQueue(events, settings.predictor, self._predicted)
        self._simulation = simulation
        self._settings = settings
        # Steps that have begun: one is computed, and the next one may be decided already.
        self._depth = 2 if settings.engine.asynchronous else 1
        self._ends: deque[float] = deque()  # of these, in seconds
        self._busy = False
        self._feedback: Feedback | None = None  # see `set_baseline`
        self._arrived: list[Run] = []  # since the last step was decided

    def set_baseline(self, baselines: Baselines, scheduler: str) -> None:
        """Order requests as another system does, if the scheduler stands for one."""
        if scheduler in baselines.edf:
            self.core.rank_by = due
        if scheduler in baselines.boost:
            boost = baselines.boost[scheduler]
            self.core.rank_by = boosted(self.core.estimates, boost.gamma, boost.lengths)
        if scheduler in baselines.sessions:
            order = SessionOrder(self.engine)
            by = baselines.sessions[scheduler]
            self.core.rank_by = order.began if by == "first" else order.attained
        if scheduler in baselines.las:
            self._feedback = Feedback(self.engine)

    def submit(self, run: Run) -> None:
        """The engine takes a request in before its next step: not while it waits for one."""
        self._arrived.append(run)
        if not self._busy:
            self._busy = True
            self._events.at(self._events.now, Order.ENGINE, self._begin_steps)

    def _predicted(self, batch: list[Run]) -> None:
        for run in batch:
            if run.finish is not None or run.refused:
                continue
            if self._settings.predictor.hold:
                self.submit(run)
            else:
                self.engine.predicted(run)

    def _begin_steps(self) -> None:
        # As long as nothing else happens the next step follows here, past the event queue.
        while self._begun():
            end = self._ends[0]
            if not self._events.advance(end):
                self._events.at(end, Order.ENGINE, self._end_step)
                return
            self._finish_step()
            # Which are told of every step.
            if self._simulation.before_step is None and self._feedback is None:
                self._skip_steps()

    def _end_step(self) -> None:
        self._finish_step()
        self._begin_steps()

    def _finish_step(self) -> None:
        self._ends.popleft()
        for run in self.engine.end_step():
            self._simulation.done(run)

    def _skip_steps(self) -> None:
        events = self._events
        ends = self._ends
        simulation = self._simulation
        coming = ends[0] - events.now if ends else 0.0
        steps, seconds, left = self.engine.skip_steps(events.quiet - coming)
        if steps:
            events.now += coming + seconds
            simulation.steps += steps
            simulation.busy += seconds + left
            if ends:
                ends[0] = events.now + left

    def _begun(self) -> bool:
        """Begin steps, as many as the engine has at a time; whether any is in flight."""
        ends = self._ends
        while len(ends) < self._depth:
            seconds = self._decided()
            if seconds is None:
                break
            begin = ends[-1] if ends else self._events.now
            ends.append(begin + seconds)
        self._busy = bool(ends)
        return self._busy

    def _decided(self) -> float | None:
        """Let the engine decide on a step; its seconds, None if there is nothing to do."""
        taken_in = self._take_in()
        if self._feedback is not None:
            self._feedback.step()
        seconds = self.engine.begin_step()
        if seconds is None:
            return None
        simulation = self._simulation
        simulation.steps += 1
        simulation.note_depth()
        if simulation.before_step is not None:
            simulation.before_step(self.engine)
        seconds += taken_in * self._settings.engine.arrival
        simulation.busy += seconds
        return seconds

    def _take_in(self) -> int:
        """Queue the requests that have arrived; how many. Until now the policy did not know them,
        and as in the engine their waits count from now; what is held for its prediction waits from
        its arrival."""
        if not self._arrived:
            return 0
        arrived = self._arrived
        self._arrived = []
        for run in arrived:
            if self._settings.predictor.hold:  # known before the request arrives at the queue
                self.core.predicted(run.job, run.prediction)
            else:
                self.core.arrive(run.job, self._events.now)
            self.engine.submit(run)
        self._simulation.note_depth()
        return len(arrived)
