"""Stage awareness: the paper's gate for prefills, and which prefills make way for a newcomer."""

from __future__ import annotations

import math
from collections.abc import Iterable

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.view import NO_LIMITS, EngineView, StageLimits, has_room


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


def prefills_that_yield(newcomer: Job, prefilling: Iterable[Job], token_budget: int) -> list[Job]:
    """Running prefills that must pause for a step so that the next waiting job, more urgent, can
    start. vLLM serves running requests first, and a long prompt can take many whole steps.
    `token_budget`: prefill tokens in the step."""
    wanted = newcomer.tokens
    yielding: list[Job] = []
    for job in prefilling:
        wanted += job.tokens - job.computed
        if job.effective_level > newcomer.effective_level:
            yielding.append(job)
    return yielding if wanted > token_budget else []
