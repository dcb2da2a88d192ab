"""Holds: less urgent running jobs sit out steps while a protected job runs.

A held job keeps its seat and its KV and gets no token. As many others run beside the protected ones
as the engine profile says fit into a step that is `slowdown` times as long as with the protected
ones alone: on two cores none to a few, on a GPU nearly all. A quarter of that allowance, and what
decodes leave of the rest, is saved up for prefills. Until it suffices for one, the others' prefills
are held too, and the gate is closed: no less urgent job is admitted. So `slowdown` bounds the mean
step, and short requests of the next levels still get their turn while urgent ones come and go.

Holds spend a credit of at most `longest_hold` seconds, and steps without holds earn `share` / (1 -
`share`) seconds per second. So within any T seconds, no job is held longer than `longest_hold` +
`share` T, plus the step under way. When the credit is spent, holds pause until half of it is back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from vllm_semantic_sched.policy.config.order import Protect
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.facts.profile import Batch, EngineProfile

# Part of the allowance that decodes leave to prefills.
_PREFILLS = 0.25


class Sharing(NamedTuple):
    """How protected jobs share a step. `held`: running jobs that get no token; `prefill_tokens`:
    most tokens that prefills of other jobs may take, 0 to admit none."""

    held: list[Job]
    prefill_tokens: int


class Protection:
    """Decides which jobs are held and for how long.

    Attributes:
        knobs: may be replaced.
        unsafe: whether this engine cannot hold requests.
        held: jobs held in the present step, and the time since when.
        closed: whether the gate keeps less urgent jobs from being admitted.
        steps: steps with holds so far.
        tokens_forgone: tokens that held decodes would have got.
    """

    def __init__(self, knobs: Protect) -> None:
        self.knobs = knobs
        self.unsafe = False
        self.held: dict[Job, float] = {}
        self.closed = False
        self.steps = 0
        self.tokens_forgone = 0
        self._credit = knobs.longest_hold
        self._saved = 0.0  # seconds for prefills
        self._pausing = False
        self._futile = False
        self._last: float | None = None

    @property
    def enabled(self) -> bool:
        """Whether any job may be protected."""
        return self.knobs.level is not None and self.knobs.share > 0 and not self.unsafe

    def protects(self, job: Job) -> bool:
        """Whether others are held for a job: by its own level, not by one gained by waiting nor by
        a provisional one."""
        if self.knobs.level is None or job.level > self.knobs.level:
            return False
        return job.level_source is not LevelSource.INSTANT or not job.awaits_prediction

    def yields(self, job: Job) -> bool:
        """Whether a job gives way to protected ones. One that waiting has made as urgent does
        not."""
        return self.knobs.level is not None and job.effective_level > self.knobs.level

    def admits(self, job: Job) -> bool:
        """Whether the gate lets a waiting job pass."""
        return not self.closed or not self.yields(job)

    def begin_step(self, now: float) -> bool:
        """Account for the step that is over; whether jobs may be held in the coming one."""
        knobs = self.knobs
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        if self.held:
            self._credit -= elapsed
        elif self.closed:
            # The engine may have been idle since then.
            self._credit -= min(elapsed, knobs.longest_hold)
        else:
            earned = elapsed * knobs.share / (1.0 - knobs.share)
            self._credit = min(knobs.longest_hold, self._credit + earned)
        if self._credit <= 0:
            self._pausing = True
        elif self._credit >= knobs.longest_hold / 2:
            self._pausing = False
        futile, self._futile = self._futile, False
        return not self._pausing and not futile

    def achieved_nothing(self) -> None:
        """The step with holds computed no token: hold nobody in the next one."""
        self._futile = bool(self.held)

    def share_step(
        self,
        protected: Iterable[Job],
        others: Iterable[Job],
        prefilling: Collection[Job],
        newcomer: Job | None,
        profile: EngineProfile,
        min_prefill_tokens: int,
    ) -> Sharing:
        """Choose who runs beside the protected jobs. O(running jobs).

        Args:
            protected: running jobs that others are held for.
            others: running jobs that yield, most urgent first.
            prefilling: running jobs in prefill, protected or not.
            newcomer: a protected job that starts in this step.
            min_prefill_tokens: smaller prefills are not worth a step.
        """
        alone = Batch()
        decodes_alone = newcomer is None
        for job in protected:
            if job in prefilling:
                alone.add_prefill(job.computed, job.tokens)
                decodes_alone = False
            else:
                alone.add_decode(job.tokens)
        if newcomer is not None:
            alone.add_prefill(newcomer.computed, newcomer.tokens)
        allowance = (self.knobs.slowdown - 1.0) * profile.step(alone)
        left = (1.0 - _PREFILLS) * allowance
        terms = profile.batch_terms
        held: list[Job] = []
        held_prefills: list[Job] = []
        for job in others:
            if job in prefilling:
                held_prefills.append(job)
                continue
            cost = terms.per_sequence + terms.per_context_token * job.tokens
            if cost > left:
                held.append(job)
            else:
                left -= cost
        decodes = len(held)
        left += _PREFILLS * allowance
        worthwhile = profile.prefill(0, min_prefill_tokens)
        # More must not be saved: it would be spent in one step.
        self._saved = min(self._saved + left, max(worthwhile, left))
        tokens = 0
        # Prefills of protected jobs take what they need; a limit would count them too.
        if decodes_alone and self._saved >= worthwhile:
            tokens = max(min_prefill_tokens, profile.prefill_tokens_within(self._saved))
            self._saved = 0.0
        else:
            held += held_prefills
        self.steps += bool(held)
        self.tokens_forgone += decodes
        return Sharing(held, tokens)
