"""Fits the coefficients of a profile: positive, by relative errors, robust against outliers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls

from vllm_semantic_sched.lab.profiling.live_engine import Step
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile, Residual

# Relative errors beyond this count less: they come from interrupted steps.
_TRUSTED_ERROR = 0.05
# Smallest share of a measured time that a coefficient stands for: all must be positive.
_NEGLIGIBLE = 1e-6


class LineFit(NamedTuple):
    """`start` seconds, and `slope` seconds per token."""

    start: float
    slope: float
    residual: Residual


def fit_nonnegative(features: Any, seconds: Any) -> tuple[Any, Any]:
    """Fit positive coefficients (a column of `features` each) so that the weighted sums approximate
    the positive `seconds` (one per row). Returns them and the relative error of each point."""
    features = np.asarray(features, float)
    # Relative errors: a short step counts as much as a long one.
    rows = features / np.asarray(seconds, float)[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    rows = rows / scale
    start, _ = nnls(rows, np.ones(len(rows)))
    fit = least_squares(
        lambda x: rows @ x - 1,
        np.maximum(start, 2 * _NEGLIGIBLE),
        jac=lambda x: rows,
        bounds=(_NEGLIGIBLE, np.inf),
        loss="soft_l1",
        f_scale=_TRUSTED_ERROR,
    )
    return fit.x / scale, rows @ fit.x - 1


def fit_steps(steps: Sequence[Step]) -> tuple[dict[str, Any], Residual]:
    """The terms of an `EngineProfile` (`alpha1`, `alpha2`, `batch`), all fitted at once, so that no
    term absorbs the time of another."""
    features = []
    for batch in (step.batch for step in steps):
        features.append(
            (
                1,
                batch.sequences,
                batch.prefills,
                batch.context,
                batch.prefill_tokens,
                batch.prefill_squares,
            )
        )
    coefficients, errors = fit_nonnegative(features, [step.seconds for step in steps])
    start, per_sequence, per_prefill, per_context_token, alpha2, alpha1 = map(
        _rounded, coefficients
    )
    terms = BatchTerms(
        step=start,
        per_sequence=per_sequence,
        per_prefill=per_prefill,
        per_context_token=per_context_token,
    )
    return {"alpha1": alpha1, "alpha2": alpha2, "batch": terms}, _residual(errors)


def fit_profile(base: EngineProfile, steps: Sequence[Step]) -> tuple[EngineProfile, float]:
    """A profile whose steps take as long as these in total, with the costs of copies of `base`; and
    how many times longer decode steps took than by the robust fit, which discounts slow steps."""
    profile = base.model_copy(update=fit_steps(steps)[0])
    decoding = [step for step in steps if not step.batch.prefills]
    pace = 1.0
    if decoding:
        expected = sum(profile.step(step.batch) for step in decoding)
        pace = sum(step.seconds for step in decoding) / expected
    profile = profile.scaled(pace, pace, pace)
    prefilling = [step for step in steps if step.batch.prefills]
    expected = sum(profile.step(step.batch) for step in prefilling)
    missing = sum(step.seconds for step in prefilling) - expected
    more = missing / max(1, sum(step.batch.prefills for step in prefilling))
    terms = profile.batch_terms
    terms = terms.model_copy(update={"per_prefill": max(0.0, terms.per_prefill + more)})
    return profile.model_copy(update={"batch": terms}), pace


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Fit seconds as a line over amounts, such as tokens."""
    (start, slope), errors = fit_nonnegative([(1, amount) for amount in amounts], seconds)
    return LineFit(_rounded(start), _rounded(slope), _residual(errors))


def _residual(errors: Any) -> Residual:
    median, p90 = np.percentile(abs(errors), (50, 90))
    return Residual(points=len(errors), median=_rounded(median, 2), p90=_rounded(p90, 2))


def _rounded(value: Any, digits: int = 4) -> float:
    """Round to a number of significant digits."""
    return float(f"{float(value):.{digits - 1}e}")


def reduce_steps(runs: Sequence[Sequence[Step]], statistic: str) -> list[Step]:
    """The median or fastest of each step over runs of the same work, without those runs that have
    other steps than the first."""
    first = [step.batch for step in runs[0]]
    same = [run for run in runs if [step.batch for step in run] == first]
    return [
        Step(batch, reduce_seconds([run[place].seconds for run in same], statistic))
        for place, batch in enumerate(first)
    ]


def merge_decodes(steps: Sequence[Step], statistic: str) -> Step | None:
    """Reduce the steps that decode the full batch, without prefills, to one; None if none do."""
    most = max((step.batch.decodes for step in steps), default=0)
    decodes = [step for step in steps if not step.batch.prefills and step.batch.decodes == most]
    if not decodes:
        return None
    context = round(float(np.mean([step.batch.context for step in decodes])))
    seconds = reduce_seconds([step.seconds for step in decodes], statistic)
    return Step(Batch(decodes=most, context=context), seconds)


def reduce_seconds(seconds: Sequence[float], statistic: str) -> float:
    """`median` or `fastest` of repeats."""
    return float(min(seconds) if statistic == "fastest" else np.median(seconds))
