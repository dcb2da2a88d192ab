"""What the engine carries, how fast it works it off, and how well it keeps its promises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.overload.account import QueueAccount
from vllm_semantic_sched.policy.overload.drain import DrainRate
from vllm_semantic_sched.policy.overload.pressure import PressureLevel, PressureMonitor, Use
from vllm_semantic_sched.policy.overload.shedding import Shedder
from vllm_semantic_sched.policy.overload.slo import SloMonitor
from vllm_semantic_sched.policy.overload.tiers import Tier

if TYPE_CHECKING:
    from vllm_semantic_sched.policy.config import Policy
    from vllm_semantic_sched.policy.core import SchedulingCore

# How often pressure and promises are looked at.
_LOOK_SECONDS = 0.1
# Weight of a step in the smoothed time of a step, and a pause that is not one.
_STEP_WEIGHT = 0.1
_LONGEST_STEP = 5.0


class LoadMonitor:
    """Need of running jobs, pressure, promises, and which tiers are shed.

    Need counts tokens that are predicted, not only those that are there.

    Args:
        seats: requests that can run at a time.
        kv_tokens: tokens that the KV cache holds.
    """

    def __init__(
        self, core: SchedulingCore, account: QueueAccount, seats: int, kv_tokens: int
    ) -> None:
        self._core = core
        self._account = account
        self._seats = max(1, seats)
        self._kv_tokens = max(1, kv_tokens)
        self._need: dict[Job, tuple[int, float]] = {}
        self._need_by_level = [0.0] * core.policy.levels
        self._drain = DrainRate()
        self._kv_use = 0.0
        self._stepped: float | None = None
        self._step_seconds = 0.0
        self._looked = float("-inf")
        self._policy = core.policy
        self.tiers = _tiers(core.policy)
        self.pressure = PressureMonitor()
        self.shedder = Shedder()
        self.slo, self._recent = self._monitors()

    # What happens

    def runs(self, job: Job) -> None:
        """A job has a seat, or what is expected of it has changed while it has one."""
        self.stops(job)
        need = job.prompt_tokens + self._core.expected_output(job)
        self._need[job] = (job.level, need)
        self._need_by_level[job.level] += need

    def stops(self, job: Job) -> None:
        """A job has no seat any more."""
        level, need = self._need.pop(job, (0, 0.0))
        self._need_by_level[level] -= need
        if not self._need:  # no rounding is left over
            self._need_by_level = [0.0] * len(self._need_by_level)

    def is_running(self, job: Job) -> bool:
        """Whether a job has a seat."""
        return job in self._need

    def first_token(self, job: Job) -> None:
        """A job's first token is there."""
        if job.first_token is not None:
            self._record(job, job.first_token, ttft=job.first_token - job.arrival)

    def ended(self, job: Job, now: float, completed: bool) -> None:
        """A job is gone; if it got its whole answer, its latencies count."""
        self.stops(job)
        if job.generated:
            self._drain.finished(job.tokens)
        if completed and job.first_token is not None:
            more = job.generated - 1
            tpot = (now - job.first_token) / more if more > 0 else None
            self._record(job, now, tpot=tpot, e2e=now - job.arrival)

    def stepped(self, now: float, kv_use: float) -> None:
        """The engine arranges a step; `kv_use` is the share of its KV blocks in use."""
        self._kv_use = kv_use
        if self._stepped is not None and self._need:
            seconds = now - self._stepped
            if 0 <= seconds < _LONGEST_STEP:
                self._drain.busy(seconds)
                self._step_seconds += _STEP_WEIGHT * (seconds - self._step_seconds)
        self._stepped = now

    def look(self, now: float) -> None:
        """Bring pressure and shedding up to date; O(levels), and now and then only."""
        self._follow_policy()
        if 0 <= now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        self.slo.advance(now)
        self._recent.advance(now)
        policy = self._core.policy
        self.pressure.observe(self.use(), policy.pressure, now)
        nobody_presses = self.pressure.present is PressureLevel.NONE
        calm = nobody_presses and self._account.all.requests < self._seats
        self.shedder.observe(self._broken(now), calm, policy.shedding, self.tiers, now)

    # What is known

    def use(self) -> Use:
        """Use of each resource, now and as predicted."""
        waiting, bound = self._account.all, self._core.policy.admission.queue
        promised = [tier.slo.tpot for tier in self.tiers if tier.slo.tpot is not None]
        return Use(
            kv=max(self._kv_use, sum(self._need_by_level) / self._kv_tokens),
            seats=(len(self._need) + waiting.requests) / self._seats,
            queue=max(
                waiting.requests / bound.requests if bound.requests else 0.0,
                waiting.tokens / bound.tokens if bound.tokens else 0.0,
            ),
            step=self._step_seconds / min(promised) if promised and self._need else 0.0,
        )

    def outstanding(self) -> list[float]:
        """Predicted tokens of waiting and running jobs, per level."""
        return [
            need + self._account.level(level).tokens
            for level, need in enumerate(self._need_by_level)
        ]

    def drain_seconds(self, level: int) -> float:
        """Predicted time to serve what is before a newcomer of a level: what waits at its level
        and above, and half of what runs."""
        ahead = self._account.tokens_up_to(level) + sum(self._need_by_level) / 2
        return ahead / (self._drain.rate or self._rate_by_profile())

    def is_shed(self, level: int) -> bool:
        """Whether newcomers of a level are refused for the good of more urgent ones."""
        return self.shedder.is_shed(self.tiers[level], self.tiers)

    # Parts

    def _broken(self, now: float) -> bool:
        """Whether a promise to a tier that shedding would help is broken, by what was measured or
        because its oldest request waits too long already."""
        rules = self._core.policy.shedding
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

    def _follow_policy(self) -> None:
        old, new = self._policy, self._core.policy
        if new is old:
            return
        self._policy = new
        self.tiers = _tiers(new)
        if (old.slo, old.shedding.window) == (new.slo, new.shedding.window):
            self.slo.adopt(self.tiers)
            self._recent.adopt(self.tiers)
        else:
            self.slo, self._recent = self._monitors()

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
        return self._seats / max(self._core.profile.gamma2, 1e-6)


def _tiers(policy: Policy) -> Sequence[Tier]:
    return tuple(policy.tier(level) for level in range(policy.levels))
