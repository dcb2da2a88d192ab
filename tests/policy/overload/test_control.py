"""Admission, deduplication, queue timeouts and shedding in combination."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_semantic_sched.policy.config import Policy, parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import (
    NO_DEADLINES,
    Job,
    JobState,
    LevelSource,
    StatedDeadlines,
)
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.overload import control
from vllm_semantic_sched.policy.overload.load import PressureLevel
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal
from vllm_semantic_sched.policy.profile.formula import load_profile

PROFILE = load_profile("default")
TOKENS = 100 + 50  # what a job of `World.arrive` is expected to need


class World:
    """Jobs, a manual clock, and the control under test."""

    def __init__(self, policy: Policy | dict, seats: int = 1, kv_tokens: int = 10**9) -> None:
        self.now = 1000.0
        policy = policy if isinstance(policy, Policy) else parse_policy(policy)
        self.core = SchedulingCore(policy, PROFILE, clock=lambda: self.now)
        capacity = EngineCapacity(seats, kv_tokens, block_size=1)
        self.core.set_capacity(capacity)
        self.control = self.core.overload
        self.seats = seats
        self.jobs: list[Job] = []
        self.refusals: dict[Job, Refusal] = {}
        self.refused: dict[Job, Code] = {}
        self._ids = itertools.count()

    @property
    def free_seats(self) -> int:
        return max(0, self.seats - len(self.running))

    @property
    def waiting(self) -> list[Job]:
        return [job for job in self.jobs if job.state is JobState.WAITING and job.started is None]

    @property
    def running(self) -> list[Job]:
        return [job for job in self.jobs if job.state is JobState.RUNNING]

    def arrive(
        self,
        level: int = 0,
        key: str | None = None,
        origin: str | None = None,
        tenant: str = "",
        patience: float | None = None,
        deadlines: StatedDeadlines = NO_DEADLINES,
    ) -> Job:
        number = next(self._ids)
        job = self.core.arrive(
            self.core.draft(
                f"r{number}",
                prompt_tokens=100,
                max_output_tokens=50,
                hint=Hint(level, LevelSource.HINT),
                awaits_prediction=False,
                tenant=tenant,
            ),
            self.now,
        )
        job.patience, job.deadlines = patience, deadlines
        self.jobs.append(job)
        self.core.enqueue(job, self.core.waiting)
        seats = partial(getattr, self, "free_seats")
        self.end(self.control.admit(job, self.now, seats, key, origin or f"r{number}"))
        return job

    def end(self, endings) -> None:
        for job, refusal in endings:
            assert job not in self.refused, "refused twice"
            assert not job.state.is_end
            assert refusal.message and refusal.retry_after >= 1
            self.refused[job] = refusal.code
            self.refusals[job] = refusal
            self.core.finish(job, AnswerEnd.ABORTED, JobState.REFUSED, refusal.code.value)

    def start(self, job: Job) -> None:
        self.core.waiting.remove(job)
        self.core.start(job)

    def complete(self, job: Job) -> None:
        job.generated = 50
        self.core.lifecycle.first_token(job)
        self.core.finish(job, AnswerEnd.STOPPED, JobState.COMPLETED, "stop")

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.end(self.control.step(self.now, kv_use=0.0))


def counted(world: World) -> set[Job]:
    """The jobs that the account counts, each at one level."""
    jobs = [job for entries in world.control.account.entries for job in entries]
    assert len(jobs) == len(set(jobs))
    return set(jobs)


def busy(policy: dict, seats: int = 1, **more) -> World:
    """A world with all seats taken."""
    world = World({"levels": 3, "default_level": 1} | policy, seats, **more)
    for _ in range(seats):
        world.start(world.arrive(0))
    return world


def tiers(*overrides: dict) -> list[dict]:
    return [{"name": f"t{level}"} | values for level, values in enumerate(overrides)]


QUEUE_OF_2 = {"admission": {"queue": {"requests": 2}}}


def test_without_limits_nothing_is_refused() -> None:
    world = busy({})
    for level in (0, 1, 2) * 50:
        world.arrive(level)
    world.step(1e6)
    assert not world.refused


def test_full_queue_replaces_the_newest_least_urgent_request() -> None:
    world = busy(QUEUE_OF_2)
    first, second = world.arrive(2), world.arrive(2)
    urgent = world.arrive(0)
    assert world.refused == {second: Code.OVER_CAPACITY}
    assert world.waiting == [first, urgent]


def test_full_queue_refuses_a_request_that_is_not_more_urgent() -> None:
    world = busy(QUEUE_OF_2)
    world.arrive(1), world.arrive(1)
    equal, lesser = world.arrive(1), world.arrive(2)
    assert world.refused == {equal: Code.OVER_CAPACITY, lesser: Code.OVER_CAPACITY}


def test_requests_with_a_free_seat_do_not_count_as_waiting() -> None:
    world = World({"levels": 3, "default_level": 1} | QUEUE_OF_2, seats=4)
    jobs = [world.arrive(1) for _ in range(7)]
    assert world.refused == {jobs[6]: Code.OVER_CAPACITY}  # 4 start at once, 2 wait


def test_bound_of_a_tier_holds_for_it_alone() -> None:
    world = busy({"tiers": tiers({}, {}, {"queue": {"requests": 1}})})
    world.arrive(2)
    refused = world.arrive(2)
    for _ in range(5):
        world.arrive(1)
    assert world.refused == {refused: Code.OVER_CAPACITY}


def test_each_tenant_has_its_own_bound() -> None:
    world = busy({"admission": {"tenant": {"requests": 2}}})
    world.arrive(1, tenant="a"), world.arrive(1, tenant="a")
    refused = world.arrive(0, tenant="a")
    world.arrive(1, tenant="b"), world.arrive(1)
    assert world.refused == {refused: Code.TENANT_OVER_SHARE}


def test_dedup_keys_are_separate_per_tenant() -> None:
    world = busy({"dedup": "waiting"})
    world.arrive(1, key="k", tenant="a")
    world.arrive(1, key="k", tenant="b")
    assert not world.refused


def test_preempted_requests_are_not_replaced_nor_timed_out() -> None:
    world = busy({"admission": {"queue": {"requests": 1, "timeout": 5.0}}})
    job = world.running[0]
    world.core.preempt(job, world.core.plan_preemption(job, job.computed), reason="urgent")
    world.core.enqueue(job, world.core.waiting)
    world.arrive(0), world.arrive(0)
    world.step(100.0)
    assert job not in world.refused


def test_request_without_a_seat_times_out_by_its_tier() -> None:
    policy = {
        "admission": {"queue": {"timeout": 10.0}},
        "tiers": tiers({}, {"queue": {"timeout": 2.0}}, {}),
    }
    world = busy(policy)
    standard, background = world.arrive(1), world.arrive(2)
    world.step(1.9)
    assert not world.refused
    world.step(0.2)
    assert world.refused == {standard: Code.QUEUE_TIMEOUT}
    world.step(8.0)
    assert world.refused[background] is Code.QUEUE_TIMEOUT


@pytest.mark.parametrize("policy", [{}, {"admission": {"queue": {"timeout": 10.0}}}])
def test_client_may_wait_less_than_the_policy_allows(policy) -> None:
    world = busy(policy)
    hasty, patient = world.arrive(0, patience=3.0), world.arrive(2, patience=20.0)
    started = world.arrive(1, patience=3.0)
    world.start(started)
    world.step(2.9)
    assert not world.refused
    world.step(0.2)
    assert world.refused == {hasty: Code.QUEUE_TIMEOUT}
    world.step(7.0)
    assert (patient in world.refused) == bool(policy)
    world.step(10.0)
    assert world.refused == dict.fromkeys((hasty, patient), Code.QUEUE_TIMEOUT)


def test_patience_counts_from_arrival_after_a_change_of_level() -> None:
    world = busy({})
    job = world.arrive(1, patience=3.0)
    world.now += 2.0
    job.level = 2
    world.end(world.control.revised(job, world.now, lambda: 0))
    world.step(1.1)
    assert world.refused == {job: Code.QUEUE_TIMEOUT}


def test_job_with_a_new_level_is_judged_by_that_tier() -> None:
    world = busy({"tiers": tiers({}, {}, {"queue": {"requests": 1, "timeout": 5.0}})})
    world.arrive(2)
    job = world.arrive(1)
    job.level = 2
    world.end(world.control.revised(job, world.now, lambda: 0))
    assert world.refused == {job: Code.OVER_CAPACITY}


def test_newer_request_with_same_key_replaces_waiting_one() -> None:
    world = busy({"dedup": "waiting"} | QUEUE_OF_2)
    old, other = world.arrive(1, key="page 7"), world.arrive(1)
    new = world.arrive(1, key="page 7")
    assert world.refused == {old: Code.SUPERSEDED}
    assert world.waiting == [other, new]


def test_refused_request_supersedes_nothing() -> None:
    world = busy({"dedup": "waiting", "tiers": tiers({}, {}, {"queue": {"requests": 1}})})
    old = world.arrive(1, key="k")
    world.arrive(2)
    new = world.arrive(2, key="k")
    assert world.refused == {new: Code.OVER_CAPACITY}
    assert old in counted(world)


@pytest.mark.parametrize(("dedup", "ended"), [("waiting", False), ("running", True)])
def test_running_request_is_superseded_with_dedup_running(dedup, ended) -> None:
    world = World({"dedup": dedup})
    old = world.arrive(1, key="k")
    world.start(old)
    world.arrive(1, key="k")
    assert (world.refused.get(old) is Code.SUPERSEDED) is ended


def test_parts_of_one_request_do_not_supersede_each_other() -> None:
    world = busy({"dedup": "waiting"})
    parts = [world.arrive(1, key="k", origin="a") for _ in range(3)]
    assert not world.refused
    world.arrive(1, key="k", origin="b")
    assert set(world.refused) == set(parts)


def test_tier_over_its_share_is_refused_only_under_pressure() -> None:
    policy = {
        "admission": {"over_share": "hard"},
        "tiers": tiers({"share": 0.5}, {"share": 0.3}, {"share": 0.2}),
    }
    world = busy(policy, seats=4)
    assert world.control.load.pressure.level is PressureLevel.NONE
    for _ in range(4):
        world.arrive(2)
    assert not world.refused
    world.step(1.0)  # eight requests on four seats
    assert world.control.load.pressure.level is PressureLevel.WARNING
    refused = world.arrive(2)
    assert world.refused == {refused: Code.TIER_OVER_SHARE}
    world.arrive(1)
    world.arrive(0)
    assert len(world.refused) == 1


def test_refusals_grow_with_excess_and_are_repeatable() -> None:
    policy = {
        "admission": {"over_share": "probabilistic"},
        "tiers": tiers({"share": 0.4}, {"share": 0.4}, {"share": 0.2}),
    }

    def refused(background: int) -> list[int]:
        world = busy(policy, seats=20)
        while sum(job.level == 2 for job in world.waiting) < background:
            world.arrive(2)
        world.refused.clear()
        world.step(1.0)
        rate = []
        for _ in range(200):
            job = world.arrive(2)
            rate.append(int(job in world.refused))
            if not job.state.is_end:
                world.core.finish(job, AnswerEnd.ABORTED, JobState.CANCELLED, "abort")
        return rate

    a_little, much = refused(12), refused(18)
    assert 0 < sum(a_little) < sum(much) < 200
    assert refused(12) == a_little


def test_background_is_shed_only_while_premium_waits_too_long() -> None:
    policy = {
        "shedding": {"enabled": True},
        "tiers": tiers({"slo": {"ttft": 1.0}}, {"shed_order": 2}, {"shed_order": 1}),
    }
    world = busy(policy)
    world.arrive(0)
    world.arrive(2)
    world.step(0.5)
    world.arrive(2)
    assert not world.refused
    world.step(1.0)  # premium has waited 1.5 s, longer than its SLO
    assert world.arrive(2) in world.refused
    assert world.arrive(1) not in world.refused
    world.step(1.0)
    assert world.arrive(1) in world.refused
    assert world.arrive(0) not in world.refused
    assert set(world.refused.values()) == {Code.SHED}
    for job in (*world.running, *world.waiting):
        if job in world.waiting:
            world.start(job)
        world.complete(job)
    world.step(0.1)
    world.step(2.1)
    assert world.arrive(2) not in world.refused


def test_waiting_requests_of_a_shed_tier_end_with_waiting_end() -> None:
    policy = {
        "shedding": {"enabled": True, "waiting": "end"},
        "tiers": tiers({"slo": {"ttft": 1.0}}, {}, {"shed_order": 1}),
    }
    world = busy(policy)
    world.arrive(0)
    waiting = [world.arrive(2) for _ in range(5)]
    standard = world.arrive(1)
    world.step(1.5)
    assert set(world.refused) == set(waiting)
    assert standard in counted(world)


def test_retry_after_grows_with_queue_per_throughput(monkeypatch) -> None:
    monkeypatch.setattr(control, "_LONGEST_RETRY", 1e6)
    world = busy({})
    few = world.control.retry_after(2)
    for _ in range(500):
        world.arrive(1)
    many = world.control.retry_after(2)
    assert many > 10 * few
    assert world.control.retry_after(0) < many / 10  # those are served first
    for _ in range(40):  # 150 tokens each tenth of a second
        world.complete(world.running[0])
        world.start(world.waiting[0])
        world.step(0.1)
    left = len(world.waiting) * TOKENS
    assert world.control.retry_after(2) == pytest.approx(left / (TOKENS / 0.1), rel=0.3)


def test_reloaded_policy_applies_to_the_next_request() -> None:
    world = busy({})
    world.arrive(1), world.arrive(1), world.arrive(1)
    policy = parse_policy({"levels": 3, "default_level": 1} | QUEUE_OF_2)
    world.core.switch(policy, PROFILE)
    assert world.arrive(1) in world.refused


LIMITS = {
    "levels": 3,
    "default_level": 1,
    "admission": {"queue": {"requests": 5, "timeout": 20.0}},
    "dedup": "waiting",
    "shedding": {"enabled": True},
    "tiers": tiers(
        {"slo": {"ttft": 2.0}},
        {"queue": {"requests": 4, "timeout": 5.0}, "shed_order": 2},
        {"queue": {"requests": 3}, "shed_order": 1},
    ),
}


class RandomRequests(RuleBasedStateMachine):
    """Random events in any order: bounds hold, and every job ends exactly once."""

    @initialize(seats=st.integers(1, 3))
    def open(self, seats) -> None:
        self.world = World(LIMITS, seats)
        self.keys: dict[Job, str] = {}

    @rule(level=st.integers(0, 2), key=st.sampled_from([None, None, "a", "b"]))
    def arrive(self, level, key) -> None:
        world = self.world
        waiting, free = len(world.waiting), world.free_seats
        before = set(world.refused)
        job = world.arrive(level, key)
        if key is not None:
            self.keys[job] = key
        for other in set(world.refused) - before - {job}:
            assert job not in world.refused  # a refused job replaces no other
            code = world.refused[other]
            assert code is Code.SUPERSEDED or other.level > level
        assert len(world.waiting) <= max(waiting, 5 + free)

    @rule()
    @precondition(lambda self: self.world.free_seats and self.world.waiting)
    def start(self) -> None:
        self.world.start(min(self.world.waiting, key=lambda job: (job.level, job.sequence)))

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.world.running)
    def complete(self, which) -> None:
        self.world.complete(self.world.running[which % len(self.world.running)])

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.world.waiting)
    def cancel(self, which) -> None:
        job = self.world.waiting[which % len(self.world.waiting)]
        self.world.core.finish(job, AnswerEnd.ABORTED, JobState.CANCELLED, "abort")

    @rule(which=st.integers(0, 9))
    @precondition(lambda self: self.world.running)
    def preempt(self, which) -> None:
        world = self.world
        job = world.running[which % len(world.running)]
        world.core.preempt(job, world.core.plan_preemption(job, job.computed), reason="urgent")
        world.core.enqueue(job, world.core.waiting)

    @rule()
    @precondition(
        lambda self: (
            self.world.free_seats
            and any(job.started and job.state is JobState.WAITING for job in self.world.jobs)
        )
    )
    def resume(self) -> None:
        jobs = [j for j in self.world.jobs if j.started and j.state is JobState.WAITING]
        self.world.start(jobs[0])

    @rule(which=st.integers(0, 9), level=st.integers(0, 2))
    @precondition(lambda self: self.world.waiting)
    def relevel(self, which, level) -> None:
        world = self.world
        job = world.waiting[which % len(world.waiting)]
        world.core.levels.change(job, level)
        world.end(world.control.revised(job, world.now, lambda: world.free_seats))

    @rule(seconds=st.floats(0, 4))
    def step(self, seconds) -> None:
        self.world.step(seconds)

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        world = self.world
        assert {job for job in world.jobs if job.state is JobState.REFUSED} == set(world.refused)
        assert counted(world) == set(world.waiting)
        assert world.core.allocations.all.queued == len(world.waiting)
        for level in range(3):
            there = sum(job.level == level for job in world.waiting)
            assert world.core.allocations.levels[level].queued == there

    @invariant()
    def bounds_hold(self) -> None:
        world, seats = self.world, self.world.seats
        assert len(world.waiting) <= 5 + seats
        for level, bound in ((1, 4), (2, 3)):
            assert world.core.allocations.levels[level].queued <= bound + seats

    @invariant()
    def one_waits_per_key(self) -> None:
        keys = [self.keys[job] for job in self.world.waiting if job in self.keys]
        assert len(keys) == len(set(keys))

    @invariant()
    def need_is_that_of_running_jobs(self) -> None:
        world = self.world
        assert sum(world.control.load.outstanding()) == pytest.approx(
            sum(100 + max(50, job.generated + 1) for job in (*world.running, *world.waiting))
        )

    def teardown(self) -> None:
        world = self.world
        for job in [job for job in world.jobs if not job.state.is_end]:
            world.core.finish(job, AnswerEnd.ABORTED, JobState.CANCELLED, "abort")
        account, load = world.control.account, world.control.load
        everyone = world.core.allocations.all
        assert not everyone.queued and not everyone.queued_tokens
        assert not counted(world) and not list(account.timed_out(float("inf")))
        assert not len(world.control.dedup)
        assert not sum(load.outstanding()) and not len(world.core.allocations)


RandomRequests.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestRandomRequests = RandomRequests.TestCase


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 6))
def test_every_request_is_either_accepted_or_refused(levels, bound) -> None:
    world = busy({"admission": {"queue": {"requests": bound}}})
    for level in levels:
        world.arrive(level)
    assert len(world.waiting) + len(world.refused) == len(levels)
    assert len(world.waiting) == min(bound, len(levels))
    # Nobody who was refused is more urgent than anybody who waits.
    most_urgent = min((job.level for job in world.refused), default=3)
    assert all(job.level <= most_urgent for job in world.waiting)


def test_provisional_level_alone_refuses_no_request() -> None:
    """A misread emergency waits until the predictor has read it."""
    calm = Prediction((0.0, 0.0, 1.0))
    tiers = [{"name": "a"}, {"name": "b"}, {"name": "c", "queue": {"requests": 1}}]
    world = busy({"tiers": tiers})
    world.arrive(2)  # fills the queue of its tier

    def arrive(provisional: Prediction | None) -> Job:
        hint = Hint(None, LevelSource.DEFAULT)
        job = world.core.arrive(
            world.core.draft("new", 100, 50, hint, True, provisional=provisional), world.now
        )
        world.core.enqueue(job, world.core.waiting)
        world.end(world.control.admit(job, world.now, lambda: world.free_seats))
        return job

    job = arrive(calm)
    assert job.level == 2 and job not in world.refused
    world.core.predicted(job, calm)
    world.end(world.control.revised(job, world.now, lambda: world.free_seats))
    assert job in world.refused
    emergency = arrive(calm)
    world.core.predicted(emergency, Prediction((1.0, 0.0, 0.0)))
    world.end(world.control.revised(emergency, world.now, lambda: world.free_seats))
    assert emergency.level == 0 and emergency not in world.refused


# Deadlines that requests state

STATED = {"deadlines": {"stated": True}}


def full(policy: dict, waiting: int = 0) -> World:
    """A world without a free seat, with requests that wait at level 1."""
    world = World(policy, seats=1)
    world.start(world.arrive(1))
    for _ in range(waiting):
        world.arrive(1)
    return world


def test_deadline_that_cannot_be_kept_is_refused_with_the_earliest_that_could() -> None:
    world = full(STATED, waiting=20)
    job = world.arrive(2, deadlines=StatedDeadlines(answer=0.5))
    refusal = world.refusals[job]
    assert refusal.code is Code.DEADLINE and refusal.code.status == 429
    assert refusal.deadline_ms > 500
    assert refusal.body()["error"]["deadline_ms"] == refusal.deadline_ms
    earliest = refusal.deadline_ms / 1000
    hasty = world.arrive(2, deadlines=StatedDeadlines(answer=earliest - 0.01))
    assert abs(world.refusals[hasty].deadline_ms - refusal.deadline_ms) <= 1
    patient = world.arrive(2, deadlines=StatedDeadlines(answer=earliest))
    assert patient in counted(world)


def test_deadline_is_kept_beside_requests_without_one_and_with_a_free_seat() -> None:
    for world in (full(STATED, waiting=20), World(STATED)):
        job = world.arrive(1, deadlines=StatedDeadlines(answer=20.0))
        assert job in counted(world)


def test_longest_of_those_that_cannot_all_be_kept_is_refused() -> None:
    world = full(STATED)
    while not world.refused:
        world.arrive(1, deadlines=StatedDeadlines(answer=8.0))
    earliest = [refusal.deadline_ms for refusal in world.refusals.values()]
    assert len(earliest) == 1 and earliest[0] > 8000
    assert len(counted(world)) > 1


def test_most_urgent_level_is_never_refused_for_its_deadline() -> None:
    world = full(STATED, waiting=20)
    assert world.arrive(0, deadlines=StatedDeadlines(answer=0.001)) in counted(world)


def test_without_the_key_no_deadline_is_refused_or_expires() -> None:
    world = full({}, waiting=20)
    job = world.arrive(2, deadlines=StatedDeadlines(answer=0.001))
    world.step(10.0)
    assert job in counted(world)


def test_waiting_request_ends_at_its_deadline() -> None:
    world = full(STATED)
    job = world.arrive(0, deadlines=StatedDeadlines(answer=3.0))
    world.step(2.9)
    assert job in counted(world)
    world.step(0.2)
    assert world.refused == {job: Code.QUEUE_TIMEOUT}


def test_objective_for_the_first_token_neither_refuses_nor_expires() -> None:
    world = full(STATED, waiting=20)
    job = world.arrive(2, deadlines=StatedDeadlines(first_token=0.001))
    world.step(100.0)
    assert job in counted(world)


def test_unread_request_is_judged_when_it_has_been_read() -> None:
    world = full(STATED, waiting=20)
    job = world.core.draft(
        "unread",
        prompt_tokens=100,
        max_output_tokens=50,
        hint=Hint(None, LevelSource.DEFAULT),
        awaits_prediction=True,
    )
    job.deadlines = StatedDeadlines(answer=0.5)
    world.core.arrive(job, world.now)
    world.core.enqueue(job, world.core.waiting)
    assert world.control.admit(job, world.now, lambda: 0) == []
    world.core.predicted(job, None)
    [(refused, refusal)] = world.control.revised(job, world.now, lambda: 0)
    assert refused is job and refusal.code is Code.DEADLINE
