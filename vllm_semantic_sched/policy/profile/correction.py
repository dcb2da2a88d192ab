"""Corrects an engine profile by measured steps of the running engine.

Decode steps of 1, 2, 4, 8 ... sequences have a level each, a factor on the given profile; prefills
and copies one factor each, for what the levels leave of a step. The speed, a factor on all levels
and on prefills, follows every step, so that levels keep their ratio while only some are visited.
"""

import math
import statistics
from dataclasses import dataclass, field

from vllm_semantic_sched.policy.profile.formula import Batch, BatchTerms, EngineProfile

# The median of so many measurements starts a factor, as soon as there are some: the first steps of
# an engine are often many times too long.
_FIRST, _SOME = 5, 3
# Later deviations are clipped to this logarithm (35 %), so that an interrupted step moves a factor
# by at most 6 %, and one that is well known by 1 %.
_LARGEST_SURPRISE = 0.3
# Most measurements that a factor is a mean of.
_LEVEL_MEMORY, _PREFILL_MEMORY, _LOAD_MEMORY = 1000, 40, 20
# Variance of the speed, in that of a step: a memory of about 17 steps.
_SPEED = 0.06
# Measurements that a later step counts for: the time of all kinds of work drifts together, so that
# most of a surprise is the speed's.
_CERTAINTY = 2
# After so many steps without a measurement, a factor is half as certain.
_STALE = 1000
# Part of a step that a kind of work must have for a first measurement: beside work of known and of
# unknown time.
_BESIDE_KNOWN, _BESIDE_UNKNOWN = 0.3, 0.9
# A mean context follows its steps by this part.
_CONTEXT_RATE = 0.05
# Limit of a factor, whatever is measured.
_BOUND = math.log(100.0)
# Make a new profile when a factor has moved this far from the one in use (5 %).
_NOTICEABLE = 0.05


@dataclass(slots=True, eq=False)
class _Factor:
    """The logarithm of measured / given time of one kind of work, less that of the speed: the mean
    of `count` measurements."""

    _memory: int
    log: float = 0.0
    count: float = 0.0
    context: float = 0.0  # mean tokens of context in steps of this many sequences
    _first: list[float] = field(default_factory=list)
    _seen: int = 0  # number of the step

    @property
    def measured(self) -> bool:
        """Whether it is more than a guess."""
        return len(self._first) >= _SOME

    @property
    def known(self) -> bool:
        """Whether its first measurements are complete."""
        return len(self._first) >= _FIRST

    def start(self, surprise: float, step: int) -> None:
        """One of the first measurements: logarithm of measured / expected time."""
        self._first.append(self.log + surprise)
        if self.measured:
            self.log = _bounded(statistics.median(self._first))
        self.count, self._seen = len(self._first), step

    def variance(self, step: int) -> float:
        """Uncertainty at this step, in the variance of a step."""
        missed, self._seen = step - self._seen, step
        if missed > 1 and self.count > _FIRST:
            self.count = max(_FIRST, self.count / (1 + missed / _STALE))
        return 1 / max(1.0, self.count)

    def move(self, by: float, certainty: float) -> None:
        """A later measurement."""
        self.log = _bounded(self.log + by)
        self.count = min(self._memory, self.count + certainty)


_Parts = list[tuple[_Factor, float]]  # seconds of a step by kind of work


class ProfileScale:
    """Measured times as corrections of a `given` profile. O(1) per step, and O(log sequences) when
    factors have changed noticeably: `profile`, with measured `batch.steps`, is a new object then.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self.given = self.profile = profile
        # Factors in `profile` on prefills, copies in both directions, decode steps of one sequence.
        self.prefill = self.load = self.decode = 1.0
        self._step = 0
        self._speed = 0.0
        self._prefill = _Factor(_PREFILL_MEMORY)
        self._load = _Factor(_LOAD_MEMORY)
        self._levels: list[_Factor] = []  # of steps of 2^i sequences
        self._given_steps: list[float] = []  # seconds of these by `given`, without context
        self._level_known = False  # whether any is
        self._largest = 1  # most sequences in a step so far
        self._grow(2)
        self._applied = self._logs()

    @property
    def batch(self) -> float:
        """Factor on decode steps of the largest batch so far in `profile`."""
        given = self.given.batch_terms.sequences(self._largest)
        return self.profile.batch_terms.sequences(self._largest) / given

    def observe_step(self, batch: Batch, seconds: float) -> None:
        """Learn from a step; `seconds` that are not positive and finite are ignored."""
        if not 0.0 < seconds < math.inf:
            return
        given, speed = self.given, math.exp(self._speed)
        levels = self._level_parts(batch, speed) if batch.sequences else []
        others: _Parts = []
        if batch.prefills:
            part = given.step_prefill(batch) * speed * math.exp(self._prefill.log)
            others.append((self._prefill, part))
        if batch.loads or batch.saves:
            others.append((self._load, given.step_transfer(batch) * math.exp(self._load.log)))
        self._learn(levels, others, seconds)

    def observe_copies(self, expected: float, seconds: float) -> None:
        """Learn from copies that should take `expected` seconds by `profile`."""
        if expected > 0.0 and 0.0 < seconds < math.inf:
            given = expected / self.load
            self._learn([], [(self._load, given * math.exp(self._load.log))], seconds)

    def _level_parts(self, batch: Batch, speed: float) -> _Parts:
        """The levels below and above the number of sequences, and their parts of the time."""
        count = batch.sequences
        lower = count.bit_length() - 1
        self._largest = max(self._largest, count)
        self._grow(lower + 2)
        context = self.given.batch_terms.per_context_token * batch.context
        above = count / (1 << lower) - 1.0
        parts = []
        for number, weight in ((lower, 1.0 - above), (lower + 1, above)):
            if weight:
                level = self._levels[number]
                seconds = self._given_steps[number] + context
                parts.append((level, weight * seconds * speed * math.exp(level.log)))
                if weight >= 0.5:
                    mean = level.context if level.count else batch.context
                    level.context = mean + _CONTEXT_RATE * (batch.context - mean)
        return parts

    def _learn(self, levels: _Parts, others: _Parts, seconds: float) -> None:
        """Attribute the surprise of a step to its kinds of work, by their parts of the expected
        time."""
        self._step += 1
        parts = levels + others
        if (expected := sum(part for _, part in parts)) <= 0.0:
            return
        unknown = [one for one in others if not one[0].known]
        if levels:
            # The levels stand and fall together: the nearer one is measured.
            level, _ = max(levels, key=lambda one: one[1])
            if not (level.known or (unknown and self._level_known)):
                unknown.append((level, sum(part for _, part in levels)))
        if unknown:
            factor, part = max(unknown, key=lambda one: one[1])
            left = seconds - expected + part
            share, enough = part / expected, _BESIDE_UNKNOWN
            if len(unknown) == 1:  # then the measured share is known as well
                share, enough = max(share, left / seconds), _BESIDE_KNOWN
            if share >= enough:
                factor.start(math.log(max(left, 0.1 * part) / part), self._step)
                self._level_known = any(level.known for level in self._levels)
                self._fill()
                self._apply()
                return
        self._follow(parts, expected, seconds)
        self._apply()

    def _follow(self, parts: _Parts, expected: float, seconds: float) -> None:
        """A Kalman filter without covariances: what is least certain moves most."""
        shares = [(factor, part / expected) for factor, part in parts]
        variances = [factor.variance(self._step) for factor, _ in shares]
        speed = 0.0
        if all(factor.known for factor, _ in shares):
            speed = _SPEED * sum(share for factor, share in shares if factor is not self._load)
        pairs = zip(shares, variances, strict=True)
        total = 1.0 + speed + sum(share * share * variance for (_, share), variance in pairs)
        surprise = math.log(seconds / expected)
        surprise = max(-_LARGEST_SURPRISE, min(surprise, _LARGEST_SURPRISE)) / total
        self._speed = _bounded(self._speed + speed * surprise)
        for (factor, share), variance in zip(shares, variances, strict=True):
            factor.move(share * variance * surprise, _CERTAINTY * share * share)

    def _grow(self, count: int) -> None:
        """Have so many levels."""
        while len(self._levels) < count:
            sequences = 1 << len(self._levels)
            self._levels.append(_Factor(_LEVEL_MEMORY))
            self._given_steps.append(self.given.batch_terms.sequences(sequences))
            self._fill()

    def _fill(self) -> None:
        """Guess levels without a measurement: on a straight line between those with one, and beyond
        them with the factor of the nearest."""
        levels, given = self._levels, self._given_steps
        measured = [number for number, level in enumerate(levels) if level.measured]
        if not measured:
            return
        for number, level in enumerate(levels):
            if level.measured:
                continue
            low = max((other for other in measured if other < number), default=measured[0])
            high = min((other for other in measured if other > number), default=measured[-1])
            if low == high:
                level.log = levels[low].log
                continue
            weight = ((1 << number) - (1 << low)) / ((1 << high) - (1 << low))
            first, last = (given[at] * math.exp(levels[at].log) for at in (low, high))
            level.log = math.log(((1 - weight) * first + weight * last) / given[number])

    def _logs(self) -> list[float]:
        """Logarithms of the factors on prefills, copies and steps of 1, 2, 4 ... sequences."""
        speed = self._speed
        levels = (speed + level.log for level in self._levels)
        return [speed + self._prefill.log, self._load.log, *levels]

    def _apply(self) -> None:
        logs, applied = self._logs(), self._applied
        if len(logs) == len(applied) and all(
            abs(new - old) < _NOTICEABLE for new, old in zip(logs, applied, strict=True)
        ):
            return
        self._fill()
        self._applied = [_bounded(log) for log in self._logs()]
        self.prefill, self.load, *levels = map(math.exp, self._applied)
        terms = self._terms(levels)
        self.decode = terms.steps[0] / self._given_steps[0]
        self.profile = self.given.scaled(self.prefill, self.decode, self.load, terms)

    def _terms(self, factors: list[float]) -> BatchTerms:
        """The measured terms, with the factors on steps of 1, 2, 4 ... sequences. More sequences
        take no less time, and twice as many at most twice as long, because two steps could take
        their place. Where measurements disagree, the levels that were measured most count."""
        given, levels = self.given.batch_terms, self._levels
        best = max(range(len(levels)), key=lambda number: levels[number].count)
        # Most is known of the time of context where there is most of it.
        longest = max(range(len(levels)), key=lambda n: levels[n].measured * levels[n].context)
        per_token = given.per_context_token * factors[longest]
        per_sequence = levels[longest].context / (1 << longest)
        steps = []
        for number, (level, factor) in enumerate(zip(levels, factors, strict=True)):
            # A factor was found at the mean context; there the time stays the same.
            context = level.context if level.measured else per_sequence * (1 << number)
            seconds = factor * self._given_steps[number]
            more = (given.per_context_token * factor - per_token) * context
            steps.append(max(seconds + more, 0.2 * seconds))
        for number in range(best + 1, len(steps)):
            previous = steps[number - 1]
            steps[number] = min(max(steps[number], previous), 2 * previous)
        for number in range(best - 1, -1, -1):
            following = steps[number + 1]
            steps[number] = max(min(steps[number], following), following / 2)
        terms = BatchTerms(step=steps[0], steps=tuple(steps))
        more = self._largest - 1
        slope = (terms.sequences(self._largest) - steps[0]) / more if more else 0.0
        return BatchTerms(
            step=max(steps[0] - slope, 1e-3 * steps[0]),
            per_sequence=slope,
            per_prefill=given.per_prefill * self.prefill,
            per_context_token=per_token,
            steps=terms.steps,
        )


def _bounded(log: float) -> float:
    return max(-_BOUND, min(log, _BOUND))
