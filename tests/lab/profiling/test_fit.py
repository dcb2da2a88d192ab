"""Fits recover known coefficients from noisy times with outliers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.lab.profiling.fit import (
    fit_line,
    fit_nonnegative,
    fit_steps,
    merge_decodes,
    reduce_steps,
)
from vllm_semantic_sched.lab.profiling.live_engine import Step
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, load_profile

PROFILE = load_profile("cpu-2core-small")

factors = st.floats(0.1, 10.0)


def prefill(start: int, end: int) -> Batch:
    batch = Batch()
    batch.add_prefill(start, end)
    return batch


def batches() -> list[Batch]:
    found = [prefill(0, 16 * 2**n) for n in range(8)]
    found += [prefill(2048 * n, 2048 * (n + 1)) for n in range(4)]
    for sequences in (1, 4, 16, 64):
        for context in (32, 128, 512, 2048, 8192):
            found.append(Batch(decodes=sequences, context=sequences * context))
    return found


@settings(max_examples=40)
@given(factors, factors, factors, factors, factors, factors, st.integers(0, 99))
def test_step_fit_withstands_noise_and_outliers(
    step, sequence, prefills, context, linear, square, seed
) -> None:
    random = np.random.default_rng(seed)
    terms = BatchTerms(
        step=5e-3 * step,
        per_sequence=4e-4 * sequence,
        per_prefill=4e-4 * prefills,
        per_context_token=1e-6 * context,
    )
    true = PROFILE.model_copy(
        update={"alpha1": 4e-8 * square, "alpha2": 2e-4 * linear, "batch": terms}
    )

    def measured(batch: Batch) -> Step:
        # Every eighth step was interrupted.
        slower = random.uniform(2, 10) if random.random() < 0.125 else 1
        return Step(batch, true.step(batch) * random.normal(1, 0.02) * slower)

    # As many repeats as `semsched profile` makes: a single point that is interrupted every time
    # looks like a slow one.
    runs = [[measured(batch) for batch in batches()] for _ in range(5)]
    found, residual = fit_steps(reduce_steps(runs, "median"))
    fitted = true.model_copy(update=found)
    coefficients = fitted.batch.model_dump(exclude={"steps"}).values()
    assert min(*coefficients, fitted.alpha1) >= 0
    # Coefficients that stand for nearly the same cannot be separated; step times can be found.
    for batch in batches():
        assert fitted.step(batch) == pytest.approx(true.step(batch), rel=0.2)
    last = prefill(6144, 8192)
    if true.alpha1 * last.prefill_squares > true.alpha2 * last.prefill_tokens:
        assert fitted.alpha1 == pytest.approx(true.alpha1, rel=0.25)
    assert residual.median < 0.1


@given(st.floats(1e-5, 1e-3), st.floats(1e-7, 1e-5), st.integers(0, 99))
def test_line_fit_withstands_outliers(start, slope, seed) -> None:
    random = np.random.default_rng(seed)
    tokens = [32 * 2**n for n in range(9)] * 3
    seconds = [(start + slope * count) * random.normal(1, 0.02) for count in tokens]
    for place in random.choice(len(tokens), 3, replace=False):
        seconds[place] *= 20
    fit = fit_line(tokens, seconds)
    for count in (32, 512, 8192):
        assert fit.start + fit.slope * count == pytest.approx(start + slope * count, rel=0.1)


def test_coefficients_are_never_negative() -> None:
    # Falling times: a free fit has a negative slope.
    coefficients, _ = fit_nonnegative([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0])
    assert (coefficients > 0).all()
    assert coefficients[1] < 1e-3


def test_repeats_are_reduced_step_by_step() -> None:
    runs = [[Step(prefill(0, 8), seconds), Step(prefill(8, 9), 1.0)] for seconds in (1.0, 9.0, 2.0)]
    other = [Step(prefill(0, 9), 0.1)]  # split into other steps
    assert [step.seconds for step in reduce_steps([*runs, other], "median")] == [2.0, 1.0]
    assert [step.seconds for step in reduce_steps([*runs, other], "fastest")] == [1.0, 1.0]


def test_only_steps_of_the_full_decode_batch_are_merged() -> None:
    mixed = Batch(decodes=2, context=20)
    mixed.add_prefill(0, 5)
    steps = [Step(mixed, 5.0), Step(Batch(decodes=1, context=9), 0.1)]
    steps += [Step(Batch(decodes=2, context=20 + n), 1.0 + n) for n in range(3)]
    assert merge_decodes(steps, "median") == Step(Batch(decodes=2, context=21), 2.0)
    assert merge_decodes([Step(prefill(0, 5), 1.0)], "median") is None
