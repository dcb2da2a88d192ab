"""Levels that an operator sets while requests wait or run."""

from itertools import groupby

import pytest
from drive import PROFILE
from hypothesis import given
from hypothesis import strategies as st

from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint, deciding_rule
from vllm_semantic_sched.policy.facts.job import Job, JobState, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload.refusal import Code
from vllm_semantic_sched.policy.position import position_of
from vllm_semantic_sched.sim.engine import Engine, unguarded
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import EngineModel
from vllm_semantic_sched.sim.snapshot import EngineSnapshot

# A victim is worth its seat, whatever its preemption costs.
CHEAP = {"correct_profile": False, "protect": {"worth": 1e9}}
LAST = Prediction((0.0, 0.0, 0.0, 0.0, 1.0))
STRICT = {"weighted_levels": {"factor": None}}


class World:
    """A simulated engine, step by step."""

    def __init__(self, seats: int = 1, **policy) -> None:
        self.now = 0.0
        self.core = SchedulingCore(parse_policy(CHEAP | policy), PROFILE, clock=lambda: self.now)
        self.engine = Engine(self.core, EngineModel(seats=seats), PROFILE)
        self.runs: list[Run] = []

    def arrive(self, level: int | None, tokens: int = 100, unread: bool = False, **job) -> Job:
        source = LevelSource.DEFAULT if level is None else LevelSource.HINT
        drafted = self.core.draft("r", 40, tokens, Hint(level, source), unread, **job)
        request = SimRequest(len(self.runs), self.now, 0, 40, tokens)
        self.runs.append(Run(request, self.core.arrive(drafted, self.now), None))
        self.engine.submit(self.runs[-1])
        return drafted

    def assign(self, job: Job, level: int) -> None:
        step.assign(self.core, EngineSnapshot(self.engine), job, level, by="me")
        self.engine._change()

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.now += self.engine.begin_step() or 0.0
            self.engine.end_step()

    def ahead_of(self, job: Job) -> int:
        position = position_of(self.core, EngineSnapshot(self.engine), job)
        assert position is not None
        return position.ahead


def test_raised_waiting_request_gets_the_next_seat_and_preempts() -> None:
    world = World()
    running, *_, raised = [world.arrive(4, 400) for _ in range(6)]
    world.step()
    assert running.state is JobState.RUNNING and world.ahead_of(raised) == 4
    world.assign(raised, 0)
    world.step(2)
    assert raised.state is JobState.RUNNING and running.state is JobState.WAITING


def test_raised_request_is_the_first_of_its_level() -> None:
    world = World(**STRICT)
    world.arrive(0, 400)
    world.step()
    shorter, earlier, raised = world.arrive(2, 10), world.arrive(2), world.arrive(4, 900)
    world.assign(raised, 2)
    assert list(world.core.waiting.ordered()) == [raised, shorter, earlier]
    more_urgent = world.arrive(1)
    assert world.core.waiting.peek() is more_urgent and world.ahead_of(raised) == 1
    world.assign(raised, 3)  # lowered: no longer before others of the level
    world.arrive(3, 10)
    assert world.ahead_of(raised) == 4


def test_lowered_running_request_makes_room() -> None:
    world = World(preemption={"min_level_gap": 1})
    lowered = world.arrive(0, 400)
    world.step()
    urgent = world.arrive(0, 100)
    world.step(2)
    assert lowered.state is JobState.RUNNING  # equals do not preempt
    world.assign(lowered, 4)
    world.step(2)
    assert (lowered.state, urgent.state) == (JobState.WAITING, JobState.RUNNING)


@pytest.mark.parametrize("by", ["operator", "predictor"])
def test_lowered_request_is_weighed_again_as_a_victim(monkeypatch, by) -> None:
    world = World()
    lowered = world.arrive(None if by == "predictor" else 2, 400, unread=by == "predictor")
    world.step()
    eviction = world.core.eviction
    monkeypatch.setattr(eviction, "_affordable_seconds", lambda job, need: 0.0)
    world.arrive(0)
    world.step(2)
    monkeypatch.setattr(eviction, "_affordable_seconds", lambda job, need: 1e9)
    world.step(2)
    assert lowered.state is JobState.RUNNING  # it was not worth it, and no seat came free since
    if by == "operator":
        world.assign(lowered, 4)
    else:
        world.core.predicted(lowered, LAST)
    world.step(2)
    assert lowered.state is JobState.WAITING


def test_lowered_waiting_request_falls_behind() -> None:
    world = World()
    world.arrive(0, 400)
    world.step()
    lowered, other = world.arrive(1), world.arrive(1)
    world.assign(lowered, 4)
    assert list(world.core.waiting.ordered()) == [other, lowered]


def test_neither_reading_nor_reload_nor_next_input_overrides_an_operator() -> None:
    world = World()
    world.arrive(0, 400)
    world.step()
    others = [world.arrive(2) for _ in range(3)]
    unread = world.arrive(None, unread=True)
    world.assign(unread, 1)
    assert world.core.waiting.peek() is unread and not world.core.waiting.buffered
    world.core.predicted(unread, LAST)
    world.core.switch(parse_policy(CHEAP | {"decision": {"missed_cost": [1.0]}}), PROFILE)
    world.step(2)
    world.core.turn(unread, 10, 10, Hint(4, LevelSource.HINT))
    assert (unread.level, unread.level_source) == (1, LevelSource.OPERATOR)
    assert unread.entitled_level == 1 and deciding_rule(unread) == "operator"
    assert all(other.level == 2 for other in others)


def tiers(*queues: dict) -> dict:
    named = [{"name": f"t{level}", "queue": queue} for level, queue in enumerate(queues)]
    return {"levels": len(queues), "default_level": 1, "tiers": named}


def test_bounds_of_the_new_tier_do_not_end_a_raised_request() -> None:
    short_and_small = {"requests": 1, "timeout": 0.001}
    world = World(**tiers(short_and_small, {}, {}))
    world.arrive(1, 400)
    world.step()
    full, raised, timed_out = world.arrive(0), world.arrive(2, 200), world.arrive(0)
    assert timed_out.state is JobState.REFUSED  # the queue of the tier is full
    world.now += 1.0
    world.assign(raised, 0)
    world.core.predicted(raised, None)
    world.step(3)
    assert not raised.state.is_end
    refused = [run.refused for run in world.runs if run.job is full]
    assert refused == [Code.QUEUE_TIMEOUT.value]


def test_position_is_none_outside_the_order() -> None:
    world = World()
    running, aside, last = [world.arrive(2) for _ in range(3)]
    world.step()
    world.core.set_aside(aside, world.core.waiting)
    snapshot = EngineSnapshot(world.engine)
    assert position_of(world.core, snapshot, running) is None
    assert position_of(world.core, snapshot, aside) is None
    assert position_of(world.core, snapshot, last) == (0, None)


@pytest.mark.parametrize("seats", [1, 4])
def test_expected_wait_grows_with_the_work_ahead(seats) -> None:
    world = World(seats, admission={"queue": {"requests": 1000}}, predictor={"enabled": False})
    for _ in range(40):
        world.arrive(2, 100)
    world.step(250)
    waiting = list(world.core.waiting.ordered())
    assert len(waiting) > 20
    snapshot = EngineSnapshot(world.engine)
    positions = [position_of(world.core, snapshot, job) for job in waiting]
    assert [position.ahead for position in positions] == list(range(len(waiting)))
    seconds = [position.seconds for position in positions]
    assert seconds[0] > 0 and seconds == sorted(seconds)
    begin = world.now
    while waiting[-1].state is JobState.WAITING:
        world.step()
    assert seconds[-1] == pytest.approx(world.now - begin, rel=0.3)
    free = World(seats=2, admission={"queue": {"requests": 1000}})
    assert position_of(free.core, EngineSnapshot(free.engine), free.arrive(2)) == (0, 0.0)


changes = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4)), max_size=12)


@given(st.sampled_from([STRICT, {}]), st.lists(st.integers(0, 4), max_size=12), changes)
def test_no_request_is_lost_and_the_order_is_that_of_the_levels(policy, levels, changes) -> None:
    world = World(2, **policy)
    jobs = [world.arrive(level, 5 + 20 * level) for level in levels]
    for number, level in changes:
        world.step()
        left = [job for job in jobs if not job.state.is_end]
        if left:
            world.assign(left[number % len(left)], level)
        ordered = list(world.core.waiting.ordered())
        assert len(set(ordered)) == len(ordered) == len(world.core.waiting)
        assert {job for job in left if job.state is not JobState.RUNNING} == set(ordered)
        assert [world.ahead_of(job) for job in ordered] == list(range(len(ordered)))
        if policy is STRICT:
            assert [job.level for job in ordered] == sorted(job.level for job in ordered)
            for _, same_level in groupby(ordered, key=lambda job: job.level):
                raised = [job.raised for job in same_level]
                assert raised == sorted(raised, reverse=True)
    for _ in range(20_000):
        if all(job.state.is_end for job in jobs):
            break
        world.step()
    assert all(job.state is JobState.COMPLETED for job in jobs)


def test_assigning_uses_what_a_step_uses() -> None:
    """A change between two steps leaves a core that a step takes further without a guard."""
    world = World()
    job = world.arrive(3)
    world.assign(job, 1)
    orders = step.step(world.core, world.engine.snapshot(), 0.0, unguarded)
    assert job in orders.moved
