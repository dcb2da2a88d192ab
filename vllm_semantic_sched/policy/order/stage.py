"""Stage awareness: the paper's gate for prefills, and which prefills make way for a newcomer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.facts.job import Job


@dataclass(frozen=True, slots=True)
class StageLimits:
    """Limits on the prefills of a step.

    Attributes:
        held: running prefills that get no token in this step.
        gated: whether no other prefill gets any either.
    """

    held: tuple[Job, ...] = ()
    gated: bool = False


NO_LIMITS = StageLimits()


def gates_prefills(decoding_level: float | None, prefill_level: float | None, stage: Stage) -> bool:
    """Whether this step has no prefills (paper, Alg. 2): the most urgent decoding job is protected
    and all prefills are less urgent.

    Args:
        decoding_level: effective level of the most urgent decoding job; None without one.
        prefill_level: effective level of the most urgent waiting or prefilling job; None without
            one.
    """
    if stage.mode == "off" or decoding_level is None or prefill_level is None:
        return False
    return decoding_level <= stage.protected_level and prefill_level > decoding_level


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
