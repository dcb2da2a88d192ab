"""Figures of running servers for an operator, computed from their metrics pages."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple, Self

from prometheus_client.parser import text_string_to_metric_families

WINDOW = 60.0  # seconds over which increases are reported, once a server was watched for so long
_OURS = "semsched:"
_KV_USE = "vllm:kv_cache_usage_perc"

PredictorState = Literal["down", "loading", "up"]
"""`loading`: for the first time since the server started."""


class Page:
    """The samples of a metrics page that was read at a `time`, in seconds of any clock; ValueError
    if the text is none."""

    def __init__(self, text: str, time: float) -> None:
        self.time = time
        self._samples = defaultdict[str, dict[frozenset[tuple[str, str]], float]](dict)
        try:
            for family in text_string_to_metric_families(text):
                for name, labels, value, *_ in family.samples:
                    if name.startswith((_OURS, _KV_USE)):
                        key = frozenset(labels.items())
                        self._samples[name.removeprefix(_OURS)][key] = float(value)
        except ValueError as error:
            raise ValueError("/metrics is not a page of Prometheus metrics") from error

    def __bool__(self) -> bool:
        """Whether the scheduler has reported anything."""
        return any(name != _KV_USE for name in self._samples)

    def values(self, name: str) -> list[float]:
        """The values of a metric, named without `semsched:`, one per combination of labels."""
        return list(self._samples.get(name, {}).values())

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], list[float]]:
        """The values of a metric by the values of some of its labels."""
        groups = defaultdict[tuple[str, ...], list[float]](list)
        for pairs, value in self._samples.get(name, {}).items():
            own = dict(pairs)
            groups[tuple(own[label] for label in labels)].append(value)
        return groups

    def restarted_since(self, before: Self) -> bool:
        """Whether a counter is lower than on an earlier page of the server."""
        return any(
            self._samples.get(name, {}).get(labels, 0.0) < value
            for name, samples in before._samples.items()
            if name.endswith(("_total", "_count"))
            for labels, value in samples.items()
        )


class Interval(NamedTuple):
    """Two pages of one run of a server; without `before`, it begins with the server."""

    now: Page
    before: Page | None

    @property
    def seconds(self) -> float | None:
        """None: since the server started."""
        return None if self.before is None else self.now.time - self.before.time

    def total(self, name: str, *labels: str) -> defaultdict[tuple[str, ...], float]:
        """The sums of a metric by the values of some of its labels."""
        groups = self.now.by(name, *labels)
        return defaultdict(float, {key: sum(values) for key, values in groups.items()})

    def increase(self, name: str, *labels: str) -> defaultdict[tuple[str, ...], float]:
        """The same of a counter, less what it was before."""
        increases = self.total(name, *labels)
        if self.before is not None:
            for key, values in self.before.by(name, *labels).items():
                increases[key] -= sum(values)
        return increases


def add_page(pages: deque[Page], page: Page) -> Interval:
    """Add a page to those of a server; the interval since the oldest one that is kept."""
    if pages and page.restarted_since(pages[-1]):
        pages.clear()
    # The oldest one is the last that is at least WINDOW seconds old.
    while len(pages) > 1 and pages[1].time <= page.time - WINDOW:
        pages.popleft()
    before = pages[0] if pages else None
    pages.append(page)
    return Interval(page, before)


@dataclass(frozen=True)
class TierFigures:
    """A tier of one server, or of several together."""

    level: int | None  # None if the server does not say
    tier: str
    waiting: int  # requests without a seat
    running: int  # requests with a seat
    held: float | None  # mean number of running requests without a token, in the window
    longest_wait: float  # seconds that the oldest waiting request has been without a seat
    started: int  # requests that got their first token in the window
    ttft_p50: float | None  # their median time to first token, seconds; None if there were none
    ttft_p99: float | None  # their 99th percentile


@dataclass(frozen=True)
class Figures:
    """One server, or several together."""

    window: float | None  # seconds over which increases are counted; None: since the server started
    tiers: tuple[TierFigures, ...]  # most urgent first
    preemptions: Mapping[str, int]  # in the window, by kind
    # Share of the last minute of engine time that holds cost, largest of the engines; None where
    # nobody is held.
    hold_cost: float | None
    kv_use: float | None  # share in use, 0 to 1, mean over engines; None if not reported
    host_pool_use: float | None  # as `kv_use`
    predictor: PredictorState | None  # of all engines; None where the policy wants no predictor
    predictor_queue: int  # prompts that wait for the predictor
    policy_versions: tuple[int, ...]  # of the engines, ascending
    observing: bool  # whether an engine only observes
    canary: bool  # whether an engine runs a canary


def compute(intervals: Sequence[Interval]) -> Figures:
    """Figures of servers, whose engines are added up; so are tiers of the same level and name."""

    def values(name: str) -> list[float]:
        return [value for interval in intervals for value in interval.now.values(name)]

    def mean(name: str) -> float | None:
        reported = values(name)
        return fmean(reported) if reported else None

    windows = [interval.seconds for interval in intervals if interval.seconds is not None]
    preemptions = Counter[str]()
    for interval in intervals:
        for (kind,), count in sorted(interval.increase("preemptions_total", "kind").items()):
            preemptions[kind] += int(count)
    return Figures(
        window=max(windows) if len(windows) == len(intervals) else None,
        tiers=tuple(_tiers(intervals)),
        preemptions=dict(preemptions),
        hold_cost=max(values("hold_cost"), default=None),
        kv_use=mean(_KV_USE),
        host_pool_use=mean("host_pool_usage"),
        predictor=_predictor(intervals),
        predictor_queue=int(sum(values("predictor_queue"))),
        policy_versions=tuple(sorted({int(value) for value in values("policy_version")})),
        observing=any(values("observing")),
        canary=any(values("canary")),
    )


def _predictor(intervals: Sequence[Interval]) -> PredictorState | None:
    """The worst state of the predictors of all engines."""
    states = set[PredictorState]()
    for interval in intervals:
        restarts = interval.total("predictor_restarts_total", "engine")
        for engine, up in interval.now.by("predictor_up", "engine").items():
            if all(up):
                states.add("up")
            else:
                # One that cannot load, or has died, is restarted a second later.
                states.add("down" if restarts[engine] else "loading")
    worst_first: tuple[PredictorState, ...] = ("down", "loading", "up")
    return next((state for state in worst_first if state in states), None)


def _tiers(intervals: Sequence[Interval]) -> Iterator[TierFigures]:
    """The tiers of all servers, most urgent first."""
    servers = defaultdict[tuple[float, str], list[Interval]](list)  # that have the tier
    for interval in intervals:
        levels = {tier: int(level) for tier, level in interval.now.by("tier_info", "tier", "level")}
        waiting = {tier for (tier,) in interval.now.by("waiting_requests", "tier")}
        for name in levels.keys() | waiting:
            servers[levels.get(name, math.inf), name].append(interval)
    for (level, name), having in sorted(servers.items()):
        held = []
        first_tokens = defaultdict[float, float](float)
        longest_wait = 0.0
        for interval in having:
            if interval.seconds:
                seconds = interval.increase("held_seconds_total", "tier")[name,]
                held.append(seconds / interval.seconds)
            buckets = interval.increase("time_to_first_token_seconds_bucket", "tier", "le")
            for (tier, bound), count in buckets.items():
                if tier == name:
                    first_tokens[float(bound)] += count
            waits = interval.now.by("longest_wait_seconds", "tier").get((name,), ())
            longest_wait = max([longest_wait, *waits])
        yield TierFigures(
            level=None if level == math.inf else int(level),
            tier=name,
            waiting=_requests("waiting_requests", name, having),
            running=_requests("running_requests", name, having),
            held=sum(held) if held else None,
            longest_wait=longest_wait,
            started=int(max(first_tokens.values(), default=0)),
            ttft_p50=quantile(first_tokens, 0.5),
            ttft_p99=quantile(first_tokens, 0.99),
        )


def _requests(metric: str, tier: str, servers: Sequence[Interval]) -> int:
    return sum(int(interval.total(metric, "tier")[tier,]) for interval in servers)


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile (`share`, 0 to 1) of a Prometheus histogram, as `histogram_quantile` estimates it:
    linear within a bucket, and the highest finite bound for values above it. None if it is empty.
    `buckets`: cumulative counts by upper bound; the last bound is infinite."""
    rows = sorted(buckets.items())
    if not rows or rows[-1][1] <= 0:
        return None
    wanted = share * rows[-1][1]
    below = 0.0
    start = 0.0
    for bound, count in rows:
        if count >= wanted and count > below:
            if math.isinf(bound):
                break
            return start + (bound - start) * (wanted - below) / (count - below)
        if not math.isinf(bound):
            below = count
            start = bound
    return start
