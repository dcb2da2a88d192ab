"""Stage awareness: keep less urgent prefills from stretching an urgent decode (paper, Alg. 2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.profile import EngineProfile


@dataclass(frozen=True, slots=True)
class StageLimits:
    """What a step may do about prefills.

    Attributes:
        held: running prefills that get no token in this step.
        prefill_tokens: most prefill tokens in the step; None: no limit.
        each: most of them for one request; None: no limit.
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
    """Prefill tokens that this step may compute.

    The limit applies when the most urgent decoding job is protected and every prefill that
    could run beside it is less urgent. A prefill at least as urgent as the decode is p* of
    Alg. 2 and runs unhindered.

    Args:
        decoding_level: effective level of the most urgent decoding job, None if none decodes.
        prefill_level: effective level of the most urgent job that waits or prefills, None if
            there is none.

    Returns:
        Tokens; 0 closes the gate; None leaves the step as it is.
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
    """Running prefills that must sit out a step so that a more urgent newcomer can start.

    The engine serves running requests first; a long prompt can take whole steps in a row.

    Args:
        newcomer: the waiting job that is next and has a seat and blocks.
        token_budget: tokens that the step can spend on prefills.
    """
    wanted = newcomer.tokens
    yielding: list[Job] = []
    for job in prefilling:
        wanted += job.tokens - job.computed
        if job.effective_level > newcomer.effective_level:
            yielding.append(job)
    return yielding if wanted > token_budget else []
