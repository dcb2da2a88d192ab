"""Stage awareness: keeps less urgent prefills from delaying an urgent decode (paper, Alg. 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Limits on the prefills of a step.

    Attributes:
        held: running prefills that get no token in this step.
        prefill_tokens: most prefill tokens in the step; None: no limit.
        each: most prefill tokens of one request; None: no limit.
    """

    held: tuple[Job, ...] = ()
    prefill_tokens: int | None = None
    each: int | None = None


NO_LIMITS = StageLimits()


def prefill_token_limit(
    decoding_level: float | None,
    prefill_level: float | None,
    stage: Stage,
    profile: EngineProfile,
) -> int | None:
    """Most prefill tokens in this step; None: no limit.

    The limit applies if the most urgent decoding job is protected and all prefills are less
    urgent. A prefill at least as urgent as the decode (p* of Alg. 2) is not limited.

    Args:
        decoding_level: effective level of the most urgent decoding job; None without one.
        prefill_level: effective level of the most urgent waiting or prefilling job; None without
            one.
    """
    if stage.mode == "off" or decoding_level is None or prefill_level is None:
        return None
    if decoding_level > stage.protected_level or prefill_level <= decoding_level:
        return None
    if stage.mode == "gate":
        return 0
    affordable = profile.prefill_tokens_within(stage.max_slowdown * profile.gamma2)
    return max(affordable, stage.min_prefill_tokens)


def prefills_that_yield(newcomer: Job, prefilling: Iterable[Job], token_budget: int) -> list[Job]:
    """Running prefills that must pause for a step so that a more urgent new job can start.

    vLLM serves running requests first, and a long prompt can take many whole steps.

    Args:
        newcomer: the next waiting job, which has a seat and blocks.
        token_budget: prefill tokens in the step.
    """
    wanted = newcomer.tokens
    yielding: list[Job] = []
    for job in prefilling:
        wanted += job.tokens - job.computed
        if job.effective_level > newcomer.effective_level:
            yielding.append(job)
    return yielding if wanted > token_budget else []
