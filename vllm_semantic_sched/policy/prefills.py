"""Shares the prompt tokens of a step among prefills, the most urgent first.

vLLM gives running requests their tokens in the order of its list, the most urgent first and each as
many as it can use, and waiting ones what is left. Without limits, a prompt longer than a step would
leave the decodes behind it without a token, and a running prefill would leave nothing for a more
urgent newcomer. Two limits prevent that, and vLLM knows both: a cap on the prompt tokens of each
request, and running prefills that sit out the step.

Sitting out is bounded. A prefill sits out only for requests that got tokens because of it, and at
most `MOST_YIELDS` steps in a row; its wait counts as waiting (`order.credit`).
"""

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.order.running import RunningSet
from vllm_semantic_sched.policy.order.waiting import WaitingQueue
from vllm_semantic_sched.policy.orders import NO_LIMITS, PrefillLimits
from vllm_semantic_sched.policy.snapshot import Room, Snapshot

MOST_YIELDS = 16
"""Steps in a row that a prefill sits out for others; in the next one it shares with them."""

_NEWCOMERS = 8  # waiting jobs for which a step sets tokens aside


class Prefill(NamedTuple):
    """A prefill that could go on, or start, in a step."""

    job: Job
    tokens: int  # that it still has to compute
    may_sit_out: bool  # a waiting one always may


def share(prefills: Sequence[Prefill], budget: int) -> PrefillLimits:
    """Share the `budget` of a step, in prompt tokens, among prefills, the most urgent first.

    Those for which nothing is left sit out. If the last one gets a part only, the cap is that part,
    unless it would cut a more urgent one as well: then it sits out, too.
    """
    if not prefills:
        return NO_LIMITS
    left, shared, held = budget, list[Prefill](), list[Prefill]()
    for prefill in prefills:
        (held if left <= 0 and prefill.may_sit_out else shared).append(prefill)
        left -= prefill.tokens
    if sum(prefill.tokens for prefill in shared) <= budget:
        return _limits(held, None, prefills[0])
    cap = _even_share([prefill.tokens for prefill in shared], budget)
    last = shared[-1]
    for other in shared:
        if other.tokens > cap and other.job.effective_level < last.job.effective_level:
            if last.may_sit_out:
                return share_without(last, prefills, budget)
            break
    return _limits(held, cap, prefills[0])


def share_without(last: Prefill, prefills: Sequence[Prefill], budget: int) -> PrefillLimits:
    """The same where `last` sits out."""
    limits = share([prefill for prefill in prefills if prefill is not last], budget)
    held = (last.job,) if last.job.seat is not None else ()
    return PrefillLimits((*held, *limits.held), limits.cap, beneficiary=prefills[0].job)


def _limits(held: Sequence[Prefill], cap: int | None, first: Prefill) -> PrefillLimits:
    running = tuple(prefill.job for prefill in held if prefill.job.seat is not None)
    if not running:
        return NO_LIMITS if cap is None else PrefillLimits(cap=cap)
    return PrefillLimits(running, cap, beneficiary=first.job)


def _even_share(tokens: Sequence[int], budget: int) -> int:
    """The largest cap under which the capped tokens do not exceed the budget; at least 1."""
    cap, count = 0, len(tokens)
    for length in sorted(tokens):
        if length * count > budget:
            break
        budget -= length
        count -= 1
        cap = length
    return max(1, budget // count if count else cap)


class PrefillSharing:
    """Limits the prefills of each step, and remembers for whom others sat out in vain."""

    def __init__(self, running: RunningSet, waiting: WaitingQueue) -> None:
        self._running = running
        self._waiting = waiting
        self.may_sit_out = True  # whether this engine can let a running prefill sit out
        # Others sat out for these jobs in the last step, with their computed tokens then.
        self._served: list[tuple[Job, int]] = []
        # They got no token although others sat out: until a job gives back its seat, or they get
        # one after all, nobody does. With their computed tokens.
        self._in_vain: dict[Job, int] = {}
        self._departed = False  # a job gave back its seat since the last step
        self._futile = False

    def departed(self) -> None:
        """A job gave back its seat."""
        self._departed = True

    def achieved_nothing(self) -> None:
        """The step computed no token: no prefill sits out the next one."""
        self._futile = True

    def limits(
        self,
        snapshot: Snapshot,
        room: Room,
        prefilling: Sequence[Job],
        leaving: Collection[Job],
        by_urgency: bool,
    ) -> PrefillLimits:
        """The limits of the coming step.

        Args:
            prefilling: running prefills that keep their seats; their `computed` is up to date.
            leaving: running jobs that are preempted, or decode and sit out the step.
            by_urgency: whether the policy looks at levels.
        """
        self._look_back()
        futile, self._futile = self._futile, False
        if not prefilling or snapshot.token_budget == float("inf"):
            return NO_LIMITS
        decode_tokens = snapshot.tokens_per_decode * decodes_in_step(snapshot, leaving)
        budget = snapshot.token_budget - decode_tokens
        may = self.may_sit_out and not futile and not snapshot.paused
        newcomers = []
        if may and by_urgency:
            newcomers = list(self._newcomers(snapshot, room, prefilling))
        going_on = [job for job in prefilling if job not in self._in_vain]
        # After running ones of the same level, as vLLM serves them.
        queue = sorted(going_on, key=self._running.order) + newcomers
        queue.sort(key=lambda job: job.effective_level)
        prefills = [Prefill(job, _tokens_left(job), may and _may_sit_out(job)) for job in queue]
        # Alone, prefills get their tokens by vLLM's list: it needs no limits to put them in order.
        alone = not newcomers and not decode_tokens
        limits = NO_LIMITS if alone else share(prefills, max(0, int(budget)))
        sit_out = set(limits.held)
        for job in prefilling:
            if job.seat is not None:
                job.seat.yielded = job.seat.yielded + 1 if job in sit_out else 0
        if sit_out:
            going = [prefill for prefill in prefills if prefill.job not in sit_out]
            self._served = [(job, job.computed) for job in _with_tokens(going, limits, budget)]
        return limits

    def _look_back(self) -> None:
        if self._departed:
            self._departed = False
            self._in_vain.clear()
        if self._in_vain:  # one that goes on takes tokens of the step, and has to be counted
            in_vain = self._in_vain.items()
            self._in_vain = {job: computed for job, computed in in_vain if job.computed <= computed}
        served, self._served = self._served, []
        for job, computed in served:
            if job.computed <= computed and (job in self._waiting or job in self._running):
                self._in_vain[job] = job.computed

    def _newcomers(
        self,
        snapshot: Snapshot,
        room: Room,
        prefilling: Collection[Job],
    ) -> Iterator[Job]:
        """The next waiting jobs, as far as they can start and a less urgent prefill runs."""
        least_urgent = max(job.effective_level for job in prefilling)
        seats = room.seats
        if seats <= 0 or self._waiting.peek() is None:
            return
        blocks = room.blocks
        for job in itertools.islice(self._waiting.ordered(), _NEWCOMERS):
            if job.effective_level >= least_urgent:
                return
            if job in self._in_vain or not snapshot.is_ready(job) or snapshot.obstacles(job):
                continue
            seats -= 1
            blocks -= room.needed_blocks(job)
            if seats < 0 or blocks < 0:
                return
            yield job


def decodes_in_step(snapshot: Snapshot, leaving: Iterable[Job]) -> int:
    """How many jobs decode in the coming step without these running ones."""
    prefilling = snapshot.prefilling
    return snapshot.decoding - sum(
        job not in prefilling and snapshot.can_advance(job) for job in leaving
    )


def _with_tokens(
    prefills: Sequence[Prefill], limits: PrefillLimits, budget: float
) -> Iterator[Job]:
    """The jobs for which the budget lasts."""
    for job, tokens, _ in prefills:
        if budget <= 0:
            return
        yield job
        budget -= tokens if limits.cap is None else min(tokens, limits.cap)


def _tokens_left(job: Job) -> int:
    in_place = job.computed if job.seat is not None else job.swapped
    return max(1, job.tokens - in_place)


def _may_sit_out(job: Job) -> bool:
    return job.seat is None or job.seat.yielded < MOST_YIELDS


def gate(
    gated_level: int, prefilling: Sequence[Job], newcomer: Job | None, first: Job | None
) -> PrefillLimits:
    """No prefill in the coming step (paper, Alg. 2), if the most urgent running job decodes and is
    protected, and all prefills, running or next, are less urgent; else no limits.

    Args:
        gated_level: see `SchedulingCore`.
        prefilling: running prefills that keep their seats.
        newcomer: the next waiting job; None if none may start.
        first: the most urgent running job; None if none runs.
    """
    levels = [job.effective_level for job in prefilling]
    if newcomer is not None:
        levels.append(newcomer.effective_level)
    if not levels or first is None or first in prefilling:
        return NO_LIMITS
    if not gates_prefills(first.effective_level, min(levels), gated_level):
        return NO_LIMITS
    return PrefillLimits(tuple(prefilling), gated=True, beneficiary=first)


def gates_prefills(decoding_level: float, prefill_level: float, gated_level: int) -> bool:
    """Whether a decode of one effective level keeps prefills of another from a step."""
    return decoding_level <= gated_level and prefill_level > decoding_level
