"""The cost model: formulas of the paper, with eq. 3 corrected."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.policy.config.section import PolicyError, parse_section
from vllm_semantic_sched.policy.estimates.estimator import remaining_seconds
from vllm_semantic_sched.policy.profile.cost import drop_seconds
from vllm_semantic_sched.policy.profile.formula import EngineProfile, load_profile

PROFILE = load_profile("a5000-qwen1.5-7b")
lengths = st.integers(0, 4000)


@given(lengths, lengths, lengths)
def test_prefill_in_parts_costs_as_much_as_in_one(a, b, c) -> None:
    start, middle, end = sorted((a, b, c))
    parts = PROFILE.prefill(start, middle) + PROFILE.prefill(middle, end)
    assert math.isclose(parts, PROFILE.prefill(start, end), abs_tol=1e-9)


@given(st.integers(1, 2000), st.integers(1, 300))
def test_decode_is_the_sum_of_its_steps(context, tokens) -> None:
    """Equation 4: the sum over i = n + 1 ... n + m of gamma1 i + gamma2."""
    steps = sum(PROFILE.gamma1 * (context + i) + PROFILE.gamma2 for i in range(1, tokens + 1))
    assert math.isclose(PROFILE.decode(context, tokens), steps, rel_tol=1e-9)


def test_remaining_time_by_stage() -> None:
    waiting = make_job(prompt_tokens=200)
    decode = PROFILE.decode(200, 50)
    assert remaining_seconds(waiting, 50, PROFILE) == PROFILE.prefill(0, 200) + decode
    decoding = make_job(prompt_tokens=200, computed=209, generated=10)
    assert remaining_seconds(decoding, 50, PROFILE) == PROFILE.decode(210, 40)
    preempted = make_job(prompt_tokens=200, generated=10)
    rest = PROFILE.prefill(0, 210) + PROFILE.decode(210, 40)
    assert remaining_seconds(preempted, 50, PROFILE) == rest
    swapped = make_job(prompt_tokens=200, generated=10, swapped=209)
    rest = PROFILE.load(209) + PROFILE.decode(210, 40)
    assert remaining_seconds(swapped, 50, PROFILE) == rest


def test_cost_of_a_drop_is_the_lost_decoding_and_a_whole_retry() -> None:
    job = make_job(prompt_tokens=200, computed=209, generated=10)
    retry = PROFILE.prefill(0, 200) + PROFILE.decode(200, 50)
    assert drop_seconds(job, 50, PROFILE) == PROFILE.decode(200, 10) + retry


def test_profile_is_validated_like_a_policy() -> None:
    good = PROFILE.model_dump()
    for bad, word in ((good | {"gama1": 1}, "'gamma1'"), (good | {"gamma2": 0}, "gamma2")):
        with pytest.raises(PolicyError, match=word):
            parse_section(EngineProfile, bad, "profile")
