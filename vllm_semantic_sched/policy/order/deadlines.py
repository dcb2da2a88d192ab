"""Deadline awareness: requests about to miss their promised time to first token go sooner (S4)."""

from __future__ import annotations

from vllm_semantic_sched.policy.config.order import Deadlines
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.tiers import Slo

# Jobs looked at in one step, so that a flood of the same age does not hold it up.
_MOST_PER_STEP = 20


class DeadlineWatch:
    """Raises waiting jobs shortly before their deadline. A timer heap names them.

    Attributes:
        knobs: as given; may be changed.
        count: jobs raised so far.
        may_take_seats: raised waiting jobs that may take the seat of one that has its first token.
    """

    def __init__(self, knobs: Deadlines) -> None:
        self.knobs = knobs
        self.count = 0
        self.may_take_seats: set[Job] = set()
        self._timers: AddressableHeap[Job] = AddressableHeap()
        self._takes_seats: dict[Job, bool] = {}

    def wait(self, job: Job, slo: Slo) -> None:
        """A job begins to wait, or its level changed meanwhile.

        Args:
            slo: what its tier is promised.
        """
        if not self.knobs.enabled or slo.ttft is None or job.generated:
            job.deadline_boost = 0.0  # its first token is out, or none is promised
            self.stop(job)
            return
        job.deadline = job.arrival + slo.ttft
        raise_at = job.deadline - self.knobs.before * slo.ttft
        self._timers.push(job, job.deadline if job.deadline_boost else raise_at)
        self._takes_seats[job] = slo.takes_seats
        self._update_may_take_seats(job)

    def stop(self, job: Job) -> None:
        """A job no longer waits. One that was raised stays so until its first token."""
        self._timers.discard(job)
        self._takes_seats.pop(job, None)
        self.may_take_seats.discard(job)

    def due(self, now: float) -> list[Job]:
        """Raise the jobs whose time has come, give up on those that are too late, and return
        both."""
        moved = []
        for job in self._timers.pop_until(now, _MOST_PER_STEP):
            raised = bool(job.deadline_boost)
            if now < job.deadline:
                job.deadline_boost = self.knobs.levels
                self.count += 1
                self._timers.push(job, job.deadline)
            else:
                job.deadline_boost = 0.0
            self._update_may_take_seats(job)
            if raised != bool(job.deadline_boost):
                moved.append(job)
        return moved

    def _update_may_take_seats(self, job: Job) -> None:
        if job.deadline_boost and self._takes_seats[job]:
            self.may_take_seats.add(job)
        else:
            self.may_take_seats.discard(job)
