"""Figures of running servers for an operator, computed from their metrics pages."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

WINDOW = 60.0
"""Seconds over which increases are reported, once a server has been watched for so long."""

_OURS = "semsched:"
_KV_USE = "vllm:kv_cache_usage_perc"
_FIRST_TOKEN = "time_to_first_token_seconds"


class Page:
    """The samples of a metrics page, by name; ValueError if the text is none."""

    def __init__(self, text: str) -> None:
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

    def restarted_since(self, before: Page) -> bool:
        """Whether a counter is lower than on an earlier page of the server."""
        return any(
            self._samples.get(name, {}).get(labels, 0.0) < value
            for name, samples in before._samples.items()
            if name.endswith(("_total", "_count"))
            for labels, value in samples.items()
        )


class Reading(NamedTuple):
    """A metrics page and when it was read, in seconds of any clock."""

    time: float
    page: Page


class History:
    """The readings of one server over the last `WINDOW` seconds."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> Figures:
        """Add a reading; the figures since the oldest one that is kept."""
        readings = self._readings
        if readings and reading.page.restarted_since(readings[-1].page):
            readings.clear()
        # The oldest one is the last that is at least WINDOW seconds old.
        while len(readings) > 1 and readings[1].time <= reading.time - WINDOW:
            readings.popleft()
        before = readings[0] if readings else None
        readings.append(reading)
        return compute(reading, before)


@dataclass(frozen=True)
class TierFigures:
    """One tier."""

    level: int | None  # None if the server does not say
    tier: str
    waiting: int = 0  # requests without a seat
    running: int = 0  # requests with a seat
    held: float | None = None  # mean number of running requests without a token, in the window
    longest_wait: float = 0.0  # seconds that the oldest waiting request has been without a seat
    # Requests that got their first token in the window, in seconds since their arrival: cumulative
    # counts by upper bound of the histogram's bucket.
    first_tokens: Mapping[float, float] = field(default_factory=dict)

    @property
    def started(self) -> int:
        """Requests that got their first token in the window."""
        return int(max(self.first_tokens.values(), default=0))

    @property
    def ttft_p50(self) -> float | None:
        """Median time to first token in the window, seconds; None if there was none."""
        return quantile(self.first_tokens, 0.5)

    @property
    def ttft_p99(self) -> float | None:
        """99th percentile of the time to first token, seconds; None if there was none."""
        return quantile(self.first_tokens, 0.99)


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
    predictor_up: bool | None  # None where the policy wants no predictor
    predictor_queue: int  # prompts that wait for the predictor
    policy_versions: tuple[int, ...]  # of the engines, ascending
    observing: bool  # whether an engine only observes
    canary: bool  # whether an engine runs a canary

    @property
    def waiting(self) -> int:
        return sum(tier.waiting for tier in self.tiers)

    @property
    def running(self) -> int:
        return sum(tier.running for tier in self.tiers)

    def as_json(self) -> dict[str, Any]:
        """Plain values, named as the attributes."""
        document = asdict(self)
        for tier, row in zip(self.tiers, document["tiers"], strict=True):
            del row["first_tokens"]
            row |= {name: getattr(tier, name) for name in ("started", "ttft_p50", "ttft_p99")}
        return document


def compute(now: Reading, before: Reading | None) -> Figures:
    """Figures of a server, whose engines are added up, since an earlier reading of the same run;
    without one, since its start."""
    page = now.page
    window = None if before is None else now.time - before.time

    def total(name: str, *labels: str) -> defaultdict[tuple[str, ...], float]:
        sums = {key: sum(each) for key, each in page.by(name, *labels).items()}
        return defaultdict(float, sums)

    def increase(name: str, *labels: str) -> defaultdict[tuple[str, ...], float]:
        more = total(name, *labels)
        for key, each in before.page.by(name, *labels).items() if before else ():
            more[key] -= sum(each)
        return more

    levels = {tier: int(level) for tier, level in page.by("tier_info", "tier", "level")}
    waiting, running = total("waiting_requests", "tier"), total("running_requests", "tier")
    waits = page.by("longest_wait_seconds", "tier")
    held = increase("held_seconds_total", "tier")
    first_tokens = defaultdict[str, dict[float, float]](dict)
    for (tier, bound), count in increase(f"{_FIRST_TOKEN}_bucket", "tier", "le").items():
        first_tokens[tier][float(bound)] = count
    kinds = sorted(increase("preemptions_total", "kind").items())
    up = page.values("predictor_up")
    return Figures(
        window=window,
        tiers=_in_order(
            TierFigures(
                level=levels.get(name),
                tier=name,
                waiting=int(waiting[name,]),
                running=int(running[name,]),
                held=held[name,] / window if window else None,
                longest_wait=max(waits.get((name,), ()), default=0.0),
                first_tokens=first_tokens[name],
            )
            for name in {*levels, *(tier for (tier,) in list(waiting))}
        ),
        preemptions={kind: int(count) for (kind,), count in kinds},
        hold_cost=max(page.values("hold_cost"), default=None),
        kv_use=_mean(page.values(_KV_USE)),
        host_pool_use=_mean(page.values("host_pool_usage")),
        predictor_up=all(up) if up else None,
        predictor_queue=int(sum(page.values("predictor_queue"))),
        policy_versions=tuple(sorted({int(value) for value in page.values("policy_version")})),
        observing=any(page.values("observing")),
        canary=any(page.values("canary")),
    )


def combine(each: Sequence[Figures]) -> Figures:
    """Figures of several servers together. Tiers of the same level and name are added up."""
    groups = defaultdict[tuple[int | None, str], list[TierFigures]](list)
    preemptions = Counter[str]()
    for figures in each:
        preemptions.update(figures.preemptions)
        for tier in figures.tiers:
            groups[tier.level, tier.tier].append(tier)
    windows, up = _known(each, "window"), _known(each, "predictor_up")
    return Figures(
        window=max(windows) if windows and len(windows) == len(each) else None,
        tiers=_in_order(map(_add_up, groups.values())),
        preemptions=dict(preemptions),
        hold_cost=max(_known(each, "hold_cost"), default=None),
        kv_use=_mean(_known(each, "kv_use")),
        host_pool_use=_mean(_known(each, "host_pool_use")),
        predictor_up=all(up) if up else None,
        predictor_queue=sum(one.predictor_queue for one in each),
        policy_versions=tuple(sorted({v for one in each for v in one.policy_versions})),
        observing=any(one.observing for one in each),
        canary=any(one.canary for one in each),
    )


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """A quantile (`share`, 0 to 1) of a Prometheus histogram, as `histogram_quantile` estimates it:
    linear within a bucket, and the highest finite bound for values above it. None if it is empty.
    `buckets`: cumulative counts by upper bound; the last bound is infinite."""
    rows = sorted(buckets.items())
    if not rows or rows[-1][1] <= 0:
        return None
    wanted = share * rows[-1][1]
    below, start = 0.0, 0.0
    for bound, count in rows:
        if count >= wanted and count > below:
            if math.isinf(bound):
                break
            return start + (bound - start) * (wanted - below) / (count - below)
        if not math.isinf(bound):
            below, start = count, bound
    return start


def _add_up(tiers: Sequence[TierFigures]) -> TierFigures:
    first_tokens = Counter[float]()
    for tier in tiers:
        first_tokens.update(tier.first_tokens)
    held = _known(tiers, "held")
    return TierFigures(
        level=tiers[0].level,
        tier=tiers[0].tier,
        waiting=sum(tier.waiting for tier in tiers),
        running=sum(tier.running for tier in tiers),
        held=sum(held) if held else None,
        longest_wait=max(tier.longest_wait for tier in tiers),
        first_tokens=dict(first_tokens),
    )


def _in_order(tiers: Iterable[TierFigures]) -> tuple[TierFigures, ...]:
    return tuple(sorted(tiers, key=lambda t: (math.inf if t.level is None else t.level, t.tier)))


def _known(each: Iterable[Figures | TierFigures], name: str) -> list[Any]:
    """The values of an attribute that are not None."""
    return [value for one in each if (value := getattr(one, name)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
