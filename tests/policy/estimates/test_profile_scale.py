"""Online correction: it finds the engine's speed despite outliers."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.job import LevelSource
from vllm_semantic_sched.policy.profile.correction import ProfileScale
from vllm_semantic_sched.policy.profile.formula import (
    Batch,
    BatchTerms,
    EngineProfile,
    load_profile,
)

PROFILE = load_profile("a100-qwen1.5-7b")


def steps(rng: random.Random, count: int) -> list[Batch]:
    """Decodes, prefills, both, some with a load."""
    found = []
    for _ in range(count):
        batch = Batch(decodes=rng.randint(0, 8))
        batch.context = 100 * batch.decodes
        if not batch.decodes or rng.random() < 0.3:
            batch.add_prefill(0, rng.randint(16, 512))
        if rng.random() < 0.2:
            batch.add_load(rng.randint(100, 1000))
        found.append(batch)
    return found


factors = st.floats(0.05, 20.0)


@settings(max_examples=40)
@given(factors, factors, factors, st.integers(0, 99))
def test_scales_converge_despite_noise_and_outliers(prefill, decode, load, seed) -> None:
    rng = random.Random(seed)
    truth, scale = PROFILE.scaled(prefill, decode, load), ProfileScale(PROFILE)
    errors = []
    for number, batch in enumerate(steps(rng, 3000)):
        seconds = truth.step(batch) * rng.gauss(1, 0.03)
        scale.observe_step(batch, seconds * (50 if rng.random() < 0.02 else 1))
        if number >= 2500:
            errors.append(abs(scale.profile.step(batch) / truth.step(batch) - 1))
    errors.sort()
    assert errors[len(errors) // 2] < 0.1
    assert scale.decode == pytest.approx(decode, rel=0.2)


@given(st.lists(st.tuples(st.integers(0, 600), st.integers(0, 9), st.floats()), max_size=80))
def test_scales_stay_bounded_for_any_measurement(observed) -> None:
    scale = ProfileScale(PROFILE)
    for tokens, decodes, seconds in observed * 20:
        batch = Batch(decodes=decodes, context=decodes * 10)
        if tokens:
            batch.add_prefill(0, tokens)
        scale.observe_step(batch, seconds)
        scale.observe_copies(scale.profile.load(tokens), seconds)
    for factor in (scale.prefill, scale.decode, scale.load):
        assert 0.0099 < factor < 101 and math.isfinite(factor)


def test_scale_stops_at_its_bound() -> None:
    scale = ProfileScale(PROFILE)
    for _ in range(1000):
        scale.observe_step(Batch(decodes=1, context=10), 1e9)
    assert scale.decode == pytest.approx(100, rel=0.06)
    assert scale.load == 1.0


TINY = load_profile("cpu-2core-tiny")
SEATS = 16


def engine(ratio: float, step: float, prefill: float) -> EngineProfile:
    """An engine whose step takes `step` seconds with one sequence, and `ratio` times as long with
    all seats."""
    slope = step * (ratio - 1) / (SEATS - 1)
    terms = BatchTerms(step=step - slope, per_sequence=slope, per_context_token=step * 1e-4)
    return TINY.model_copy(update={"batch": terms, "alpha2": prefill})


def ratio_of(profile: EngineProfile) -> float:
    one, all_seats = (Batch(decodes=n, context=200 * n) for n in (1, SEATS))
    return profile.step(all_seats) / profile.step(one)


def saturated(rng: random.Random, count: int) -> list[Batch]:
    """A warm-up of single requests, then always full but for a drained queue now and then."""
    found = [Batch(decodes=1, context=20 + at) for at in range(12)]
    while len(found) < count:
        few = len(found) % 700 < 12
        batch = Batch(decodes=rng.choice([1, 2, 3, 6]) if few else SEATS)
        batch.context = batch.decodes * rng.randint(100, 300)
        if rng.random() < 0.15:
            batch.decodes = max(0, batch.decodes - 1)
            batch.add_prefill(0, rng.randint(16, 128))
        found.append(batch)
    return found


@settings(max_examples=12)
@given(
    st.sampled_from([1.2, 1.45, 2.4, 6.0]),
    st.floats(1.0, 6.0),
    st.floats(1e-3, 0.03),
    st.floats(1e-5, 1e-3),
    st.integers(0, 999),
)
def test_measured_steps_are_believed_on_a_full_drifting_engine(
    ratio, believed, step, prefill, seed
) -> None:
    rng = random.Random(seed)
    truth, scale = engine(ratio, step, prefill), ProfileScale(engine(believed, 5e-3, 1e-4))
    wanted = ratio_of(truth)
    errors: dict[int, list[float]] = {}
    seen = {1: 0, SEATS: 0}
    worst = 0.0
    for number, batch in enumerate(saturated(rng, 2000)):
        speed = 2.0 ** math.sin(number / 300)  # half to twice as fast
        expected = speed * truth.step(batch)
        if batch.sequences in seen and not batch.prefills:
            seen[batch.sequences] += 1
        if number > 500:
            error = abs(scale.profile.step(batch) / expected - 1)
            errors.setdefault(batch.sequences, []).append(error)
        outlier = 20 if rng.random() < 0.02 else 1
        scale.observe_step(batch, expected * outlier * rng.lognormvariate(0, 0.08))
        if min(seen.values()) >= 10:
            worst = max(worst, abs(ratio_of(scale.profile) / wanted - 1))
    # Of 120 random draws three were off by more than 15 % at some moment, at most by 19 %.
    assert worst < 0.3
    assert abs(ratio_of(scale.profile) / wanted - 1) < 0.25
    for sequences, found in errors.items():
        if len(found) > 20:
            assert sorted(found)[len(found) // 2] < 0.1, sequences


@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 300), st.floats(1e-4, 10)), max_size=60)
)
def test_steps_grow_with_the_batch_and_no_faster_than_it(observed) -> None:
    scale = ProfileScale(TINY)
    for decodes, context, seconds in observed * 4:
        scale.observe_step(Batch(decodes=decodes, context=context * decodes), seconds)
    steps = scale.profile.batch_terms.steps
    for few, many in itertools.pairwise(steps):
        assert 0 < few <= many <= 2 * few * (1 + 1e-9)
    terms = scale.profile.batch_terms
    times = [terms.sequences(count) for count in range(1, 200)]
    assert times == sorted(times)


def test_sizes_without_a_measurement_lie_between_those_with() -> None:
    truth, scale = engine(2.4, 0.01, 1e-4), ProfileScale(engine(1.0, 0.01, 1e-4))
    for _ in range(20):
        for count in (1, SEATS):
            scale.observe_step(Batch(decodes=count), truth.step(Batch(decodes=count)))
    for count in range(1, SEATS + 1):
        assert scale.profile.step(Batch(decodes=count)) == pytest.approx(
            truth.step(Batch(decodes=count)), rel=0.01
        )


def test_one_interrupted_step_hardly_changes_the_scale() -> None:
    scale = ProfileScale(PROFILE)
    scale.observe_step(Batch(decodes=1, context=10), 1e6)
    assert scale.profile is PROFILE


def test_copies_scale_loads_and_saves_only() -> None:
    scale = ProfileScale(PROFILE)
    for _ in range(300):
        scale.observe_copies(scale.profile.load(500), 3 * PROFILE.load(500))
    assert scale.load == pytest.approx(3, rel=0.1)
    assert scale.prefill == scale.decode == 1.0


def core(**policy) -> SchedulingCore:
    return SchedulingCore(parse_policy({"base": "semantic"} | policy), PROFILE)


def observe(subject: SchedulingCore, factor: float) -> None:
    batch = Batch(decodes=1, context=100)
    batch.add_prefill(0, 100)
    for _ in range(500):
        subject.estimates.observe_step(batch, factor * PROFILE.step(batch))
        subject.estimates.observe_step(Batch(decodes=1), factor * PROFILE.gamma2)


def new_job(subject: SchedulingCore, prompt: int):
    return subject.arrive(
        subject.draft(
            "r",
            prompt_tokens=prompt,
            max_output_tokens=100,
            hint=Hint(1, LevelSource.HINT),
            awaits_prediction=False,
        ),
        0.0,
    )


def test_estimates_follow_the_scale_and_ranks_stay_comparable() -> None:
    subject = core()
    shorter, longer = new_job(subject, 200), new_job(subject, 400)
    before, rank = subject.estimates.remaining(shorter), subject.rank(shorter)
    longer.computed = 300
    plan = subject.plan_preemption(longer)
    observe(subject, 8.0)
    assert subject.estimates.remaining(shorter) == pytest.approx(8 * before, rel=0.15)
    assert subject.plan_preemption(longer).seconds == pytest.approx(8 * plan.seconds, rel=0.2)
    # Ranked late on what turned out a slow engine, the longer job still comes after.
    longer.computed = 0
    assert rank < subject.rank(longer)
    assert subject.rank(shorter).remaining == pytest.approx(rank.remaining, rel=0.15)


def test_shares_and_tenants_are_charged_corrected_times() -> None:
    subject = core(fair_share={"enabled": True})
    charged = subject.seating.fair_share.served
    for factor in (1.0, 8.0):
        if factor > 1:
            observe(subject, factor)
        before, job = charged[1], new_job(subject, 200)
        subject.enqueue(job, subject.waiting)
        subject.take(job, subject.waiting)
        assert charged[1] - before == pytest.approx(factor * PROFILE.prefill(0, 200), rel=0.15)
        subject.start(job)


def test_correction_can_be_switched_off() -> None:
    subject = core(correct_profile=False)
    observe(subject, 8.0)
    assert subject.profile is PROFILE


def test_scale_survives_a_new_policy_but_not_a_new_profile() -> None:
    subject = core()
    observe(subject, 8.0)
    subject.adopt(parse_policy({"base": "sjf"}), load_profile("a100-qwen1.5-7b"))
    assert subject.estimates.scale.decode > 7
    subject.adopt(subject.policy, load_profile("a5000-qwen1.5-7b"))
    assert subject.estimates.scale.decode == 1.0
