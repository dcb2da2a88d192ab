"""Requests that got a seat after a less urgent, later one, and why."""

import pytest

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.prediction import LengthBuckets, Prediction
from vllm_semantic_sched.policy.order.inversions import InversionCause, Inversions
from vllm_semantic_sched.policy.profile.formula import load_profile

LEVEL_0 = Prediction((1.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 1.0))
LONG, SHORT = (0.0, 0.0, 1.0), (1.0, 0.0, 0.0)
BUCKETS = LengthBuckets(edges=(20, 100), means=(10.0, 60.0, 300.0))


class Watched(SchedulingCore):
    """A core with the inversions of the order of seats, by request."""

    def __init__(self, level_of=lambda job: job.level, **policy) -> None:
        super().__init__(parse_policy(policy), load_profile("a100-qwen1.5-4b"), BUCKETS)
        self.inverted = {}
        levels = self.policy.levels
        self.watch_order(Inversions(levels, self.inverted.__setitem__, lambda job: None, level_of))


def make_core(**policy) -> Watched:
    return Watched(**policy)


def arrive(core, name: str, urgency=None, unread=False):
    hint = core.read_hints({} if urgency is None else {"urgency": urgency}, 0)
    job = core.arrive(core.draft(name, 50, 500, hint, awaits_prediction=unread), 0.0)
    core.enqueue(job, core.waiting)
    return job


def seat(core, *jobs) -> None:
    """Give jobs seats in this order, each as the next one of the queue."""
    for job in jobs:
        assert core.waiting.peek() is job
        core.take(job, core.waiting)
        core.start(job)


def hinted(core, name: str, level: int, length=LONG, tenant: str = ""):
    """A request that states its level; its length has been read."""
    hint = core.read_hints({"urgency": level}, 0)
    job = core.arrive(core.draft(name, 50, 500, hint, awaits_prediction=True, tenant=tenant), 0.0)
    core.enqueue(job, core.waiting)
    core.predicted(job, Prediction((0.2,) * 5, length))
    return job


def test_order_by_urgency_passes_nobody() -> None:
    core = make_core()
    first = arrive(core, "first", 4)
    seat(core, first)  # the only one so far
    jobs = [arrive(core, str(level), level) for level in (3, 0, 2, 0)]
    seat(core, jobs[1], jobs[3], jobs[2], jobs[0])
    assert not core.inverted


def test_preempted_request_that_resumes_first_passes_nobody() -> None:
    core = make_core()
    victim = arrive(core, "victim", 4)
    seat(core, victim)
    urgent = arrive(core, "urgent", 0)
    core.preempt(victim, core.plan_preemption(victim, victim.computed))
    core.requeue(victim, core.waiting)
    core.waiting.remove(urgent)
    seat(core, victim)
    core.enqueue(urgent, core.waiting)
    seat(core, urgent)
    assert not core.inverted


def test_older_request_that_follows_does_not_hide_a_pass() -> None:
    core = make_core(weighted_levels={"factor": 4})
    older, late = hinted(core, "older", 4), hinted(core, "late", 2)
    later = hinted(core, "later", 3, SHORT)
    seat(core, later)
    core.waiting.remove(late)
    seat(core, older)
    core.requeue(late, core.waiting)
    seat(core, late)
    assert core.inverted == {late: InversionCause.SHORTER}


def test_unread_request_is_passed_until_its_level_is_known() -> None:
    core = make_core()
    unread = arrive(core, "unread", unread=True)
    later = arrive(core, "later", 1)
    seat(core, later)
    core.predicted(unread, LEVEL_0)
    seat(core, unread)
    assert core.inverted == {unread: InversionCause.UNREAD}


def test_prediction_before_the_other_seat_is_no_excuse() -> None:
    core = make_core()
    read = arrive(core, "read", unread=True)
    core.predicted(read, LEVEL_0)
    later = arrive(core, "later", 1)
    core.take(read, core.waiting)  # the engine takes it out and finds that it is not ready
    seat(core, later)
    core.requeue(read, core.waiting)
    seat(core, read)
    assert core.inverted == {read: InversionCause.NOT_READY}


def test_true_level_shows_what_was_misread() -> None:
    true = {"critical": 0, "chatter": 4}
    core = make_core(level_of=lambda job: true[job.request_id])
    critical, chatter = hinted(core, "critical", 3), hinted(core, "chatter", 2)
    seat(core, chatter, critical)
    assert core.inverted == {critical: InversionCause.MISREAD}


@pytest.mark.parametrize("policy", [{"weighted_levels": {"factor": 4}}, {"base": "sjf"}])
def test_short_request_passes_a_long_one(policy) -> None:
    core = make_core(**policy)
    long, short = hinted(core, "long", 2), hinted(core, "short", 3, SHORT)
    seat(core, short, long)
    assert core.inverted == {long: InversionCause.SHORTER}


def test_promotion_passes_a_more_urgent_request() -> None:
    core = make_core()
    slow, hurried = hinted(core, "slow", 3), hinted(core, "hurried", 4)
    hurried.gain().deadline = 2.0
    core.waiting.push(hurried, core.rank(hurried))
    seat(core, hurried, slow)
    assert core.inverted == {slow: InversionCause.PROMOTED}


def test_tenant_at_its_cap_is_passed() -> None:
    core = make_core(tenants={"fair": True, "seats": 0.5})
    core.set_capacity(EngineCapacity(2, None, 16))
    running = hinted(core, "running", 0, tenant="greedy")
    seat(core, running)
    capped = hinted(core, "capped", 0, tenant="greedy")
    other = hinted(core, "other", 4, tenant="other")
    seat(core, other)
    core.finish(running, AnswerEnd.STOPPED)
    seat(core, capped)
    assert core.inverted == {capped: InversionCause.LIMIT}
