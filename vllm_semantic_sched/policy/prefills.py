"""Shares the prompt tokens of a step among prefills, the most urgent first.

vLLM gives running requests their tokens in the order of its list, the most urgent first and each as
many as it can use, and waiting ones what is left. Without limits, a prompt longer than a step would
leave the decodes behind it without a token, and a running prefill would leave nothing for a more
urgent newcomer. Two limits prevent that, and vLLM knows both: a cap on the prompt tokens of each
request, and running prefills that sit out the step.

Sitting out is bounded. A prefill sits out only for requests that got tokens because of it, and at
most `MOST_YIELDS` steps in a row; its wait counts as waiting (`order.aging`).
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from vllm_semantic_sched.policy.config.order import Stage
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.view import NO_LIMITS, EngineView, PrefillLimits

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
    for each in sorted(tokens):
        if each * count > budget:
            break
        budget -= each
        count -= 1
        cap = each
    return max(1, budget // count if count else cap)


class PrefillSharing:
    """Limits the prefills of each step, and remembers for whom others sat out in vain."""

    def __init__(self) -> None:
        self.may_sit_out = True  # whether this engine can let a running prefill sit out
        # Others sat out for these jobs in the last step, with their computed tokens then.
        self._served: list[tuple[Job, int]] = []
        # They got no token although others sat out: until a job gives back its seat, or they get
        # one after all, nobody does. With their computed tokens.
        self._in_vain: dict[Job, int] = {}
        self._departures = 0
        self._futile = False

    def achieved_nothing(self) -> None:
        """The step computed no token: no prefill sits out the next one."""
        self._futile = True

    def limits(self, core: SchedulingCore, view: EngineView) -> PrefillLimits:
        """The limits of the coming step."""
        prefilling = view.prefilling()
        self._look_back(core)
        futile, self._futile = self._futile, False
        budget = view.token_budget() - view.decode_tokens()
        if not prefilling or budget == float("inf"):
            return NO_LIMITS
        may = self.may_sit_out and not futile and not view.is_paused()
        newcomers = list(self._newcomers(core, view, prefilling)) if may else []
        going_on = [job for job in prefilling if job not in self._in_vain]
        # After running ones of the same level, as vLLM serves them.
        queue = sorted(going_on, key=core.running.order) + newcomers
        queue.sort(key=lambda job: job.effective_level)
        prefills = [Prefill(job, _tokens_left(job), may and _may_sit_out(job)) for job in queue]
        # Alone, prefills get their tokens by vLLM's list: it needs no limits to put them in order.
        alone = not newcomers and not view.decode_tokens()
        limits = NO_LIMITS if alone else share(prefills, max(0, int(budget)))
        held = set(limits.held)
        for job in prefilling:
            if job.seat is not None:
                job.seat.yielded = job.seat.yielded + 1 if job in held else 0
        if held:
            going = [prefill for prefill in prefills if prefill.job not in held]
            self._served = [(job, job.computed) for job in _with_tokens(going, limits, budget)]
        return limits

    def _look_back(self, core: SchedulingCore) -> None:
        if core.departures != self._departures:
            self._departures = core.departures
            self._in_vain.clear()
        if self._in_vain:  # one that goes on takes tokens of the step, and has to be counted
            in_vain = self._in_vain.items()
            self._in_vain = {job: computed for job, computed in in_vain if job.computed <= computed}
        served, self._served = self._served, []
        for job, computed in served:
            if job.computed <= computed and (job in core.waiting or job in core.running):
                self._in_vain[job] = job.computed

    def _newcomers(
        self, core: SchedulingCore, view: EngineView, prefilling: Collection[Job]
    ) -> Iterator[Job]:
        """The next waiting jobs, as far as they can start and a less urgent prefill runs."""
        least_urgent = max(job.effective_level for job in prefilling)
        seats = view.free_seats()
        if seats <= 0 or core.waiting.peek() is None or not core.policy.uses_urgency:
            return
        blocks = view.free_blocks()
        for job in itertools.islice(core.waiting.ordered(), _NEWCOMERS):
            if job.effective_level >= least_urgent:
                return
            if job in self._in_vain or not view.is_ready(job) or view.obstacles(job):
                continue
            seats -= 1
            blocks -= view.needed_blocks(job)
            if seats < 0 or blocks < 0:
                return
            yield job


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


def gate(core: SchedulingCore, view: EngineView) -> PrefillLimits:
    """No prefill in the coming step (paper, Alg. 2), if the most urgent decoding job is protected
    and all prefills, running or next, are less urgent; else no limits."""
    stage = core.policy.stage
    if stage.mode == "off" or not core.policy.uses_urgency:
        return NO_LIMITS
    prefilling, newcomer = view.prefilling(), core.waiting.peek()
    levels = [job.effective_level for job in prefilling]
    if newcomer is not None:
        levels.append(newcomer.effective_level)
    best = view.most_urgent_decode()
    if not levels or best is None:
        return NO_LIMITS
    if not gates_prefills(best.effective_level, min(levels), stage):
        return NO_LIMITS
    return PrefillLimits(tuple(prefilling), gated=True, beneficiary=best)


def gates_prefills(decoding_level: float, prefill_level: float, stage: Stage) -> bool:
    """Whether a decode of one effective level keeps prefills of another from a step."""
    return decoding_level <= stage.protected_level and prefill_level > decoding_level


def prefills_protected(core: SchedulingCore, view: EngineView) -> bool:
    """Whether the coming step is to prefill a protected job, running or next."""
    newcomer = core.waiting.peek()
    jobs = view.prefilling() if newcomer is None else (newcomer, *view.prefilling())
    return any(map(core.protection.protects, jobs))
