"""Deadline awareness: who is about to miss the promised time to first token goes sooner (S4)."""

from __future__ import annotations

from pydantic import Field

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.order.heap import AddressableHeap
from vllm_semantic_sched.policy.overload.tiers import Slo
from vllm_semantic_sched.policy.section import Section

# Jobs looked at in one step, so that a flood of the same age does not hold it up.
_MOST_PER_STEP = 20


class Deadlines(Section):
    """Rank gained shortly before a tier's time to first token (`tiers[].slo.ttft`) runs out."""

    enabled: bool = Field(False, description="Look at deadlines at all.")
    levels: float = Field(
        0.5,
        gt=0,
        description="Levels gained, up to level 0, whose own requests then go before the others "
        "of it. Below 1 a request goes before the others of its own level only.",
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
        insisting: raised waiting jobs that may take the seat of one that has its first token.
    """

    def __init__(self, knobs: Deadlines) -> None:
        self.knobs = knobs
        self.count = 0
        self.insisting: set[Job] = set()
        self._timers: AddressableHeap[Job] = AddressableHeap()
        self._takes_seats: dict[Job, bool] = {}

    def wait(self, job: Job, slo: Slo) -> None:
        """A job begins to wait, or its level changed meanwhile.

        Args:
            slo: what its tier is promised.
        """
        if not self.knobs.enabled or slo.ttft is None or job.generated:
            job.hurried = 0.0  # its first token is out, or none is promised
            self.stop(job)
            return
        job.deadline = job.arrival + slo.ttft
        raise_at = job.deadline - self.knobs.before * slo.ttft
        self._timers.push(job, job.deadline if job.hurried else raise_at)
        self._takes_seats[job] = slo.takes_seats
        self._insist(job)

    def stop(self, job: Job) -> None:
        """A job no longer waits. One that was raised stays so until its first token."""
        self._timers.discard(job)
        self._takes_seats.pop(job, None)
        self.insisting.discard(job)

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
            self._insist(job)
            if raised != bool(job.hurried):
                moved.append(job)
        return moved

    def _insist(self, job: Job) -> None:
        if job.hurried and self._takes_seats[job]:
            self.insisting.add(job)
        else:
            self.insisting.discard(job)
