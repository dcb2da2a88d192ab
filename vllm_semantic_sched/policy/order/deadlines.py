"""Raises requests that are about to miss their promised time to first token."""

from __future__ import annotations

from vllm_semantic_sched.policy.config.order import Deadlines
from vllm_semantic_sched.policy.facts.heap import AddressableHeap
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.tiers import Slo

_LEVELS = 0.5  # gained: below 1, so that a request only moves ahead within its own level
_MOST_PER_STEP = 20  # jobs, so that a burst of the same age does not delay a step


class DeadlineWatch:
    """Raises waiting jobs shortly before their deadline, by a timer heap."""

    def __init__(self, knobs: Deadlines) -> None:
        self.knobs = knobs
        self.count = 0  # jobs raised so far
        # Raised waiting jobs that may preempt a job that has its first token.
        self.may_take_seats: set[Job] = set()
        self._timers: AddressableHeap[Job] = AddressableHeap()
        self._takes_seats: dict[Job, bool] = {}

    def wait(self, job: Job, slo: Slo) -> None:
        """Start the timer of a job that begins to wait or has changed to a tier with this SLO."""
        if not self.knobs.enabled or slo.ttft is None or job.generated:
            job.deadline_boost = 0.0
            if job in self._takes_seats:
                self.stop(job)
            return
        job.deadline = job.arrival + slo.ttft
        raise_at = job.deadline - self.knobs.before * slo.ttft
        self._timers.push(job, job.deadline if job.deadline_boost else raise_at)
        self._takes_seats[job] = slo.takes_seats
        self._update_may_take_seats(job)

    def stop(self, job: Job) -> None:
        """Stop a job's timer; a raised job stays raised until its first token."""
        self._timers.discard(job)
        self._takes_seats.pop(job, None)
        self.may_take_seats.discard(job)

    def may_be_due(self, now: float) -> bool:
        return self._timers.may_reach(now)

    def due(self, now: float) -> list[Job]:
        """Raise the jobs whose timers have expired, lower those past their deadline, and return
        both."""
        moved = []
        for job in self._timers.pop_until(now, _MOST_PER_STEP):
            raised = bool(job.deadline_boost)
            if now < job.deadline:
                job.deadline_boost = _LEVELS
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
