"""One engine with the policy core, the predictor and the limits that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.cost import SlowestOfBatch, StepCost, SumOfTokens
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.events import EventQueue, Order
from vllm_semantic_sched.sim.predictor import PredictorQueue
from vllm_semantic_sched.sim.prefixes import PrefixCache
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.scenario import Scenario
from vllm_semantic_sched.sim.sections import EngineModel


class Observer(Protocol):
    """Is told what an engine does, and has the clock that it runs by."""

    events: EventQueue

    @property
    def skips_steps(self) -> bool:
        """Whether steps in which nothing happens may be taken all at once."""

    def skipped(self, steps: int) -> None:
        """An engine has taken so many steps at once."""

    def decided(self, engine: Engine) -> None:
        """An engine has decided on a step."""

    def note_depth(self) -> None:
        """Somebody began or ceased to wait."""

    def done(self, run: Run) -> None:
        """A request is finished or refused."""


class Replica:
    """One of several engines at work: takes requests and steps while there is something to do."""

    def __init__(
        self,
        number: int,
        core: SchedulingCore,
        scenario: Scenario,
        observer: Observer,
        keep_seats: bool,
    ) -> None:
        settings = scenario.settings
        self.number = number
        self.core = core
        self.engine = make_engine(
            core, settings.engine, scenario.profile, keep_seats, self._ended, settings.seed
        )
        self.predictor = PredictorQueue(
            observer.events, core.policy.predictor, settings.predictor, self._predicted
        )
        self._observer = observer
        self._events = observer.events
        self._holds = settings.predictor.hold
        self._busy = False
        self._arrival_seconds = settings.engine.arrival
        self._taken_in = 0  # since the last step

    def submit(self, run: Run) -> None:
        """A request arrives at the queue."""
        self._taken_in += 1
        self.engine.submit(run, self._events.now)
        self._observer.note_depth()
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
        if self._observer.skips_steps:
            steps, seconds = self.engine.skip_steps(self._events.quiet)
            self._events.skip(seconds)
            self._observer.skipped(steps)

    def _end_step(self) -> None:
        self._finish_step()
        self._begin_step()

    def _finish_step(self) -> None:
        for run in self.engine.end_step(self._events.now):
            self._observer.done(run)

    def _decided(self) -> float | None:
        """Let the engine decide on a step; its seconds, None if there is nothing to do."""
        seconds = self.engine.begin_step(self._events.now)
        self._busy = seconds is not None
        if seconds is not None:
            seconds += self._taken_in * self._arrival_seconds
            self._taken_in = 0
            self._observer.decided(self.engine)
        return seconds

    def _ended(self, run: Run) -> None:
        self._observer.done(run)


def make_engine(
    core: SchedulingCore,
    model: EngineModel,
    profile: EngineProfile,
    keep_seats: bool = False,
    ended: Callable[[Run], None] = lambda run: None,
    seed: int = 0,
) -> Engine:
    """The engine that a scenario describes. It tells `ended` of each request that the policy ends;
    `seed`: of what is random in the policy's limits."""
    cost: StepCost
    if model.kind == "paper":
        cost = SlowestOfBatch(profile)
    else:
        batch = model.batch or profile.batch_terms
        cost = SumOfTokens(profile.model_copy(update={"batch": batch}))
    capacity = EngineCapacity(model.seats, model.kv_blocks, model.block_size)
    core.set_capacity(capacity, keeps_accounts=False, seed=seed)
    pool = BlockPool(model.kv_blocks, model.block_size)
    return Engine(
        core,
        cost,
        pool,
        seats=model.seats,
        token_budget=None if model.kind == "paper" else model.token_budget,
        host=BlockPool(model.host_blocks, model.block_size) if model.swap else None,
        keep_seats=keep_seats,
        ended=ended,
        prefixes=PrefixCache(pool) if model.prefix_caching else None,
    )
