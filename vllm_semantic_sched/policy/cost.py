"""What a job still costs and what preempting it costs, in seconds of engine time."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.profile import EngineProfile


def remaining_seconds(job: Job, expected_output: float, profile: EngineProfile) -> float:
    """Engine time that a job still needs: load, prefill of what has no KV, decode (P2).

    Args:
        expected_output: output tokens in all, above `job.generated`.
    """
    in_place = job.computed + job.swapped
    # The newest token of a decoding job has no KV yet; decoding it is not a prefill.
    pending = job.tokens - in_place
    prefill = profile.prefill(in_place, job.tokens) if pending > 1 else 0.0
    return (
        profile.load(job.swapped)
        + prefill
        + profile.decode(job.tokens, expected_output - job.generated)
    )


class PreemptionKind(enum.Enum):
    """What happens to the KV of a preempted job."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class PreemptionPlan:
    """How to preempt one job.

    Attributes:
        kept_tokens: tokens whose KV goes to the host.
        seconds: engine time that resuming will cost.
    """

    kind: PreemptionKind
    kept_tokens: int
    seconds: float


def plan_preemption(job: Job, profile: EngineProfile, can_swap: bool) -> PreemptionPlan:
    """The cheaper of keeping all KV on the host and computing it again (paper, eq. 3; printed
    there the wrong way round: swapping is right when beta n < alpha1 n^2 + alpha2 n).

    Args:
        can_swap: whether the engine has somewhere to swap to.
    """
    recompute = profile.prefill(0, job.computed)
    load = profile.load(job.computed)
    if can_swap and load < recompute:
        return PreemptionPlan(PreemptionKind.SWAP, job.computed, load)
    return PreemptionPlan(PreemptionKind.RECOMPUTE, 0, recompute)
