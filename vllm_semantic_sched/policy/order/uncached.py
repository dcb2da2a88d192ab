"""Keeps the ranks of waiting jobs up to date with what the prefix cache holds of them."""

from collections import OrderedDict
from collections.abc import Callable

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.order.waiting import WaitingQueue

_HEADS = 2  # jobs at the head of each level
_IN_TURN = 8  # of all others
_SLACK = 64  # jobs that no longer wait


class UncachedWork:
    """Asks about a bounded number of waiting jobs in a step: the first ones of each level, which
    may start next, and some of the others in turn, new ones first."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._turns: OrderedDict[Job, None] = OrderedDict()

    def add(self, job: Job) -> None:
        """A job has entered the queue, or returned to it: it is the next in turn."""
        self._turns[job] = None
        self._turns.move_to_end(job, last=False)

    def reset(self, enabled: bool) -> None:
        """Forget what is known, after a change of policy; if enabled, ask about all jobs anew."""
        for job in self._waiting:
            job.cached = 0
        self._turns = OrderedDict.fromkeys(self._waiting if enabled else ())

    def refresh(self, cached_tokens: Callable[[Job], int]) -> list[Job]:
        """Ask about some jobs; returns those whose `cached` has changed."""
        jobs = dict.fromkeys([*self._waiting.heads(_HEADS), *self._next_in_turn()])
        changed = []
        for job in jobs:
            tokens = cached_tokens(job)
            if tokens != job.cached:
                job.cached = tokens
                changed.append(job)
        return changed

    def _next_in_turn(self) -> list[Job]:
        turns, waiting = self._turns, self._waiting
        if len(turns) > 2 * len(waiting) + _SLACK:
            for job in [job for job in turns if job not in waiting]:
                del turns[job]
        jobs = [turns.popitem(last=False)[0] for _ in range(min(_IN_TURN, len(turns)))]
        waits = [job for job in jobs if job in waiting]
        turns.update(dict.fromkeys(waits))
        return [job for job in waits if not waiting.is_aside(job)]
