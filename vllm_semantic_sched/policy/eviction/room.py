"""Making room: which running jobs have to go so that more urgent waiting ones can start (P5)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_semantic_sched.policy.eviction.preemption import Need
from vllm_semantic_sched.policy.job import Job

if TYPE_CHECKING:
    from vllm_semantic_sched.policy.core import SchedulingCore

# How far down the waiting queue a step looks for jobs to make room for.
_LOOKAHEAD = 64
# Of these, jobs that may not preempt and stand before such as may.
_PASSED = 8


@dataclass(slots=True)
class Room:
    """What the coming step has for waiting jobs: seats, KV blocks, tokens to prefill."""

    seats: int
    blocks: int
    prefill_tokens: float


def choose_evictions(
    core: SchedulingCore,
    room: Room,
    ready: Callable[[Job], bool],
    needed_blocks: Callable[[Job], int],
    freeable_blocks: Callable[[Job], int | None],
    preemption_seconds: Callable[[Job], float],
) -> list[Job]:
    """Running jobs to preempt before a step, for waiting ones that vLLM would let wait.

    Goes down the waiting queue as far as jobs can be admitted in this step, and keeps account
    of what those before have taken. A job that its age, its deadline or its tier's share put
    before a more urgent one takes what comes free first, so it is counted, although nobody is
    preempted for it. The jobs themselves are not touched.

    Args:
        room: what there is without preempting anybody; used up by the call.
        ready: whether a waiting job could be admitted if there were room.
        needed_blocks: KV blocks that a waiting job takes.
        freeable_blocks: KV blocks that come free with a running job; None if it cannot be
            preempted now.
        preemption_seconds: what preempting a running job would cost.
    """
    victims: list[Job] = []
    victims_left = core.policy.preemption.max_victims_per_step

    def freeable(victim: Job) -> int | None:
        return None if victim in victims else freeable_blocks(victim)

    passed = 0
    for job in itertools.islice(core.waiting.ordered(), _LOOKAHEAD):
        entitled = core.eviction.worth_preempting(job)
        passed += not entitled
        if room.prefill_tokens <= 0 or passed > (_PASSED if core.fairness.reorders_levels else 0):
            break
        if not ready(job) or not core.fairness.tenant_caps.admits(job):
            continue
        blocks = needed_blocks(job)
        need = core.eviction.need_of(job, Need(seats=1 - room.seats, blocks=blocks - room.blocks))
        if entitled and not need.met:
            chosen = core.eviction.victims_for(
                job, need, victims_left, freeable, preemption_seconds
            )
            if not chosen:
                break
            victims += chosen
            victims_left -= len(chosen)
            room.seats += len(chosen)
            room.blocks += sum(freeable_blocks(victim) or 0 for victim in chosen)
        room.seats -= 1
        room.blocks -= blocks
        room.prefill_tokens -= job.tokens
    return victims
