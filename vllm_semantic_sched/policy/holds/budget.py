"""Holds: less urgent decoding requests sit out steps while a protected one runs.

A held request keeps its seat and its KV and gets no token; prefills and admissions go on. Nobody is
held while the next waiting request can start: its longer steps would take back what was gained.

**Worth.** A step with holds is shorter, and each request in it gains that. It computes fewer tokens
for the same fixed time: its loss is its time less what its tokens cost in a full step, by which all
requests, running and waiting, are later. The context of held requests is no loss: a later step
reads it instead. Weighted by urgency (`decision.level_worth`), the difference is made largest.

**Price.** Over any `WINDOW` seconds of engine time, holds lose at most `price` of that time, less
what preemptions for urgent requests cost. The less of it is left, the more a step must be worth.
Nobody is held while measured steps contradict the profile that tells losses.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.profile.formula import Batch, EngineProfile

WINDOW = 60.0
"""Seconds of engine time over which the price is kept."""

_SLOT = 0.25  # engine seconds whose losses are kept as one number


class Budget:
    """Engine seconds that urgency has cost, and that holds may still cost. O(1) per step."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self.worked = 0.0  # engine seconds in all
        self.recent = 0.0  # seconds lost in the last `WINDOW`
        self.held = 0.0  # those of them that holds cost
        self._slots: deque[tuple[float, list[float]]] = deque()  # when it ends, both losses

    @property
    def total(self) -> float:
        """Seconds of any `WINDOW` that may be lost."""
        return self._ref.policy.protect.price * WINDOW

    @property
    def share(self) -> float:
        """Share of the last `WINDOW` seconds of engine time that holds cost, 0 to `price`."""
        return self.held / WINDOW

    @property
    def left(self) -> float:
        """What may be lost now."""
        return self.total - self.recent

    def work(self, seconds: float) -> None:
        """Count engine time, and drop losses that are older than `WINDOW` by it."""
        self.worked += seconds
        slots = self._slots
        while slots and slots[0][0] <= self.worked - WINDOW:
            _, (lost, held) = slots.popleft()
            self.recent -= lost
            self.held -= held
        if not slots:
            self.recent = self.held = 0.0  # without what rounding left

    def spend(self, seconds: float, by_holds: bool = True) -> None:
        """Count a loss, by holds or by preemptions."""
        held = seconds if by_holds else 0.0
        self.recent += seconds
        self.held += held
        if not self._slots or self._slots[-1][0] <= self.worked:
            self._slots.append((self.worked + _SLOT, [0.0, 0.0]))
        losses = self._slots[-1][1]
        losses[0] += seconds
        losses[1] += held


class Protection:
    """Decides which jobs are held and for how long.

    Args:
        certain: whether the profile tells what holds cost.
    """

    def __init__(self, ref: PolicyRef, certain: Callable[[], bool] = lambda: True) -> None:
        self._ref = ref
        self._certain = certain
        self.unsafe = False  # whether this engine cannot hold requests
        self.held: dict[Job, None] = {}  # in the present step
        self.budget = Budget(ref)
        self.steps = 0  # with holds so far
        self.tokens_forgone = 0  # that held requests would have got
        self._futile = False
        self._last: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether jobs may be held at all, by the policy and on this engine."""
        rules = self._ref.policy.protect
        return rules.level is not None and rules.price > 0 and not self.unsafe

    def protects(self, job: Job) -> bool:
        """Whether others are held for a job: by the level that it is entitled to, not by one gained
        by waiting."""
        level, entitled = self._ref.policy.protect.level, job.entitled_level
        return level is not None and entitled is not None and entitled <= level

    @property
    def protects_at(self) -> float:
        """The least urgent level whose requests may be protected; -inf: none. What is less urgent,
        by its effective level, gives way to them: not what waiting has made as urgent."""
        level = self._ref.policy.protect.level
        return -math.inf if level is None else level

    def begin_step(self, now: float, busy: bool) -> bool:
        """Account for the step that is over; whether jobs may be held in the coming one."""
        if busy and self._last is not None:
            self.budget.work(max(0.0, now - self._last))
        self._last = now
        futile, self._futile = self._futile, False
        affordable = self.budget.left > 0 and self._certain()
        return affordable and not futile

    def spend(self, seconds: float) -> None:
        """Charge engine time that a preemption for an urgent job costs."""
        if self.enabled:
            self.budget.spend(seconds, by_holds=False)

    def achieved_nothing(self) -> None:
        """The step with holds computed no token: hold nobody in the next one."""
        self._futile = bool(self.held)

    def choose(
        self,
        certain: Batch,
        candidates: Sequence[Job],
        worth: Sequence[float],
        gaining: float,
        losing: float,
        profile: EngineProfile,
    ) -> Sequence[Job]:
        """Choose the jobs to hold in the best step, and record it; none if a step without holds is
        as good. O(candidates).

        Args:
            certain: decoding sequences that run in any case.
            candidates: decoding jobs that may be held, most urgent first.
            worth: of a second that a request gains, by level.
            gaining: the same for all requests in the step that run in any case.
            losing: the same of a second that all requests lose, running and waiting.
        """
        if (left := self.budget.left) <= 0:
            return ()
        count = certain.decodes + len(candidates)
        # Lists, which take half the time of generators: this is asked in every step.
        context = certain.context + sum([job.prompt_tokens + job.generated for job in candidates])
        full = profile.step_decode(Batch(decodes=count, context=context))
        fixed = profile.batch_terms.sequences
        per_token = fixed(count) / count if count else 0.0
        loss_worth = losing * self.budget.total / left
        best, cost, most, held = 0, 0.0, 0.0, 0
        gaining += sum([worth[job.level] for job in candidates])
        while held < len(candidates):
            before, held = (
                held,
                min(2 * held or 1, len(candidates)),
            )  # the least urgent 1, 2, 4, ...
            more = candidates[len(candidates) - held : len(candidates) - before]
            context -= sum([job.prompt_tokens + job.generated for job in more])
            for job in more:
                gaining -= worth[job.level]
            seconds = profile.step_decode(Batch(decodes=count - held, context=context))
            loss = max(0.0, fixed(count - held) - per_token * (count - held))
            value = gaining * (full - seconds) - loss_worth * loss
            if value > most and loss <= left:
                best, cost, most = held, loss, value
        if best:
            self.budget.spend(cost)
            self.steps += 1
            self.tokens_forgone += best
        return candidates[len(candidates) - best :]
