"""Deadline awareness: who is about to miss the promised time to first token goes sooner (S4)."""

from __future__ import annotations

from pydantic import Field

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.heap import AddressableHeap
from vllm_semantic_sched.policy.section import Section

# Jobs looked at in one step, so that a flood of the same age does not hold it up.
_MOST_PER_STEP = 20


class Deadlines(Section):
    """Rank gained shortly before a tier's time to first token (`tiers[].slo.ttft`) runs out."""

    enabled: bool = Field(False, description="Look at deadlines at all.")
    levels: float = Field(
        0.5,
        gt=0,
        description="Levels gained, never beyond level 0. Below 1 a request goes before the "
        "others of its own level only.",
    )
    before: float = Field(
        0.5,
        gt=0,
        le=1,
        description="How long before the deadline, as a share of the promised time. Once it is "
        "missed the gain is lost: others can still be in time.",
    )


class DeadlineWatch:
    """Raises waiting jobs shortly before their deadline. A timer heap names them.

    Attributes:
        knobs: as given; may be changed.
        count: jobs raised so far.
    """

    def __init__(self, knobs: Deadlines) -> None:
        self.knobs = knobs
        self.count = 0
        self._timers: AddressableHeap[Job] = AddressableHeap()

    def wait(self, job: Job, ttft: float | None) -> None:
        """A job begins to wait.

        Args:
            ttft: seconds that its tier is promised, None if nothing is.
        """
        if not self.knobs.enabled or ttft is None or job.generated:
            job.hurried = 0.0  # its first token is out, or none is promised
            self._timers.discard(job)
            return
        job.deadline = job.arrival + ttft
        raise_at = job.deadline - self.knobs.before * ttft
        self._timers.push(job, job.deadline if job.hurried else raise_at)

    def stop(self, job: Job) -> None:
        """A job no longer waits. One that was raised stays so while it computes its prompt."""
        self._timers.discard(job)

    def due(self, now: float) -> list[Job]:
        """Raise the jobs whose time has come, give up on those that are too late, and return
        both."""
        moved = []
        for job in self._timers.pop_until(now, _MOST_PER_STEP):
            raised = bool(job.hurried)
            if now < job.deadline:
                job.hurried = self.knobs.levels
                self.count += 1
                self._timers.push(job, job.deadline)
            else:
                job.hurried = 0.0
            if raised != bool(job.hurried):
                moved.append(job)
        return moved
