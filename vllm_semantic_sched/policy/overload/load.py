"""What the engine carries, how fast it works it off, and how well it keeps its promises."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity, Holdings
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.profile import EngineProfile
from vllm_semantic_sched.policy.facts.tiers import Tier
from vllm_semantic_sched.policy.overload.account import QueueAccount
from vllm_semantic_sched.policy.overload.pressure import PressureLevel, PressureMonitor, Use
from vllm_semantic_sched.policy.overload.shedding import Shedder
from vllm_semantic_sched.policy.overload.slo import SloMonitor

_HALF_LIFE = 20.0

_ENOUGH = 1.0


class DrainRate:
    """Tokens that the engine finishes per busy second, recent ones counting more.

    Only time in which the engine was busy counts, so that an idle night does not make the
    engine look slow.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def busy(self, seconds: float) -> None:
        """The engine has worked for so long."""
        fade = 0.5 ** (seconds / _HALF_LIFE)
        self._tokens *= fade
        self._seconds = self._seconds * fade + seconds

    def finished(self, tokens: float) -> None:
        """A request with so many tokens, prompt and output, has ended."""
        self._tokens += tokens

    @property
    def rate(self) -> float | None:
        """Tokens per second; None as long as too little was seen."""
        if self._seconds < _ENOUGH or self._tokens <= 0:
            return None
        return self._tokens / self._seconds


# How often pressure and promises are looked at.
_LOOK_SECONDS = 0.1

# Weight of a step in the smoothed time of a step, and a pause that is not one.
_STEP_WEIGHT = 0.1

_LONGEST_STEP = 5.0


class LoadMonitor:
    """Need of running jobs, pressure, promises, and which tiers are shed.

    Need counts tokens that are predicted, not only those that are there.

    Args:
        account: what waits for a first seat.
        capacity: of the engine.
    """

    def __init__(
        self,
        policy: Policy,
        estimates: Estimator,
        holdings: Holdings,
        account: QueueAccount,
        capacity: EngineCapacity,
    ) -> None:
        self._policy = policy
        self._estimates = estimates
        self._holdings = holdings
        self._account = account
        self._seats = max(1, capacity.seats)
        self._kv_tokens = max(1, (capacity.blocks or 0) * capacity.block_size)
        self._drain = DrainRate()
        self._kv_use = 0.0
        self._stepped: float | None = None
        self._step_seconds = 0.0
        self._looked = float("-inf")
        self.pressure = PressureMonitor()
        self.shedder = Shedder()
        self.slo, self._recent = self._monitors()

    def adopt(self, policy: Policy, profile: EngineProfile) -> None:
        """Switch to a new policy; what was measured counts on where the windows stay the same."""
        old, self._policy = self._policy, policy
        if (old.slo, old.shedding.window) == (policy.slo, policy.shedding.window):
            self.slo.adopt(policy.all_tiers)
            self._recent.adopt(policy.all_tiers)
        else:
            self.slo, self._recent = self._monitors()

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tier of each level."""
        return self._policy.all_tiers

    # Events

    def runs(self, job: Job) -> None:
        """A job has a seat, or what is expected of it has changed while it has one."""
        self._holdings.expect(job, self._estimates.tokens(job))

    def first_token(self, job: Job) -> None:
        """A job's first token is there."""
        if job.first_token is not None:
            self._record(job, job.first_token, ttft=job.first_token - job.arrival)

    def ended(self, job: Job, now: float, completed: bool) -> None:
        """A job is gone; if it got its whole answer, its latencies count."""
        if job.generated:
            self._drain.finished(job.tokens)
        if completed and job.first_token is not None:
            more = job.generated - 1
            tpot = (now - job.first_token) / more if more > 0 else None
            self._record(job, now, tpot=tpot, e2e=now - job.arrival)

    def stepped(self, now: float, kv_use: float) -> None:
        """The engine arranges a step; `kv_use` is the share of its KV blocks in use."""
        self._kv_use = kv_use
        if self._stepped is not None and len(self._holdings):
            seconds = now - self._stepped
            if 0 <= seconds < _LONGEST_STEP:
                self._drain.busy(seconds)
                self._step_seconds += _STEP_WEIGHT * (seconds - self._step_seconds)
        self._stepped = now

    def look(self, now: float) -> None:
        """Bring pressure and shedding up to date; O(levels), and now and then only."""
        if 0 <= now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        self.slo.advance(now)
        self._recent.advance(now)
        policy = self._policy
        self.pressure.observe(self.use(), policy.pressure, now)
        nobody_presses = self.pressure.present is PressureLevel.NONE
        calm = nobody_presses and self._account.all.requests < self._seats
        self.shedder.observe(self._broken(now), calm, policy.shedding, self.tiers, now)

    # Questions

    def use(self) -> Use:
        """Use of each resource, now and as predicted."""
        waiting, bound = self._account.all, self._policy.admission.queue
        promised = [tier.slo.tpot for tier in self.tiers if tier.slo.tpot is not None]
        return Use(
            kv=max(self._kv_use, self._predicted_tokens() / self._kv_tokens),
            seats=(len(self._holdings) + waiting.requests) / self._seats,
            queue=max(
                waiting.requests / bound.requests if bound.requests else 0.0,
                waiting.tokens / bound.tokens if bound.tokens else 0.0,
            ),
            step=self._step_seconds / min(promised) if promised and len(self._holdings) else 0.0,
        )

    def outstanding(self) -> list[float]:
        """Predicted tokens of waiting and running jobs, per level."""
        return [
            held.tokens + self._account.level(level).tokens
            for level, held in enumerate(self._holdings.levels())
        ]

    def drain_seconds(self, level: int) -> float:
        """Predicted time to serve what is before a newcomer of a level: what waits at its level
        and above, and half of what runs."""
        ahead = self._account.tokens_up_to(level) + self._predicted_tokens() / 2
        return ahead / (self._drain.rate or self._rate_by_profile())

    def is_shed(self, level: int) -> bool:
        """Whether newcomers of a level are refused for the good of more urgent ones."""
        return self.shedder.is_shed(self.tiers[level], self.tiers)

    # Parts

    def _broken(self, now: float) -> bool:
        """Whether a promise to a tier that shedding would help is broken, by what was measured or
        because its oldest request waits too long already."""
        rules = self._policy.shedding
        if not rules.enabled:
            return False
        for level, tier in enumerate(self.tiers):
            if not self.shedder.benefits(tier, self.tiers):
                continue
            if self._recent.keeps_promise(level, rules.min_samples) is False:
                return True
            oldest = self._account.oldest(level)
            promised = tier.slo.ttft
            if oldest is not None and promised is not None and now - oldest.arrival > promised:
                return True
        return False

    def _predicted_tokens(self) -> float:
        """KV tokens that running jobs are predicted to need in the end."""
        return sum(held.tokens for held in self._holdings.levels())

    def _monitors(self) -> tuple[SloMonitor, SloMonitor]:
        return (
            SloMonitor(self.tiers, self._policy.slo.window),
            SloMonitor(self.tiers, self._policy.shedding.window),
        )

    def _record(self, job: Job, now: float, **seconds: float | None) -> None:
        for monitor in (self.slo, self._recent):
            monitor.record(job.level, **seconds, now=now)

    def _rate_by_profile(self) -> float:
        """Tokens per second while nothing was measured: every seat decodes at the profile's
        pace."""
        return self._seats / max(self._estimates.profile.gamma2, 1e-6)
