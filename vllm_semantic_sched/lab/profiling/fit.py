"""Fits the coefficients of a profile: positive, by relative errors, robust against outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from vllm_semantic_sched.lab.profiling.live_engine import Step
from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, Residual

# Relative errors beyond this count less: they come from interrupted steps.
_TRUSTED_ERROR = 0.05
# Smallest share of a measured time that a coefficient stands for: all must be positive.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class StepFit:
    """Terms of a step: `alpha1`, `alpha2` of its prefills, `batch` of the rest."""

    alpha1: float
    alpha2: float
    batch: BatchTerms
    residual: Residual


@dataclass(frozen=True)
class LineFit:
    """`start` seconds, and `slope` seconds per token."""

    start: float
    slope: float
    residual: Residual


def fit_nonnegative(features: Any, seconds: Any) -> tuple[Any, Any]:
    """Fit coefficients so that the weighted sums of the features approximate the seconds.

    Args:
        features: one row per point, one column per coefficient.
        seconds: one positive number per point.

    Returns:
        The coefficients, all positive, and the relative error of each point.
    """
    features = np.asarray(features, float)
    # Relative errors: a short step counts as much as a long one.
    rows = features / np.asarray(seconds, float)[:, None]
    scale = np.maximum(np.abs(rows).max(axis=0), np.finfo(float).tiny)
    rows = rows / scale
    start, _ = nnls(rows, np.ones(len(rows)))
    found = least_squares(
        lambda x: rows @ x - 1,
        np.maximum(start, 2 * _NEGLIGIBLE),
        jac=lambda x: rows,
        bounds=(_NEGLIGIBLE, np.inf),
        loss="soft_l1",
        f_scale=_TRUSTED_ERROR,
    )
    return found.x / scale, rows @ found.x - 1


def fit_steps(steps: Sequence[Step]) -> StepFit:
    """Fit all terms of a step at once, so that no term absorbs the time of another."""
    batches = [step.batch for step in steps]
    features = [
        (1, one.sequences, one.prefills, one.context, one.prefill_tokens, one.prefill_squares)
        for one in batches
    ]
    (constant, per_sequence, per_prefill, per_context_token, alpha2, alpha1), errors = (
        fit_nonnegative(features, [step.seconds for step in steps])
    )
    terms = BatchTerms(
        step=rounded(constant),
        per_sequence=rounded(per_sequence),
        per_prefill=rounded(per_prefill),
        per_context_token=rounded(per_context_token),
    )
    return StepFit(rounded(alpha1), rounded(alpha2), terms, residual(errors))


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> LineFit:
    """Fit a constant and a slope."""
    (start, slope), errors = fit_nonnegative([(1, amount) for amount in amounts], seconds)
    return LineFit(rounded(start), rounded(slope), residual(errors))


def residual(errors: Any) -> Residual:
    """Median and 90th percentile of the absolute relative errors."""
    sizes = np.abs(np.asarray(errors, float))
    return Residual(
        points=len(sizes),
        median=rounded(np.median(sizes), 2),
        p90=rounded(np.percentile(sizes, 90), 2),
    )


def rounded(value: Any, digits: int = 4) -> float:
    """Round to a number of significant digits."""
    return float(f"{float(value):.{digits - 1}e}")


def reduce_steps(runs: Sequence[Sequence[Step]], statistic: str) -> list[Step]:
    """Reduce several runs of the same work to one: the median or fastest of each step. Runs with
    other steps than the first are left out."""
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
