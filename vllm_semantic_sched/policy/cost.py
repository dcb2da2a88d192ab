"""What engine work costs, in seconds: the profile's coefficients and what follows from them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from vllm_semantic_sched.policy.files import read_config
from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.section import Section, parse_section


class EngineProfile(Section):
    """Coefficients of one model on one engine (paper, section 3.3 and appendix B)."""

    hardware: str = Field(description="What it was measured on.")
    model: str = Field(description="Model that was served.")
    source: str = Field(description="Who measured it, where it is printed, what was corrected.")
    alpha1: float = Field(ge=0, description="Prefill, seconds per token squared.")
    alpha2: float = Field(gt=0, description="Prefill, seconds per token.")
    beta_load: float = Field(gt=0, description="Host to device, seconds per token.")
    beta_save: float = Field(gt=0, description="Device to host, seconds per token.")
    gamma1: float = Field(ge=0, description="Decode, seconds per token of context.")
    gamma2: float = Field(gt=0, description="Decode, seconds per step.")

    def prefill(self, start: int, end: int) -> float:
        """Seconds to compute tokens `start` to `end` of a sequence in one pass."""
        return self.alpha1 * (end * end - start * start) + self.alpha2 * (end - start)

    def load(self, tokens: int) -> float:
        """Seconds to bring the KV of that many tokens back from the host."""
        return self.beta_load * tokens

    def decode(self, context: int, tokens: float) -> float:
        """Seconds to decode `tokens` more, one a step, after `context` tokens (eq. 4)."""
        return self.gamma1 * tokens * (context + (tokens + 1) / 2) + self.gamma2 * tokens

    def prefill_tokens_within(self, seconds: float) -> int:
        """Tokens of a short prefill that take about that long."""
        return int(seconds / self.alpha2)


def load_profile(name_or_path: str | Path) -> EngineProfile:
    """Read a profile by the name of a shipped one or by path.

    Raises:
        PolicyError: missing, not YAML, or invalid.
    """
    data, source = read_config(name_or_path, kind="profile")
    return parse_section(EngineProfile, data, source)


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
