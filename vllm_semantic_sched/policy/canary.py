"""Compares a new policy with the current one on live traffic, and ends it if it breaks a promise.

On one engine the two take turns: in each period the new policy has the last `share`. Of several
engines some have it all the time. A request belongs to the policy in force when it arrived. Those
that arrive soon after a change still meet the other policy's queue, and do not count.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from vllm_semantic_sched.policy.config.tiers import Tier
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.overload.slo import MEASURES
from vllm_semantic_sched.policy.record.lifecycle import Listener, Transition

ARMS = ("current", "new")
Role = Literal["turns", "current", "new"]

_CERTAIN = 1.96  # standard errors of the intervals that are shown
# A promise counts as broken if chance would miss it as often less than once in 10,000 times: it is
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
    watch: tuple[str, ...]  # measures whose promises end it (`overload.slo.MEASURES`)
    role: Role = "turns"  # of this engine

    def turn(self, elapsed: float) -> tuple[str, float]:
        """The policy in force after so many seconds, and for how long it has been."""
        within = elapsed % self.period
        if self.role != "turns":
            return self.role, within
        begin = self.period * (1.0 - self.share)
        return ("current", within) if within < begin else ("new", within - begin)

    def settled(self, elapsed: float) -> bool:
        """Whether a request that arrives then counts."""
        arm, since = self.turn(elapsed)
        share = self.share if arm == "new" else 1.0 - self.share
        return self.role != "turns" or since >= _UNSETTLED * share * self.period


@dataclass(slots=True)
class Tally:
    """Latencies of a level under one policy, by turn: requests of one share their luck."""

    count: int = 0  # requests
    met: int = 0  # those that met their promise; without one, all
    clusters: int = 0  # turns that are over
    _open: tuple[int, int, float] = (-1, 0, 0.0)  # number, requests, sum of logarithms
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # n, s, s*s, s*n, n*n

    def add(self, seconds: float, met: bool, cluster: int) -> None:
        """Count a request of the turn `cluster`."""
        self.count += 1
        self.met += met
        if cluster != self._open[0]:
            self._close()
        _, requests, total = self._open
        self._open = (cluster, requests + 1, total + math.log(max(seconds, 1e-6)))

    @property
    def kept(self) -> float:
        """Share that met the promise; NaN without requests."""
        return self.met / self.count if self.count else math.nan

    def mean(self) -> tuple[float, float]:
        """Mean log latency (NaN without any) and its standard error (inf below two turns)."""
        clusters, (n, s, ss, sn, nn) = self._all_turns()
        mean = s / n if n else math.nan
        if clusters < 2:
            return mean, math.inf
        spread = max(0.0, ss - 2 * mean * sn + mean**2 * nn)
        return mean, math.sqrt(spread * clusters / (clusters - 1)) / n

    def breaks(self, percentile: float, current: Tally) -> bool:
        """Whether surely fewer meet the promise than `percentile` %, and than under the current
        policy (Chernoff's bound)."""
        allowed, missed = 1.0 - percentile / 100, 1.0 - self.kept if self.count else 0.0
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

    def _all_turns(self) -> tuple[int, list[float]]:
        """Clusters and sums with the open turn."""
        _, requests, total = self._open
        if not requests:
            return self.clusters, self._sums
        more = (requests, total, total**2, total * requests, requests**2)
        return self.clusters + 1, [sum(pair) for pair in zip(self._sums, more, strict=True)]

    def _close(self) -> None:
        self.clusters, self._sums = self._all_turns()
        self._open = (self._open[0], 0, 0.0)

    def plain(self) -> list[Any]:
        """As plain values, which can be added up over engines; ends the present turn."""
        self._close()
        return [self.count, self.met, self.clusters, *self._sums]

    @classmethod
    def of_plain(cls, values: Iterable[Any]) -> Tally:
        count, met, clusters, *sums = values
        return cls(count, met, clusters, _sums=sums)


Tallies = dict[str, list[dict[str, Tally]]]
"""By policy, level and measure."""


class Canary(Listener):
    """The requests of a canary on one engine. Times are on the clock of `Job.arrival`."""

    def __init__(self, plan: Plan, tiers: Sequence[Tier], start: float) -> None:
        self.plan = plan
        self.tallies: Tallies = {
            arm: [{measure: Tally() for measure in MEASURES} for _ in tiers] for arm in ARMS
        }
        self._tiers = tiers
        self._start = start
        self._waiting: dict[Job, None] = {}  # for a first token, oldest first

    def arm(self, now: float) -> str:
        """The policy in force."""
        return self.plan.turn(now - self._start)[0]

    def is_over(self, now: float) -> bool:
        """Whether the lease has ended."""
        return now - self._start >= self.plan.lease

    def moved(self, transition: Transition) -> None:
        job, before, state, time, *_ = transition
        if before is None:
            self._waiting[job] = None
        elif state.is_end:
            self._waiting.pop(job, None)
        if state is JobState.COMPLETED:
            self._add(job, "e2e", time - job.arrival)
            if job.first_token is not None and job.generated > 1:
                self._add(job, "tpot", (time - job.first_token) / (job.generated - 1))

    def first_token(self, job: Job) -> None:
        self._waiting.pop(job, None)
        if job.first_token is not None:
            self._add(job, "ttft", job.first_token - job.arrival)

    def broken(self, now: float) -> str | None:
        """The promise that the new policy breaks and the current one keeps better; None: none."""
        overdue = self._overdue(now)
        for level, tier in enumerate(self._tiers):
            for measure in self.plan.watch:
                if getattr(tier.slo, measure) is None:
                    continue
                current, new = (self.tallies[arm][level][measure] for arm in ARMS)
                if measure == "ttft" and overdue[level]:
                    new = Tally(new.count + overdue[level], new.met)
                if new.breaks(tier.slo.percentile, current):
                    return f"{measure} of {tier.name}: {new.met} of {new.count} kept"
        return None

    def _overdue(self, now: float) -> Counter[int]:
        """By level: old requests under the new policy whose first token is late already."""
        counts: Counter[int] = Counter()
        for job in itertools.islice(self._waiting, _OLDEST):
            elapsed, target = job.arrival - self._start, self._tiers[job.level].slo.ttft
            late = target is not None and now - job.arrival > target
            if late and self.plan.turn(elapsed)[0] == "new" and self.plan.settled(elapsed):
                counts[job.level] += 1
        return counts

    def _add(self, job: Job, measure: str, seconds: float) -> None:
        elapsed = job.arrival - self._start
        if elapsed < 0 or not self.plan.settled(elapsed):
            return
        target = getattr(self._tiers[job.level].slo, measure)
        tally = self.tallies[self.plan.turn(elapsed)[0]][job.level][measure]
        met = target is None or seconds <= target
        tally.add(seconds, met, int(elapsed // self.plan.period))


class Difference(NamedTuple):
    """A measure of one level under both policies, the current one first."""

    level: int
    measure: str
    counts: tuple[int, int]  # requests
    means: tuple[float, float]  # geometric, in seconds; NaN without requests
    kept: tuple[float, float]  # shares that met the promise (1 without one); NaN without requests
    # 95 % interval of the ratio of the means, new / current; None with fewer than two turns each.
    interval: tuple[float, float] | None


def compare(each: Sequence[dict[str, Any]]) -> list[Difference]:
    """The measures that a policy has requests of, over all engines (`plain`)."""
    found = []
    for level in range(len(each[0]["new"])) if each else ():
        for measure in MEASURES:
            current, new = (
                Tally.of_plain(
                    map(sum, zip(*(one[arm][level][measure] for one in each), strict=True))
                )
                for arm in ARMS
            )
            if not current.count and not new.count:
                continue
            (before, error), (after, other) = current.mean(), new.mean()
            ratio, wide = after - before, _CERTAIN * math.hypot(error, other)
            finite = math.isfinite(wide)
            interval = (math.exp(ratio - wide), math.exp(ratio + wide)) if finite else None
            counts, kept = (current.count, new.count), (current.kept, new.kept)
            means = (math.exp(before), math.exp(after))
            found.append(Difference(level, measure, counts, means, kept, interval))
    return found


def plain(tallies: Tallies) -> dict[str, Any]:
    """The requests of one engine as plain values, for `compare`."""
    return {
        arm: [{name: tally.plain() for name, tally in level.items()} for level in levels]
        for arm, levels in tallies.items()
    }
