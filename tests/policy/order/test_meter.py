"""Reported KV and charged time of running jobs."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job, policy_ref, seated

from vllm_semantic_sched.policy.facts.capacity import AHEAD, Allocations
from vllm_semantic_sched.policy.order.meter import UsageMeter
from vllm_semantic_sched.policy.order.queues import OrderingRules
from vllm_semantic_sched.policy.profile.formula import load_profile

PROFILE = load_profile("default")


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 300)), min_size=1, max_size=6),
    st.integers(1, 3),
)
def test_reported_kv_covers_actual_kv_and_charges_add_up(lives, per_step) -> None:
    charged: dict = {}
    reported: dict = {}
    allocations = Allocations(5)
    allocations.occupy = reported.__setitem__
    meter = UsageMeter(
        lambda: PROFILE,
        lambda job, seconds: charged.__setitem__(job, charged.get(job, 0.0) + seconds),
        allocations,
    )
    meter.tokens_per_step = per_step
    jobs = [(make_job(computed=100), start, length) for start, length in lives]
    for step in range(400):
        meter.step(lambda job: None)
        for job, start, length in jobs:
            if step == start:
                meter.start(seated(job))
            elif step > start and job in reported:
                job.generated += per_step
                job.computed = job.tokens - 1
                assert job.tokens <= reported[job] <= job.tokens + AHEAD + per_step
                if job.generated >= length:
                    meter.stop(job)
                    del reported[job]
    for job, _, _ in jobs:
        assert job not in reported
        least = PROFILE.gamma1 * job.prompt_tokens * job.generated
        most = (PROFILE.gamma1 * job.tokens + PROFILE.gamma2) * (job.generated + 1)
        assert least - 1e-9 <= charged[job] <= most


def test_running_jobs_share_the_time_of_a_step() -> None:
    charged = {}
    meter = UsageMeter(lambda: PROFILE, charged.__setitem__, Allocations(5))
    first, second = make_job(computed=100), make_job(computed=100)
    meter.start(seated(first))
    meter.start(seated(second))
    first.generated = second.generated = 10
    meter.stop(first)
    meter.stop(second)
    alone, shared = (PROFILE.batch_terms.sequences(count) / count for count in (1, 2))
    assert charged[second] - charged[first] == pytest.approx(10 * (alone - shared))


def test_interrupted_prefill_is_charged_in_part() -> None:
    seconds: list[float] = []
    meter = UsageMeter(lambda: PROFILE, lambda job, cost: seconds.append(cost), Allocations(5))
    job = make_job(prompt_tokens=1000)
    meter.start(seated(job))
    job.computed = 400
    meter.stop(job)
    assert sum(seconds) == pytest.approx(-PROFILE.prefill(400, 1000))


def test_charges_follow_the_correction_and_refunds_the_charge() -> None:
    charged: list[float] = []
    estimates = SimpleNamespace(profile=PROFILE, tokens=None)
    rules = OrderingRules(policy_ref(), estimates)
    meter = UsageMeter(
        lambda: estimates.profile, lambda job, cost: charged.append(cost), Allocations(5)
    )
    job = make_job(prompt_tokens=1000)
    before = rules.admission_seconds(job)
    meter.start(seated(job))
    estimates.profile = PROFILE.scaled(3.0, 2.0, 1.0)
    assert rules.admission_seconds(job) == pytest.approx(3 * before)
    meter.stop(job)  # nothing was computed: exactly the charge is returned
    assert sum(charged) == pytest.approx(-before)
    job = make_job(computed=100)
    charged.clear()
    meter.start(seated(job))
    job.generated = 10
    meter.stop(job)
    before, after = (
        each.gamma1 * job.tokens + each.batch_terms.sequences(1)
        for each in (PROFILE, estimates.profile)
    )
    assert sum(charged) == pytest.approx(10 * after)
    assert after == pytest.approx(2 * before)
