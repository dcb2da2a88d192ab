"""Chooses the decoding jobs that sit out the coming step for protected ones (`holds.budget`). For
prefills see `prefills`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.estimates.decision import LevelWorth
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.holds.budget import Protection
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile
from vllm_semantic_sched.policy.snapshot import Snapshot


class Holds(NamedTuple):
    """Decoding jobs that sit out a step."""

    jobs: Sequence[Job] = ()
    beneficiary: Job | None = None  # the most urgent of those for which they do


def choose(
    protection: Protection,
    profile: EngineProfile,
    worth: LevelWorth,
    losing: float,
    snapshot: Snapshot,
    running: Sequence[Job],
    is_ahead: Callable[[Job], bool] | None,
) -> Holds:
    """Choose running jobs to hold for those that are protected, if one of these gets a token in
    this step: else the step could be empty.

    Args:
        losing: worth of a second of all requests, running and waiting.
        running: those that keep their seats, most urgent first.
        is_ahead: whether a decode's reader has text for some time; None: never.
    """
    prefilling, protects_at = snapshot.prefilling, protection.protects_at
    decodes, context, gaining = 0, 0, 0.0  # of the jobs that run in any case
    beneficiary: Job | None = None
    candidates: list[Job] = []
    ahead: list[Job] = []  # of their readers
    for job in running:
        prefills = job in prefilling
        fast_enough = is_ahead is not None and not prefills and is_ahead(job)
        # By its own level first, which no call has to tell: all that run are asked in every step.
        yields = job.level > protects_at and job.effective_level > protects_at
        if yields and not prefills:
            (ahead if fast_enough else candidates).append(job)
            continue
        if not prefills:
            decodes += 1
            context += job.prompt_tokens + job.generated
        if not fast_enough:
            gaining += worth.gained[job.level]
            if (
                beneficiary is None
                and job.level <= protects_at
                and protection.protects(job)
                and snapshot.can_advance(job)
            ):
                beneficiary = job
    candidates += ahead  # first to be held
    if beneficiary is None or not candidates:
        return Holds()
    certain = Batch(decodes=decodes, context=context)
    held = protection.choose(certain, candidates, worth.gained, gaining, losing, profile)
    return Holds(held, beneficiary)
