"""Who is held beside protected jobs, and for how long at most."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.config.order import Protect
from vllm_semantic_sched.policy.facts.profile import BatchTerms, EngineProfile
from vllm_semantic_sched.policy.order.protection import Protection

PROFILE = EngineProfile(
    hardware="",
    model="",
    source="",
    alpha1=0.0,
    alpha2=0.001,
    beta_load=1e-6,
    beta_save=1e-6,
    gamma1=0.0,
    gamma2=0.009,
    batch=BatchTerms(step=0.009, per_sequence=0.001),
)


def decoding(name: str, level: int):
    job = make_job(level, request_id=name, prompt_tokens=10)
    job.computed = 10
    return job


def held(slowdown: float, urgent: int, others: int, prefilling=(), newcomer=None):
    protection = Protection(Protect(level=0, slowdown=slowdown))
    running = [decoding(f"o{n}", 3) for n in range(others)]
    protected = [decoding(f"u{n}", 0) for n in range(urgent)]
    jobs, tokens = protection.share_step(
        protected, [*running, *prefilling], prefilling, newcomer, PROFILE, 5
    )
    return [job.request_id for job in jobs], tokens


@pytest.mark.parametrize(("slowdown", "beside"), [(1.0, 0), (1.3, 2), (1.42, 3), (9.0, 6)])
def test_as_many_run_beside_as_the_step_allows(slowdown, beside) -> None:
    """A step takes 10 ms with the protected job alone, and 1 ms more for each other; a quarter of
    what is allowed beyond that is kept for prefills."""
    jobs, _ = held(slowdown, urgent=1, others=6)
    assert jobs == [f"o{n}" for n in range(beside, 6)]


def test_protected_jobs_share_one_allowance() -> None:
    assert len(held(1.3, urgent=1, others=6)[0]) == 4
    assert len(held(1.36, urgent=3, others=6)[0]) == 3  # 0.75 x 0.36 x 12 ms


def test_prefills_get_what_is_left_or_wait_until_it_suffices() -> None:
    prompt = make_job(3, request_id="prompt", prompt_tokens=100)
    assert held(1.55, urgent=1, others=0, prefilling=[prompt]) == ([], 5)
    assert held(1.45, urgent=1, others=0, prefilling=[prompt]) == (["prompt"], 0)
    protection = Protection(Protect(level=0, slowdown=1.2))
    steps = [
        protection.share_step([decoding("u", 0)], [prompt], [prompt], None, PROFILE, 5)
        for _ in range(6)
    ]
    assert [tokens for _, tokens in steps] == [0, 0, 5, 0, 0, 5]  # 2 ms more each step


def test_nobody_is_admitted_beside_a_prefill_that_is_protected() -> None:
    newcomer = make_job(0, request_id="urgent", prompt_tokens=100)
    jobs, tokens = held(9.0, urgent=0, others=2, newcomer=newcomer)
    assert jobs == [] and tokens == 0


def test_only_the_own_level_protects_and_age_keeps_from_being_held() -> None:
    protection = Protection(Protect(level=1))
    aged = make_job(3, request_id="aged")
    aged.aged = 2.0
    assert not protection.protects(aged) and not protection.yields(aged)
    assert protection.protects(make_job(1, request_id="urgent"))
    protection.closed = True
    assert protection.admits(aged) and not protection.admits(make_job(2, request_id="other"))


@pytest.mark.parametrize("knobs", [Protect(), Protect(level=0, share=0.0)])
def test_off_without_a_level_or_a_share(knobs) -> None:
    assert not Protection(knobs).enabled


def test_a_step_without_tokens_is_followed_by_one_without_holds() -> None:
    protection = Protection(Protect(level=0))
    assert protection.begin_step(0.0)
    protection.held[make_job(3, request_id="held")] = 0.0
    protection.achieved_nothing()
    assert not protection.begin_step(0.001)
    assert protection.begin_step(0.002)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.001, 0.3), st.booleans()), min_size=1, max_size=100),
    st.floats(0.05, 3.0),
    st.floats(0.05, 0.95),
)
def test_held_time_in_any_window_is_bounded(steps, longest, share) -> None:
    protection = Protection(Protect(level=0, longest_hold=longest, share=share))
    job = make_job(3, request_id="held")
    now, times, spent = 0.0, [0.0], [0.0]  # when steps begin, seconds held until then
    for seconds, urgent in steps:
        may = protection.begin_step(now)
        protection.held.clear()
        if urgent and may:
            protection.held[job] = now
        now += seconds
        times.append(now)
        spent.append(spent[-1] + (seconds if urgent and may else 0.0))
    slack = max(seconds for seconds, _ in steps)
    for first in range(len(times)):
        for last in range(first + 1, len(times)):
            bound = longest + share * (times[last] - times[first]) + slack
            assert spent[last] - spent[first] <= bound + 1e-9
