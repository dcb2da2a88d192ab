"""Load of the engine: predicted work, throughput, pressure, SLO met and shed tiers."""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import Derived, PolicyRef
from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.facts.lately import Decayed
from vllm_semantic_sched.policy.limits import Limits
from vllm_semantic_sched.policy.overload.account import QueueAccount
from vllm_semantic_sched.policy.overload.slo import SloMonitor

_RECENT = 29.0  # busy seconds after which finished tokens and busy time count 1/e
_TOKENS, _SECONDS = 0, 1  # places in `LoadMonitor._done`
_ENOUGH = 1.0  # busy seconds before throughput is measured
_SLO_WINDOW = 60.0  # seconds over which compliance and headroom are measured
_LOOK_SECONDS = 0.1  # between two updates of pressure and SLOs
_STEP_WEIGHT = 0.1  # of the newest step in the smoothed step time
_LONGEST_STEP = 5.0  # seconds; anything longer is a pause
_SHED_WINDOW = 5.0  # seconds of latencies that decide on shedding: some tens of requests
_SAMPLES = 5  # measured requests in that window from which a tier is judged; fewer are chance
# Seconds that SLOs must be met before the tier shed last is served again. Doubles each time
# that tier soon has to be shed again, up to eightfold, so that shedding does not oscillate.
RECOVER, _LONGEST_RECOVERY = 2.0, 8
ESCALATE = 1.0  # fewest seconds between shedding one tier and the next
# Pressure falls after use has been MARGIN (a share) below the mark that raised it for CALM seconds.
CALM, MARGIN = 2.0, 0.1


class _Marks(NamedTuple):
    """Use of a resource from which the pressure is warning and critical; 1: used up."""

    warning: float
    critical: float


# KV and seats: beyond 1 requests wait or are preempted, which the order absorbs for a while; with
# four requests per seat a new one waits for three answers. Queue and steps: 1 misses an SLO.
_KV, _SEATS = _Marks(0.9, 1.2), _Marks(1.5, 4.0)
_QUEUE, _STEP = _Marks(0.5, 0.9), _Marks(0.8, 1.0)


class PressureLevel(enum.IntEnum):
    """Ordered: a higher level is worse."""

    NONE = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Use:
    """Use of each resource, relative to its limit; predicted need can exceed 1. 0: unlimited."""

    kv: float = 0.0  # blocks in use or predicted to be needed by running requests, the larger
    seats: float = 0.0  # running and waiting requests per seat
    queue: float = 0.0  # waiting requests, relative to `admission.queue`
    step: float = 0.0  # smoothed step time, relative to the shortest SLO for `tpot` of a tier


class PressureMonitor:
    """The pressure in force, which rises at once and falls with hysteresis."""

    def __init__(self) -> None:
        self.level = PressureLevel.NONE  # in force
        self.present = PressureLevel.NONE  # by the last observation alone
        self._below_since: float | None = None

    def observe(self, use: Use, now: float) -> PressureLevel:
        """Update with the present use; returns the level in force."""
        self.present = _present(use, 1.0)
        if self.present > self.level:
            self.level, self._below_since = self.present, None
        elif (down := _present(use, 1.0 - MARGIN)) < self.level:
            if self._below_since is None:
                self._below_since = now
            if now - self._below_since >= CALM:
                self.level, self._below_since = down, None
        else:
            self._below_since = None
        return self.level


def _present(use: Use, scale: float) -> PressureLevel:
    uses = (use.kv, _KV), (use.seats, _SEATS), (use.queue, _QUEUE), (use.step, _STEP)
    if any(value >= marks.critical * scale for value, marks in uses):
        return PressureLevel.CRITICAL
    warned = any(value >= marks.warning * scale for value, marks in uses)
    return PressureLevel.WARNING if warned else PressureLevel.NONE


class Shedder:
    """Decides which tiers are shed, one step up or down at a time."""

    def __init__(self, ref: PolicyRef) -> None:
        self._ref = ref
        self._orders = Derived(ref, _shed_orders)
        self.stage = 0  # number of shed orders in force; 0: nothing is shed
        self._changed = float("-inf")
        self._kept_since: float | None = None
        self._calm_since: float | None = None
        self._patience = 1

    def is_shed(self, tier: Tier) -> bool:
        """Whether new requests of a tier are refused."""
        return tier.shed_order in self._orders.table[: self.stage]

    def benefits(self, tier: Tier) -> bool:
        """Whether a tier would stay in service if one more step were taken."""
        return tier.shed_order not in self._orders.table[: self.stage + 1]

    def observe(self, missed: bool, calm: bool, now: float) -> None:
        """Take a step if it is due: up if the SLO of a tier that would stay is `missed`, all the
        way down if the engine stays `calm`, without pressure and with few requests waiting."""
        rules = self._ref.policy.shedding
        steps = len(self._orders.table) if rules.enabled else 0
        self.stage = min(self.stage, steps)
        if not calm:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        if self._calm_since is not None and now - self._calm_since >= RECOVER:
            self.stage, self._patience, self._kept_since = 0, 1, None
        elif missed:
            self._kept_since = None
            if self.stage < steps and now - self._changed >= ESCALATE:
                self._step_up(now)
        elif self.stage:
            self._kept_since = now if self._kept_since is None else self._kept_since
            if now - self._kept_since >= RECOVER * self._patience:
                self.stage -= 1
                self._changed, self._kept_since = now, None

    def _step_up(self, now: float) -> None:
        since = now - self._changed
        if since < 4 * RECOVER and self.stage == 0:  # too early
            self._patience = min(2 * self._patience, _LONGEST_RECOVERY)
        elif since > 4 * RECOVER * _LONGEST_RECOVERY:
            self._patience = 1
        self.stage += 1
        self._changed = now


def _shed_orders(policy: Policy) -> Sequence[int]:
    """The orders in which tiers are shed, first ones first."""
    orders = {tier.shed_order for tier in policy.all_tiers if tier.shed_order is not None}
    return sorted(orders)


class LoadMonitor:
    """Monitors predicted work, pressure, SLOs and shed tiers."""

    def __init__(
        self, ref: PolicyRef, estimates: Estimator, limits: Limits, capacity: EngineCapacity
    ) -> None:
        self._ref = ref
        self._estimates = estimates
        self.limits = limits
        self.allocations = limits.allocations
        self.account = QueueAccount(self.allocations)
        self._seats = max(1, capacity.seats)
        # Without a limit of blocks, KV is never short.
        blocks = math.inf if capacity.blocks is None else capacity.blocks
        self._kv_tokens = max(1, blocks * capacity.block_size)
        self._done = Decayed(2)  # finished tokens and busy seconds
        self._kv_use = 0.0
        self._stepped: float | None = None
        self._step_seconds = 0.0
        self._looked = float("-inf")
        self.pressure = PressureMonitor()
        self.shedder = Shedder(ref)
        self.slo = SloMonitor(ref, _SLO_WINDOW)
        self._recent = SloMonitor(ref, _SHED_WINDOW)

    @property
    def tiers(self) -> Sequence[Tier]:
        """The tiers of the policy in force, by level."""
        return self._ref.policy.all_tiers

    # Events

    def runs(self, job: Job) -> None:
        """Update the expected tokens of a running job."""
        self.allocations.expect(job, self._estimates.tokens(job))

    def first_token(self, job: Job) -> None:
        """Record a job's time to first token."""
        if job.first_token is not None:
            self._record(job, job.first_token, ttft=job.first_token - job.arrival)

    def ended(self, job: Job, now: float, completed: bool) -> None:
        """Record an ended job; its latencies count only if it completed."""
        if job.generated:
            self._done.add(_TOKENS, job.tokens)
        if completed and job.first_token is not None:
            more = job.generated - 1
            tpot = (now - job.first_token) / more if more > 0 else None
            self._record(job, now, tpot=tpot, e2e=now - job.arrival)

    def stepped(self, now: float, kv_use: float) -> None:
        """Record the begin of an engine step; `kv_use` is the share of KV blocks in use."""
        self._kv_use = kv_use
        if self._stepped is not None and len(self.allocations):
            seconds = now - self._stepped
            if 0 <= seconds < _LONGEST_STEP:
                self._done.age(seconds, _RECENT)
                self._done.add(_SECONDS, seconds)
                self._step_seconds += _STEP_WEIGHT * (seconds - self._step_seconds)
        self._stepped = now

    def look(self, now: float) -> None:
        """Update pressure and shedding, at most every 0.1 s; O(levels)."""
        if 0 <= now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        self.slo.advance(now)
        self._recent.advance(now)
        self.pressure.observe(self.use(), now)
        calm = not self.pressure.present and self.allocations.all.queued < self._seats
        self.shedder.observe(self._missed(now), calm, now)

    # Derived state

    def use(self) -> Use:
        """Use of each resource, now and as predicted."""
        waiting = self.allocations.all.queued
        targets = [tier.slo.tpot for tier in self.tiers if tier.slo.tpot is not None]
        return Use(
            kv=max(self._kv_use, self._predicted_tokens() / self._kv_tokens),
            seats=(len(self.allocations) + waiting) / self._seats,
            queue=waiting / self.limits.table.all.queued,
            step=self._step_seconds / min(targets) if targets and len(self.allocations) else 0.0,
        )

    def outstanding(self) -> list[float]:
        """Predicted tokens of waiting and running jobs, per level."""
        return [held.tokens + held.queued_tokens for held in self.allocations.levels]

    def drain_seconds(self, level: int) -> float:
        """Predicted time to clear waiting work at least as urgent, and half of the running work."""
        waiting = sum(held.queued_tokens for held in self.allocations.levels[: level + 1])
        return self.serve_seconds(waiting + self._predicted_tokens() / 2)

    def seconds_to_start(self, tokens: float, requests: int, served: float) -> float:
        """Predicted time until a waiting request gets a seat. While seats or KV are short, the
        engine serves the tokens ahead of it, and those of one more request until a seat comes free.

        Args:
            tokens: of work of the `requests` that are ahead of it in the queue.
            served: tokens that running requests have got so far.
        """
        running, held = len(self.allocations), self._predicted_tokens()
        if running + requests < self._seats and held + tokens <= self._kv_tokens:
            return 0.0
        return self.least_seconds(tokens + held / max(1, running), served)

    def serve_seconds(self, work: float) -> float:
        """Predicted time to serve so many tokens, prompt and output."""
        return work / (self._measured_speed() or self._speed_by_profile())

    def least_seconds(self, work: float, served: float = 0.0) -> float:
        """The shorter of the measured and the profile's time to serve so many tokens: before a
        burst the engine may have been slow for want of requests. `served`: as of
        `_measured_speed`."""
        return work / max(self._measured_speed(served) or 0.0, self._speed_by_profile())

    def _measured_speed(self, served: float = 0.0) -> float | None:
        """Tokens per busy second; None until it is known. `served` so far to running requests: in
        the first seconds of a burst, few of its tokens are those of ended requests."""
        done, busy = self._done.sums
        done += served * max(0.0, 1.0 - busy / _RECENT)
        return done / busy if busy >= _ENOUGH and done > 0 else None

    def _speed_by_profile(self) -> float:
        """Output tokens per second with all seats decoding."""
        step = self._estimates.profile.batch_terms.sequences(self._seats)
        return self._seats / max(step, 1e-6)

    @property
    def step_seconds(self) -> float:
        """Time of a step with all seats in use: by the profile or as measured lately, the longer
        one."""
        by_profile = self._estimates.profile.batch_terms.sequences(self._seats)
        return max(by_profile, self._step_seconds)

    def is_shed(self, level: int) -> bool:
        """Whether new requests of a level are refused."""
        return self.shedder.is_shed(self.tiers[level])

    def _missed(self, now: float) -> bool:
        """Whether a tier that would benefit from shedding misses its SLO: by measured
        latencies, or because its oldest request has already waited too long."""
        rules = self._ref.policy.shedding
        if not rules.enabled:
            return False
        for level, tier in enumerate(self.tiers):
            if self.shedder.benefits(tier):
                if self._recent.meets_slo(level, _SAMPLES) is False:
                    return True
                oldest, target = self.account.oldest(level), tier.slo.ttft
                if oldest and target is not None and now - oldest.arrival > target:
                    return True
        return False

    def _predicted_tokens(self) -> float:
        """Total KV tokens that running jobs are predicted to need."""
        return sum(held.tokens for held in self.allocations.levels)

    def _record(self, job: Job, now: float, **seconds: float | None) -> None:
        for monitor in (self.slo, self._recent):
            monitor.record(job.level, **seconds, now=now)
