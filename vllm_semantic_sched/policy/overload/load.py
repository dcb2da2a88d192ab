"""Load of the engine: predicted work, throughput, pressure, kept promises and shed tiers."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity, Holdings
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.tiers import Tier
from vllm_semantic_sched.policy.overload.account import QueueAccount
from vllm_semantic_sched.policy.overload.pressure import PressureMonitor, Use
from vllm_semantic_sched.policy.overload.shedding import Shedder
from vllm_semantic_sched.policy.overload.slo import SloMonitor

_HALF_LIFE = 20.0  # busy seconds in which the weight of finished tokens and busy time halves
_ENOUGH = 1.0  # busy seconds before throughput is measured
_SLO_WINDOW = 60.0  # seconds over which compliance and headroom are measured
_LOOK_SECONDS = 0.1  # between two updates of pressure and promises
_STEP_WEIGHT = 0.1  # of the newest step in the smoothed step time
_LONGEST_STEP = 5.0  # seconds; anything longer is a pause


class LoadMonitor:
    """Monitors predicted work, pressure, promises and shed tiers."""

    def __init__(
        self, policy: Policy, estimates: Estimator, holdings: Holdings, capacity: EngineCapacity
    ) -> None:
        self._policy = policy
        self._estimates = estimates
        self._holdings = holdings
        self.account = QueueAccount(policy.levels)
        self._seats = max(1, capacity.seats)
        self._kv_tokens = max(1, (capacity.blocks or 0) * capacity.block_size)
        self._finished_tokens = self._busy_seconds = 0.0  # recent ones count more
        self._kv_use = 0.0
        self._stepped: float | None = None
        self._step_seconds = 0.0
        self._looked = float("-inf")
        self.pressure = PressureMonitor()
        self.shedder = Shedder()
        self.slo = SloMonitor(self.tiers, _SLO_WINDOW)
        self._recent = SloMonitor(self.tiers, policy.shedding.window)

    def adopt(self, policy: Policy) -> None:
        """Switch to a new policy; measurements are kept as far as their windows stay the same."""
        old, self._policy = self._policy, policy
        self.slo.adopt(policy.all_tiers)
        if old.shedding.window == policy.shedding.window:
            self._recent.adopt(policy.all_tiers)
        else:
            self._recent = SloMonitor(policy.all_tiers, policy.shedding.window)

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tier of each level."""
        return self._policy.all_tiers

    # Events

    def runs(self, job: Job) -> None:
        """Update the expected tokens of a running job."""
        self._holdings.expect(job, self._estimates.tokens(job))

    def first_token(self, job: Job) -> None:
        """Record a job's time to first token."""
        if job.first_token is not None:
            self._record(job, job.first_token, ttft=job.first_token - job.arrival)

    def ended(self, job: Job, now: float, completed: bool) -> None:
        """Record an ended job; its latencies count only if it completed."""
        if job.generated:
            self._finished_tokens += job.tokens
        if completed and job.first_token is not None:
            more = job.generated - 1
            tpot = (now - job.first_token) / more if more > 0 else None
            self._record(job, now, tpot=tpot, e2e=now - job.arrival)

    def stepped(self, now: float, kv_use: float) -> None:
        """Record the begin of an engine step; `kv_use` is the share of KV blocks in use."""
        self._kv_use = kv_use
        if self._stepped is not None and len(self._holdings):
            seconds = now - self._stepped
            if 0 <= seconds < _LONGEST_STEP:
                fade = 0.5 ** (seconds / _HALF_LIFE)
                self._finished_tokens *= fade
                self._busy_seconds = self._busy_seconds * fade + seconds
                self._step_seconds += _STEP_WEIGHT * (seconds - self._step_seconds)
        self._stepped = now

    def look(self, now: float) -> None:
        """Update pressure and shedding, at most every 0.1 s; O(levels)."""
        if 0 <= now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        self.slo.advance(now)
        self._recent.advance(now)
        self.pressure.observe(self.use(), self._policy.pressure, now)
        calm = not self.pressure.present and self.account.all.requests < self._seats
        self.shedder.observe(self._broken(now), calm, self._policy.shedding, self.tiers, now)

    # Derived state

    def use(self) -> Use:
        """Use of each resource, now and as predicted."""
        waiting, bound = self.account.all.requests, self._policy.admission.queue.requests
        promised = [tier.slo.tpot for tier in self.tiers if tier.slo.tpot is not None]
        return Use(
            kv=max(self._kv_use, self._predicted_tokens() / self._kv_tokens),
            seats=(len(self._holdings) + waiting) / self._seats,
            queue=waiting / bound if bound else 0.0,
            step=self._step_seconds / min(promised) if promised and len(self._holdings) else 0.0,
        )

    def outstanding(self) -> list[float]:
        """Predicted tokens of waiting and running jobs, per level."""
        return [
            held.tokens + self.account.level(level).tokens
            for level, held in enumerate(self._holdings.levels())
        ]

    def drain_seconds(self, level: int) -> float:
        """Predicted time to clear the work ahead of a new request of this level: waiting work at
        least as urgent, and half of the running work."""
        ahead = self.account.tokens_up_to(level) + self._predicted_tokens() / 2
        if self._busy_seconds >= _ENOUGH and self._finished_tokens > 0:
            return ahead / (self._finished_tokens / self._busy_seconds)
        # By the profile, with all seats decoding.
        step = self._estimates.profile.batch_terms.sequences(self._seats)
        return ahead / (self._seats / max(step, 1e-6))

    def is_shed(self, level: int) -> bool:
        """Whether new requests of a level are refused."""
        return self.shedder.is_shed(self.tiers[level], self.tiers)

    def _broken(self, now: float) -> bool:
        """Whether a promise to a tier that would benefit from shedding is broken: by measured
        latencies, or because its oldest request has already waited too long."""
        rules = self._policy.shedding
        if not rules.enabled:
            return False
        for level, tier in enumerate(self.tiers):
            if self.shedder.benefits(tier, self.tiers):
                if self._recent.keeps_promise(level, rules.min_samples) is False:
                    return True
                oldest, promised = self.account.oldest(level), tier.slo.ttft
                if oldest and promised is not None and now - oldest.arrival > promised:
                    return True
        return False

    def _predicted_tokens(self) -> float:
        """Total KV tokens that running jobs are predicted to need."""
        return sum(held.tokens for held in self._holdings.levels())

    def _record(self, job: Job, now: float, **seconds: float | None) -> None:
        for monitor in (self.slo, self._recent):
            monitor.record(job.level, **seconds, now=now)
