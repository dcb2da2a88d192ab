"""Chooses the running jobs that sit out the coming step: decodes for protected jobs
(`order.protection`), prefills by the paper's gate or so that a newcomer can start."""

import math
from collections.abc import Collection, Sequence

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile.formula import Batch
from vllm_semantic_sched.policy.view import NO_LIMITS, EngineView, StageLimits, has_room

# Seconds of text, at a tier's `pace`, that an answer must be ahead of its reader to need no
# protection.
_READING_BUFFER = 2.0


def may_hold(core: SchedulingCore) -> bool:
    """Whether jobs may be held for protected ones. O(levels)."""
    return core.protection.enabled and _has_protected(core) and len(core.waiting) > 0


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


def prefills_protected(core: SchedulingCore, view: EngineView) -> bool:
    """Whether the coming step is to prefill a protected job, running or next."""
    if not _has_protected(core):
        return False
    newcomer = core.waiting.peek()
    jobs = view.prefilling() if newcomer is None else (newcomer, *view.prefilling())
    return any(map(core.protection.protects, jobs))


def _is_ahead_of_reader(core: SchedulingCore, job: Job, view: EngineView, now: float) -> bool:
    """Whether the reader of an answer has text for some time, at the pace of its tier."""
    pace = core.policy.all_tiers[job.level].pace
    if pace is None or job.first_token is None:
        return False
    view.observe(job)
    return job.generated > pace * (now - job.first_token + _READING_BUFFER)


def _has_protected(core: SchedulingCore) -> bool:
    """Whether a job that others may be held for runs or waits. O(levels)."""
    protected = core.policy.protect.level
    return protected is not None and any(_requests(core, at) for at in range(protected + 1))


def _requests(core: SchedulingCore, level: int) -> int:
    return core.holdings.levels[level].seats + core.lifecycle.waiting(level)


def stage_limits(core: SchedulingCore, view: EngineView) -> StageLimits:
    """Which prefills are held in the coming step, for a newcomer or by the gate."""
    prefilling, newcomer = view.prefilling(), core.waiting.peek()
    no_prefill = newcomer is None and not prefilling
    if no_prefill or not len(core.running) or not core.policy.uses_urgency:
        return NO_LIMITS
    levels = [job.effective_level for job in prefilling]
    held: list[Job] = []
    if newcomer is not None:
        levels.append(newcomer.effective_level)
        budget = view.token_budget() - view.decode_tokens()
        if prefilling and budget < math.inf:
            held = prefills_that_yield(newcomer, prefilling, int(budget))
        # If it cannot start anyway, holding them would only waste the step.
        if held and not (view.is_ready(newcomer) and has_room(newcomer, view)):
            held = []
    best = view.most_urgent_decode()
    decoding = None if best is None else best.effective_level
    if gates_prefills(decoding, min(levels), core.policy.stage):
        return StageLimits(tuple(prefilling), gated=True)
    return StageLimits(tuple(held)) if held else NO_LIMITS


def gates_prefills(decoding_level: float | None, prefill_level: float, stage: Stage) -> bool:
    """Whether this step has no prefills (paper, Alg. 2): the most urgent decoding job is protected
    and all prefills are less urgent. The levels are the effective ones of the most urgent decoding
    job, None without one, and of the most urgent waiting or prefilling one."""
    if stage.mode == "off" or decoding_level is None:
        return False
    return decoding_level <= stage.protected_level and prefill_level > decoding_level


def prefills_that_yield(newcomer: Job, prefilling: Collection[Job], token_budget: int) -> list[Job]:
    """Running prefills that must pause for a step so that the next waiting job, more urgent, can
    start. vLLM serves running requests first, and a long prompt can take many whole steps.
    `token_budget`: prefill tokens in the step."""
    wanted = newcomer.tokens + sum(job.tokens - job.computed for job in prefilling)
    if wanted <= token_budget:
        return []
    return [job for job in prefilling if job.effective_level > newcomer.effective_level]
