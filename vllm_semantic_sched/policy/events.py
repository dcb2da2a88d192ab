"""Lines of the event log: one JSON object per transition of a request, and per hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.lifecycle import Transition

_LONGEST_ID = 128  # characters of a request id in the log


class Event(NamedTuple):
    """A copy of a transition's data, because the job changes later."""

    time: float  # Unix time
    request: str
    tenant: str
    level: int
    level_from: str
    before: str | None
    state: str
    reason: str
    plan: str
    prompt_tokens: int
    output_tokens: int
    first_token: float | None  # Unix time
    held: float = 0.0  # seconds; the end of a hold is no change of state

    @classmethod
    def of(cls, transition: Transition, now: float) -> Event:
        """Copy a transition that happened at Unix time `now`. Unlike the policy's clock, Unix time
        does not stop while the engine is paused."""
        job, before, state, time, reason, plan = transition
        return cls(
            now,
            job.request_id[:_LONGEST_ID],
            job.tenant,
            job.level,
            job.level_source.value,
            None if before is None else before.value,
            state.value,
            reason,
            plan,
            job.prompt_tokens,
            job.generated,
            None if job.first_token is None else now - (time - job.first_token),
        )

    @classmethod
    def of_hold(cls, job: Job, seconds: float, now: float) -> Event:
        """A running job was held for this long, until Unix time `now`."""
        state = job.state.value
        return cls(
            now, job.request_id[:_LONGEST_ID], job.tenant, job.level, job.level_source.value,
            state, state, "held", "", job.prompt_tokens, job.generated, None, seconds,
        )  # fmt: skip

    def line(self, engine: int, tier: str) -> dict[str, Any]:
        """The JSON object; empty fields are left out."""
        line: dict[str, Any] = {
            "time": round(self.time, 6),
            "engine": engine,
            "request": self.request,
            "tier": tier,
            "level": self.level,
            "level_from": self.level_from,
            "from": self.before,
            "state": self.state,
        }
        if self.tenant:
            line["tenant"] = self.tenant
        if self.reason:
            line["reason"] = self.reason
        if self.plan:
            line["plan"] = self.plan
        line |= {"prompt_tokens": self.prompt_tokens, "output_tokens": self.output_tokens}
        if self.first_token is not None:
            line["first_token"] = round(self.first_token, 6)
        if self.held:
            line["held"] = round(self.held, 6)
        return line
