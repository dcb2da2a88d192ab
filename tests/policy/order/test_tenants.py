"""Tenants: virtual counters, and the cap at the top levels."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, make_rules, policy_ref, step

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.config.order import Tenants, TopLevelCap
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.capacity import AHEAD, EngineCapacity
from vllm_semantic_sched.policy.facts.job import Rank
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.order.queues import LevelQueue
from vllm_semantic_sched.policy.order.tenants import TopLevelGuard, VirtualCounters
from vllm_semantic_sched.policy.profile.formula import load_profile


def test_returning_tenant_gets_no_credit_for_its_absence() -> None:
    counters = VirtualCounters()
    for tenant in "ab":
        counters.enter(tenant)
    counters.charge("a", 50.0)
    counters.charge("b", 60.0)
    counters.enter("new")
    assert counters["new"] == 50.0
    for tenant in ("new", "a", "b"):
        counters.leave(tenant)
    counters.enter("later")
    assert counters["later"] == 60.0  # that of the last that waited
    counters.enter("a")
    assert counters["a"] == 60.0


def test_only_absent_tenants_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr("vllm_semantic_sched.policy.order.tenants._MOST_TENANTS", 3)
    counters = VirtualCounters()
    counters.enter("waiting")
    counters.charge("waiting", 1.0)
    for number in range(50):
        counters.enter(str(number))
        counters.charge(str(number), 1.0)
        counters.leave(str(number))
    assert sum(counters[str(number)] > 0 for number in range(50)) <= 4
    assert counters["waiting"] == 1.0
    counters.charge("0", 1.0)  # forgotten: no effect, no error
    assert counters["0"] == 0.0
    assert next(counters.ordered())[1] == "waiting"


steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "buffer", "remove", "take"]),
        st.sampled_from("abc"),
        st.integers(0, 20),
    ),
    max_size=80,
)


@given(steps)
def test_level_queue_serves_the_least_served_tenant_by_rank(steps) -> None:
    lane = LevelQueue(make_rules(tenants={"fair": True}))
    model: dict = {}
    counters: dict[str, float] = {}
    left_last = 0.0
    for kind, tenant, pick in steps:
        waiting = {job.tenant for job in model}
        if kind in ("push", "buffer"):
            job = make_job(2, tenant=tenant)
            if tenant not in waiting:
                floor = min((counters[t] for t in waiting), default=left_last)
                counters[tenant] = max(counters.get(tenant, floor), floor)
            remaining = float("inf") if kind == "buffer" else float(pick)
            model[job] = Rank(2, remaining, job.sequence)
            lane.push(job, model[job]) if kind == "push" else lane.buffer(job)
            continue
        if not model:
            continue
        if kind == "take":
            rank, job = lane.peek()
            least = min(counters[t] for t in waiting)
            assert counters[job.tenant] == least
            assert rank == min(r for j, r in model.items() if j.tenant == job.tenant)
            assert next(lane.ordered()) == (rank, job)
            lane.counters.charge(job.tenant, float(pick))
            counters[job.tenant] += pick
        else:
            job = list(model)[pick % len(model)]
        lane.remove(job)
        del model[job]
        if all(other.tenant != job.tenant for other in model):
            left_last = counters[job.tenant]
        ordered = list(lane.ordered())
        assert sorted(ordered) == sorted((rank, job) for job, rank in model.items())
    assert bool(lane) == bool(model)


def test_share_of_top_level_requests_is_capped_per_window() -> None:
    guard = TopLevelGuard(policy_ref(tenants=Tenants(top=TopLevelCap(share=0.5))))
    levels = [guard.level("a", 0, 4, now=0.0) for _ in range(12)]
    assert levels == [0] * 5 + [1] * 6 + [0]  # the sixth of twelve is half of them
    assert guard.count == 6
    assert guard.level("b", 0, 4, now=0.0) == 0
    assert guard.level("a", 3, 4, now=0.0) == 3
    assert [guard.level("a", 0, 4, now=200.0) for _ in range(6)] == [0] * 5 + [1]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=200))
def test_no_tenant_exceeds_its_cap_on_top_levels(requests) -> None:
    guard = TopLevelGuard(policy_ref(tenants=Tenants(top=TopLevelCap(share=0.2))))
    now, top = 0.0, 0
    for count, (level, pause) in enumerate(requests, start=1):
        now = min(now + pause, 52.0)  # one window
        given_level = guard.level("a", level, 4, now)
        top += given_level < 1
        assert given_level == level or (level < 1 and given_level == 1)
        assert top <= max(5, 0.2 * count)


def test_capped_request_stays_down_and_counts_once() -> None:
    cap = {"share": 0.01}
    core = SchedulingCore(parse_policy({"tenants": {"top": cap}}), load_profile("default"))

    def arrive(name, urgency):
        hint = core.read_hints({} if urgency is None else {"urgency": urgency}, 0)
        job = core.arrive(core.draft(name, 50, 500, hint, urgency is None, tenant="acme"), 0.0)
        core.enqueue(job, core.waiting)
        return job

    assert all(arrive(f"a{number}", 0).level == 0 for number in range(5))
    assert arrive("b", 0).level == 1
    unread = arrive("c", None)
    core.predicted(unread, Prediction((1.0, 0.0, 0.0, 0.0, 0.0)))
    assert unread.level == 1 and core.seating.top_levels.count == 2
    core.switch(core.policy, core.profile)
    while core.outdated:
        step(core, lambda job: None, 0.0)
    assert unread.level == 1


@given(
    share=st.floats(0.1, 1.0),
    seats=st.integers(1, 12),
    arrivals=st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60),
)
def test_tenants_at_their_seat_cap_are_passed_by_others(share, seats, arrivals) -> None:
    tenants = {"fair": True, "seats": share}
    core = SchedulingCore(parse_policy({"tenants": tenants}), load_profile("default"))
    core.set_capacity(EngineCapacity(seats, None))
    bound = seats if share == 1.0 else max(1, int(share * seats))
    running, waiting = [], []
    for tenant, ends in arrivals:
        job = make_job(tenant=tenant)
        core.enqueue(job, core.waiting)
        waiting.append(job)
        if ends and running:
            core.finish(running.pop(0), AnswerEnd.STOPPED)
        while len(running) < seats and (chosen := core.waiting.peek()) is not None:
            core.take(chosen, core.waiting)
            core.start(chosen)
            waiting.remove(chosen)
            running.append(chosen)
        held = Counter(one.tenant for one in running)
        assert all(count <= bound for count in held.values())
        if len(running) < seats:
            assert all(held[one.tenant] == bound for one in waiting)


@given(
    share=st.floats(0.2, 1.0),
    actions=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 400), st.booleans()), max_size=40
    ),
)
def test_kv_cap_of_a_tenant_holds_for_growing_requests(share, actions) -> None:
    core = SchedulingCore(
        parse_policy({"tenants": {"fair": True, "kv": share}}), load_profile("default")
    )
    capacity = EngineCapacity(seats=8, blocks=100, block_size=16)
    core.set_capacity(capacity)

    def blocks(job) -> int:
        return capacity.blocks_for(job.tokens + AHEAD)

    def observe(job) -> None:
        job.generated = grown.get(job, 0)

    running, grown = [], {}
    for tenant, tokens, ends in actions:
        job = make_job(tenant=tenant, prompt_tokens=tokens)
        core.enqueue(job, core.waiting)
        if ends and running:
            core.finish(running.pop(0), AnswerEnd.STOPPED)
        while len(running) < 8 and (chosen := core.waiting.peek()) is not None:
            core.take(chosen, core.waiting)
            core.start(chosen)
            running.append(chosen)
        for one in running:
            grown[one] = grown.get(one, 0) + 100
        for _ in range(100):
            step(core, observe, 0.0)
        while (found := core.eviction.over_quota_job()) is not None:
            victim, reason = found
            assert reason == "tenant_cap"
            assert sum(one.tenant == victim.tenant for one in running) > 1
            core.preempt(victim, core.plan_preemption(victim, victim.computed), "tenant_cap")
            core.requeue(victim, core.waiting)
            running.remove(victim)
        for name in "abc":
            held = [blocks(one) for one in running if one.tenant == name]
            assert len(held) <= 1 or share == 1.0 or sum(held) <= share * 100


@pytest.mark.parametrize("cap", ["seats", "kv"])
def test_tenant_caps_need_fairness(cap) -> None:
    with pytest.raises(PolicyError, match=rf"tenants\.{cap}.*tenants\.fair"):
        parse_policy({"tenants": {cap: 0.5}})
