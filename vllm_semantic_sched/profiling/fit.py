"""Fits a profile's coefficients to measured times: non-negative, robust, by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from vllm_semantic_sched.policy.facts.profile import Batch, BatchTerms, Residual
from vllm_semantic_sched.profiling.live_engine import Step

# A relative error of this size counts in full, larger ones less and less: an interrupted step is
# off by far more.
_TRUSTED_ERROR = 0.05
# Some coefficients must be positive; this much of a measured time is nothing.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class StepFit:
    """Terms of a step: `alpha1`, `alpha2` of its prefills, `batch` of everything else."""

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
    """Coefficients whose weighted sum of features is nearest to the seconds.

    Args:
        features: one row per point, one column per coefficient.
        seconds: one positive number per point.

    Returns:
        The coefficients, all above zero, and the relative error of each point.
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
    """Fit all terms of a step at once, so that none explains what is another's."""
    features = [
        (
            1,
            step.batch.sequences,
            step.batch.prefills,
            step.batch.context,
            step.batch.prefill_tokens,
            step.batch.prefill_squares,
        )
        for step in steps
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
    """Sum up relative errors."""
    sizes = np.abs(np.asarray(errors, float))
    return Residual(
        points=len(sizes),
        median=rounded(np.median(sizes), 2),
        p90=rounded(np.percentile(sizes, 90), 2),
    )


def rounded(value: Any, digits: int = 4) -> float:
    """A number of so many significant digits."""
    return float(f"{float(value):.{digits - 1}e}")


def reduce_steps(runs: Sequence[Sequence[Step]], statistic: str) -> list[Step]:
    """One run for several of the same work: the median of each step, or its fastest.

    Runs that were cut into steps differently from the first are left out.
    """
    first = [step.batch for step in runs[0]]
    alike = [run for run in runs if [step.batch for step in run] == first]
    return [
        Step(batch, reduce_seconds([run[place].seconds for run in alike], statistic))
        for place, batch in enumerate(first)
    ]


def merge_decodes(steps: Sequence[Step], statistic: str) -> Step | None:
    """One step for all that decode the full batch and prefill nothing; None if there is none."""
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
