"""Compares a new policy with the current one on live traffic, and ends it if it misses an SLO.

On one engine the two take turns: in each period the new policy has the last `share`. Of several
engines some have it all the time. A request belongs to the policy in force when it arrived. Those
that arrive soon after a change still meet the other policy's queue, and do not count.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.overload.slo import MEASURES
from vllm_semantic_sched.policy.record.lifecycle import Listener, Transition

ARMS = ("current", "new")
Role = Literal["turns", "current", "new"]

_CERTAIN = 1.96  # standard errors of the intervals that are shown
# An SLO counts as missed if chance would miss it as often less than once in 10,000 times: it is
# judged again and again.
_SURE = math.log(10_000)
_OLDEST = 1000  # waiting requests that are looked at
_UNSETTLED = 0.2  # of a turn, after a change


@dataclass(frozen=True, slots=True)
class Plan:
    """How a canary is to run."""

    share: float  # part of each period, 0 to 1, in which the new policy is in force
    period: float  # seconds
    lease: float  # seconds after which it ends
    watch: tuple[str, ...]  # measures whose SLOs end it (`overload.slo.MEASURES`)
    role: Role = "turns"  # of this engine

    def turn(self, elapsed: float) -> tuple[str, float]:
        """The policy in force after so many seconds, and for how long it has been."""
        within = elapsed % self.period
        if self.role != "turns":
            return self.role, within
        begin = self.period * (1.0 - self.share)
        if within < begin:
            return "current", within
        return "new", within - begin

    def settled(self, elapsed: float) -> bool:
        """Whether a request that arrives then counts."""
        arm, since = self.turn(elapsed)
        share = self.share if arm == "new" else 1.0 - self.share
        return self.role != "turns" or since >= _UNSETTLED * share * self.period


class _Turn(NamedTuple):
    """The requests of a level in one turn."""

    number: int
    requests: int = 0
    logs: float = 0.0  # sum of the logarithms of their latencies


class _Turns(NamedTuple):
    """Sums over turns, for the ratio-to-size estimate of a mean from clusters of unequal sizes
    (Cochran, Sampling Techniques, 1977, chapter 9A)."""

    requests: float = 0.0
    logs: float = 0.0  # see `_Turn`
    logs_squared: float = 0.0
    logs_by_requests: float = 0.0
    requests_squared: float = 0.0

    def plus(self, turn: _Turn) -> _Turns:
        """The sums with one more turn."""
        return _Turns(
            self.requests + turn.requests,
            self.logs + turn.logs,
            self.logs_squared + turn.logs**2,
            self.logs_by_requests + turn.logs * turn.requests,
            self.requests_squared + turn.requests**2,
        )


_NO_TURN = _Turn(-1)
_NO_TURNS = _Turns()


@dataclass(slots=True)
class Tally:
    """Latencies of a level under one policy, by turn: requests of one share their luck."""

    count: int = 0  # requests
    met: int = 0  # those that met their SLO; without one, all
    clusters: int = 0  # turns that are over
    _open: _Turn = _NO_TURN
    _sums: _Turns = _NO_TURNS  # over the turns that are over

    def add(self, seconds: float, met: bool, cluster: int) -> None:
        """Count a request of the turn `cluster`."""
        self.count += 1
        self.met += met
        if cluster != self._open.number:
            self._close()
        log = math.log(max(seconds, 1e-6))
        self._open = _Turn(cluster, self._open.requests + 1, self._open.logs + log)

    @property
    def kept(self) -> float:
        """Share that met the SLO; NaN without requests."""
        return self.met / self.count if self.count else math.nan

    def mean(self) -> tuple[float, float]:
        """Mean log latency (NaN without any) and its standard error (inf below two turns)."""
        clusters, sums = self._all_turns()
        mean = sums.logs / sums.requests if sums.requests else math.nan
        if clusters < 2:
            return mean, math.inf
        # Sum over turns of (logs - mean * requests)^2.
        squares = (
            sums.logs_squared - 2 * mean * sums.logs_by_requests + mean**2 * sums.requests_squared
        )
        variance = max(0.0, squares) * clusters / (clusters - 1)
        return mean, math.sqrt(variance) / sums.requests

    def breaks(self, percentile: float, current: Tally) -> bool:
        """Whether surely fewer meet the SLO than `percentile` %, and than under the current
        policy (Chernoff's bound)."""
        allowed = 1.0 - percentile / 100
        missed = 1.0 - self.kept if self.count else 0.0
        if current.count:
            usual = 1.0 - current.kept
            error = math.sqrt(usual * (1.0 - usual) / current.count)
            allowed = max(allowed, usual + _CERTAIN * error)
        if missed <= allowed or not allowed:
            return missed > allowed
        surprise = missed * math.log(missed / allowed)
        if missed < 1.0:
            surprise += (1.0 - missed) * math.log((1.0 - missed) / (1.0 - allowed))
        return self.count * surprise > _SURE

    def _all_turns(self) -> tuple[int, _Turns]:
        """Clusters and sums with the open turn."""
        if not self._open.requests:
            return self.clusters, self._sums
        return self.clusters + 1, self._sums.plus(self._open)

    def _close(self) -> None:
        self.clusters, self._sums = self._all_turns()
        self._open = _Turn(self._open.number)

    def plain(self) -> list[Any]:
        """As plain values, which can be added up over engines; ends the present turn."""
        self._close()
        return [self.count, self.met, self.clusters, *self._sums]

    @classmethod
    def of_plain(cls, values: Iterable[Any]) -> Tally:
        """The tally that `plain` described, or the sum of several."""
        count, met, clusters, *sums = values
        return cls(count, met, clusters, _sums=_Turns(*sums))


Tallies = dict[str, list[dict[str, Tally]]]
"""By policy, level and measure."""


class Canary(Listener):
    """The requests of a canary on one engine. Times are on the clock of `Job.arrival`."""

    def __init__(self, plan: Plan, tiers: Sequence[Tier], start: float) -> None:
        self.plan = plan
        self.tallies: Tallies = {}
        for arm in ARMS:
            self.tallies[arm] = [{measure: Tally() for measure in MEASURES} for _ in tiers]
        self._tiers = tiers
        self._start = start
        self._waiting: dict[Job, None] = {}  # for a first token, oldest first

    def arm(self, now: float) -> str:
        """The policy in force."""
        arm, _ = self.plan.turn(now - self._start)
        return arm

    def is_over(self, now: float) -> bool:
        """Whether the lease has ended."""
        return now - self._start >= self.plan.lease

    def moved(self, transition: Transition) -> None:
        """Note arrivals and ends; a completed request counts in `e2e` and `tpot`."""
        job = transition.job
        if transition.before is None:
            self._waiting[job] = None
        elif transition.state.is_end:
            self._waiting.pop(job, None)
        if transition.state is JobState.COMPLETED:
            self._add(job, "e2e", transition.time - job.arrival)
            if job.first_token is not None and job.generated > 1:
                decoding = transition.time - job.first_token
                self._add(job, "tpot", decoding / (job.generated - 1))

    def first_token(self, job: Job) -> None:
        """Count the request in `ttft`."""
        self._waiting.pop(job, None)
        if job.first_token is not None:
            self._add(job, "ttft", job.first_token - job.arrival)

    def broken(self, now: float) -> str | None:
        """The SLO that the new policy misses and the current one meets more often; None: none."""
        overdue = self._overdue(now)
        for level, tier in enumerate(self._tiers):
            for measure in self.plan.watch:
                if getattr(tier.slo, measure) is None:
                    continue
                current = self.tallies["current"][level][measure]
                new = self.tallies["new"][level][measure]
                if measure == "ttft" and overdue[level]:
                    new = Tally(new.count + overdue[level], new.met)
                if new.breaks(tier.slo.percentile, current):
                    return f"{measure} of {tier.name}: {new.met} of {new.count} kept"
        return None

    def _overdue(self, now: float) -> Counter[int]:
        """By level: old requests under the new policy whose first token is late already."""
        counts: Counter[int] = Counter()
        for job in itertools.islice(self._waiting, _OLDEST):
            target = self._tiers[job.level].slo.ttft
            if target is None or now - job.arrival <= target:
                continue
            elapsed = job.arrival - self._start
            arm, _ = self.plan.turn(elapsed)
            if arm == "new" and self.plan.settled(elapsed):
                counts[job.level] += 1
        return counts

    def _add(self, job: Job, measure: str, seconds: float) -> None:
        elapsed = job.arrival - self._start
        if elapsed < 0 or not self.plan.settled(elapsed):
            return
        target = getattr(self._tiers[job.level].slo, measure)
        arm, _ = self.plan.turn(elapsed)
        tally = self.tallies[arm][job.level][measure]
        met = target is None or seconds <= target
        tally.add(seconds, met, cluster=int(elapsed // self.plan.period))


class Difference(NamedTuple):
    """A measure of one level under both policies, the current one first."""

    level: int
    measure: str
    counts: tuple[int, int]  # requests
    means: tuple[float, float]  # geometric, in seconds; NaN without requests
    kept: tuple[float, float]  # shares that met the SLO (1 without one); NaN without requests
    # 95 % interval of the ratio of the means, new / current; None with fewer than two turns each.
    interval: tuple[float, float] | None


def compare(engines: Sequence[dict[str, Any]]) -> list[Difference]:
    """The measures that a policy has requests of, over all engines (`plain`)."""
    differences: list[Difference] = []
    if not engines:
        return differences
    for level in range(len(engines[0]["new"])):
        for measure in MEASURES:
            current = _over_engines(engines, "current", level, measure)
            new = _over_engines(engines, "new", level, measure)
            if current.count or new.count:
                differences.append(_difference(level, measure, current, new))
    return differences


def _over_engines(engines: Sequence[dict[str, Any]], arm: str, level: int, measure: str) -> Tally:
    tallies = [engine[arm][level][measure] for engine in engines]
    return Tally.of_plain(map(sum, zip(*tallies, strict=True)))


def _difference(level: int, measure: str, current: Tally, new: Tally) -> Difference:
    current_mean, current_error = current.mean()
    new_mean, new_error = new.mean()
    ratio = new_mean - current_mean  # of logarithms
    half_width = _CERTAIN * math.hypot(current_error, new_error)
    interval = None
    if math.isfinite(half_width):
        interval = (math.exp(ratio - half_width), math.exp(ratio + half_width))
    return Difference(
        level,
        measure,
        counts=(current.count, new.count),
        means=(math.exp(current_mean), math.exp(new_mean)),
        kept=(current.kept, new.kept),
        interval=interval,
    )


def plain(tallies: Tallies) -> dict[str, Any]:
    """The requests of one engine as plain values, for `compare`."""
    values: dict[str, Any] = {}
    for arm, levels in tallies.items():
        values[arm] = [
            {measure: tally.plain() for measure, tally in level.items()} for level in levels
        ]
    return values
