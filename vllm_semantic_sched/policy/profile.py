"""What engine work costs, in seconds: the coefficients of one model on one engine."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from vllm_semantic_sched.policy.files import read_config
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
