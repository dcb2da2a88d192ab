"""Chooses the decoding jobs that sit out the coming step for protected ones (`order.protection`).
For prefills see `prefills`."""

from collections.abc import Sequence

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile.formula import Batch
from vllm_semantic_sched.policy.view import EngineView, has_room

# Seconds of text, at a tier's `pace`, that an answer must be ahead of its reader to need no
# protection.
_READING_BUFFER = 2.0


def may_hold(core: SchedulingCore) -> bool:
    """Whether jobs may be held for protected ones. O(levels)."""
    return core.protection.enabled and has_protected(core) and len(core.waiting) > 0


def choose(core: SchedulingCore, view: EngineView) -> tuple[Sequence[Job], Job | None]:
    """Running jobs to hold for those that are protected, if one of these gets a token in this step,
    and the most urgent of these: else the step could be empty."""
    newcomer = core.waiting.peek()  # none where a limit keeps all from starting
    if newcomer is not None and has_room(newcomer, view):
        return [], None
    protection, worth = core.protection, core.seating.worth
    prefilling, now = view.prefilling(), view.now()
    certain, gaining = Batch(), 0.0
    found: Job | None = None
    others: list[Job] = []
    ahead: list[Job] = []  # of their readers
    for job in view.running_by_urgency():
        decodes, protects = job not in prefilling, protection.protects(job)
        fast_enough = decodes and _is_ahead_of_reader(core, job, view, now)
        if decodes and not protects and protection.yields(job):
            (ahead if fast_enough else others).append(job)
            continue
        if decodes:
            certain.add_decode(job.tokens)
        if not fast_enough:
            gaining += worth.gained[job.level]
            if found is None and protects and view.can_advance(job):
                found = job
    others += ahead  # first to be held
    if found is None or not others:
        return [], None
    # Worth of a second of all requests, running and waiting.
    losing = sum(each * _requests(core, level) for level, each in enumerate(worth.lost))
    held = protection.choose(certain, others, worth.gained, gaining, losing, core.profile)
    return held, found


def _is_ahead_of_reader(core: SchedulingCore, job: Job, view: EngineView, now: float) -> bool:
    """Whether the reader of an answer has text for some time, at the pace of its tier."""
    pace = core.policy.all_tiers[job.level].pace
    if pace is None or job.first_token is None:
        return False
    view.observe(job)
    return job.generated > pace * (now - job.first_token + _READING_BUFFER)


def has_protected(core: SchedulingCore) -> bool:
    """Whether a job that others may be held for runs or waits. O(levels)."""
    protected = core.policy.protect.level
    return protected is not None and any(_requests(core, at) for at in range(protected + 1))


def _requests(core: SchedulingCore, level: int) -> int:
    return core.holdings.levels[level].seats + core.lifecycle.waiting(level)
