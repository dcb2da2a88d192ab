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
    ahead: set[Job] = set()  # of their readers
    if is_ahead is not None:
        ahead = {job for job in running if job not in prefilling and is_ahead(job)}
    certain: list[Job] = []  # run in any case
    candidates: list[Job] = []
    for job in running:
        # By its own level first, which no call has to tell: all that run are asked in every step.
        yields = job.level > protects_at and job.effective_level > protects_at
        (candidates if yields and job not in prefilling else certain).append(job)
    gaining = [job for job in certain if job not in ahead] if ahead else certain
    beneficiaries = (
        job
        for job in gaining
        if job.level <= protects_at and protection.protects(job) and snapshot.can_advance(job)
    )
    beneficiary = next(beneficiaries, None)
    if beneficiary is None or not candidates:
        return Holds()
    if ahead:
        candidates.sort(key=ahead.__contains__)  # last, and so first to be held
    decoding = [job for job in certain if job not in prefilling] if prefilling else certain
    batch = Batch(
        decodes=len(decoding),
        context=sum([job.prompt_tokens + job.generated for job in decoding]),
    )
    gained = sum([worth.gained[job.level] for job in gaining])
    held = protection.choose(
        batch, candidates, worth.gained, gaining=gained, losing=losing, profile=profile
    )
    return Holds(held, beneficiary)
