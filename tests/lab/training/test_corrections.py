"""Refits to corrections, and the bound on missed emergencies."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from predictor_examples import corrections as stream
from scipy.stats import binom

from vllm_semantic_sched.lab.training.corrections import (
    LEAST,
    figures,
    missed_emergencies,
    refit,
    upper_bound,
)
from vllm_semantic_sched.policy.estimates.decision import decide_level
from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.predict.corrections import Correction

DECISION = Decision(bounds=(0.2, 0.25, 0.5, 0.5))


def test_refit_repairs_a_model_that_reads_everything_as_too_calm() -> None:
    found = refit(stream(400, seed=1, shift=1.2), DECISION)
    assert found.better and found.after[0] > found.before[0]
    assert found.after[1] >= found.before[1]
    fresh = stream(1000, seed=2, shift=1.2)
    truth = [one.corrected for one in fresh]
    before = figures(truth, [decide_level(one.probabilities, DECISION) for one in fresh])
    after = figures(truth, [decide_level(one.probabilities, found.decision) for one in fresh])
    assert after[0] > before[0] and after[1] >= before[1]


def test_refit_that_only_follows_noise_is_not_better() -> None:
    rng = random.Random(3)
    noise = [one._replace(corrected=rng.randrange(5)) for one in stream(200, 4, 0.5)]
    assert not refit(noise, DECISION).better


def test_few_corrections_move_the_bounds_little() -> None:
    def distance(count: int) -> float:
        fitted = refit(stream(count, 5, 1.2), DECISION).decision.bounds
        return sum(abs(new - old) for new, old in zip(fitted, DECISION.bounds, strict=True))

    assert distance(LEAST) < distance(1000)
    with pytest.raises(ValueError, match="needs at least"):
        refit(stream(LEAST - 1, 5, 1.2), DECISION)


@given(st.integers(0, 40), st.integers(1, 40))
def test_bound_is_the_share_at_which_so_few_hits_are_rare(hits: int, more: int) -> None:
    bound = upper_bound(hits, hits + more)
    assert binom.cdf(hits, hits + more, bound) == pytest.approx(0.05)


def test_only_requests_drawn_at_random_bound_what_is_missed() -> None:
    row = (0.2,) * 5
    sampled = [Correction(0.0, row, level, 0, True) for level in (0, 1, 1, 2)]
    calm = [Correction(0.0, row, 4, 4, True)] * 96
    noticed = [Correction(0.0, row, 4, 0)] * 50
    missed = missed_emergencies([*sampled, *calm, *noticed])
    assert missed[:3] == (100, 4, 1)
    assert missed.of_emergencies == upper_bound(1, 4)
    assert 0.04 < missed.of_requests < 0.05
    assert missed_emergencies(noticed).of_requests == 1.0  # nothing is known
