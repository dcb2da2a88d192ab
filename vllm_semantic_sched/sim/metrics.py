"""Metrics of a run per urgency level, in the words and formulas of the benchmark, and the queue
depth over time. Of a finished request two numbers are kept, for the percentiles."""

import itertools
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Self

import numpy as np

from vllm_semantic_sched.policy.config.tiers import Slo
from vllm_semantic_sched.policy.order.inversions import InversionCause
from vllm_semantic_sched.policy.overload.slo import targets
from vllm_semantic_sched.sim.request import Run

ALL = "all"  # the row over all levels
_SEAT_ORDER = {f"seat_order_{cause.value}": cause for cause in InversionCause}

METRICS = {
    "count": "requests, finished and refused",
    "refused": "requests that the policy refused; they count in nothing but these and `slo_met`",
    "requests_per_second": "arrivals / time from first to last arrival of the row",
    "normalized_waiting": "mean of (finish - arrival) / output tokens, s per token",
    "waiting_per_token": "sum of (finish - arrival) / sum of output tokens, s per token",
    "e2e_mean": "mean of finish - arrival, s",
    "e2e_p50": "median of finish - arrival, s",
    "e2e_p99": "99th percentile of finish - arrival, s",
    "ttft_mean": "mean of first token - arrival, s",
    "ttft_p99": "99th percentile of first token - arrival, s",
    "tpot_mean": "mean of (finish - first token) / (output tokens - 1), s",
    "program_mean": "mean over sessions of the sum of finish - arrival of their requests, s: from "
    "first arrival to last finish without pauses, where each waits for the answer before it",
    "program_p99": "99th percentile of the same, s",
    "queueing_mean": "mean of first seat - arrival, s",
    "held_mean": "mean time in a seat without tokens, because the request was held, s",
    "recomputes": "preemptions whose KV was dropped",
    "swaps": "preemptions whose KV was kept on the host",
    "preemptions_per_minute": "preemptions per minute from first arrival to last finish",
    "tokens_per_second": "output tokens / time from first arrival to last finish of the row",
    "finish_order_violations": "share of the finished requests that were there when a less urgent "
    "one finished (paper, eq. 2), by true urgency",
    "seat_order_violations": "share of the requests that got their first seat after a less urgent "
    "one that arrived later, by true urgency",
    **{name: f"share of these by cause: {cause.value}" for name, cause in _SEAT_ORDER.items()},
    "fairness": "Jain's index over tenants of output tokens per second while they have requests",
    "slo_met": "share of the requests with an SLO (of their level) or a deadline (their own) for "
    "which all were met",
    "goodput": "requests for which all of these were met / time from first to last arrival, per s",
}
"""Columns of the results. Levels without SLOs and deadlines lack `slo_met` and `goodput`."""

_TIMES = ("arrival", "started", "first_token", "finish")
_COLUMNS = (
    "level",
    "tokens",
    "recomputes",
    "swaps",
    "held",
    "inverted",
    "cause",
    "deadline",
    *_TIMES,
)
_CAUSES = {cause: place for place, cause in enumerate((None, *InversionCause))}
_BLOCK = 32_768  # finished requests that are added to the metrics at a time
_PERCENTILES = {"e2e": {"e2e_p50": 50, "e2e_p99": 99}, "ttft": {"ttft_p99": 99}}
_MEANS = ("e2e", "ttft", "tpot", "queueing", "held")
_COUNTS = ("tokens", "recomputes", "swaps", "inverted", "with_slo", "kept")
_SUMMED = (*_MEANS, *_COUNTS, *_SEAT_ORDER, "normalized")
_DEPTH_BINS = 256
_Block = dict[str, np.ndarray]  # finished requests: a column per property


class Recorder:
    """Takes in finished requests and computes their metrics."""

    def __init__(self, slos: Sequence[Slo]) -> None:
        self._targets = [*map(targets, slos)]
        self._finished = array("d")  # rows of _COLUMNS
        self._levels = [_Row() for _ in slos]
        self._all = _Row()
        self._service = TenantService()
        self._programs = Programs()

    def add(self, run: Run) -> None:
        """Take in a request that has finished or was refused; in the order of finishes."""
        request = run.request
        if request.session:
            self._programs.add(run)
        if run.refused:
            for row in (self._levels[request.level], self._all):
                has_slo = bool(self._targets[request.level]) or request.deadline is not None
                row.add_refused(request.arrival, has_slo)
            return
        assert run.started is not None and run.first_token is not None and run.finish is not None
        if request.tenant:
            self._service.add(request.tenant, request.arrival, run.finish, request.output_tokens)
        self._finished.extend(
            (
                request.level,
                request.output_tokens,
                run.recomputes,
                run.swaps,
                run.held,
                run.finish_inversion,
                _CAUSES[run.seat_inversion],
                math.nan if request.deadline is None else request.deadline,
                request.arrival,
                run.started,
                run.first_token,
                run.finish,
            )
        )
        if len(self._finished) == _BLOCK * len(_COLUMNS):
            self._add_block()

    def levels(self) -> dict[str, dict[str, float]]:
        """Metrics by level (`"0"`, ...) and over all; levels without requests are left out."""
        if self._finished:
            self._add_block()
        rows = {str(n): row.metrics([row]) for n, row in enumerate(self._levels) if row.count}
        if rows:
            rows[ALL] = self._all.metrics(self._levels)
            fairness = self._service.fairness()
            if fairness is not None:
                rows[ALL]["fairness"] = fairness
        for level, seconds in self._programs.seconds().items():
            rows[level]["program_mean"] = float(np.mean(seconds))
            rows[level]["program_p99"] = float(np.percentile(seconds, 99))
        return rows

    def _add_block(self) -> None:
        table = np.array(self._finished).reshape(-1, len(_COLUMNS))
        del self._finished[:]
        block: _Block = dict(zip(_COLUMNS, np.ascontiguousarray(table.T), strict=True))
        block["e2e"] = block["finish"] - block["arrival"]
        block["ttft"] = block["first_token"] - block["arrival"]
        block["queueing"] = block["started"] - block["arrival"]
        block["normalized"] = block["e2e"] / block["tokens"]
        for name, cause in _SEAT_ORDER.items():
            block[name] = block["cause"] == _CAUSES[cause]
        # An answer of one token has no time between tokens.
        gaps = np.maximum(1, block["tokens"] - 1)
        block["tpot"] = (block["finish"] - block["first_token"]) / gaps
        block["with_slo"] = ~np.isnan(block["deadline"])
        block["kept"] = block["e2e"] <= block["deadline"]
        for level, (row, latencies) in enumerate(zip(self._levels, self._targets, strict=True)):
            of_level = block["level"] == level
            if latencies:
                met = [block[name] <= target for name, target in latencies.items()]
                met.append(~of_level | ~block["with_slo"] | block["kept"])  # a deadline, if any
                block["with_slo"] |= of_level
                block["kept"] = np.where(of_level, np.logical_and.reduce(met), block["kept"])
            if of_level.any():
                members = {name: values[of_level] for name, values in block.items()}
                row.add(members)
                for name, parts in row.values.items():
                    parts.append(members[name])
        self._all.add(block)


class _Row:
    """Sums of one level with the values that percentiles need, or sums over all levels."""

    def __init__(self) -> None:
        self.count = 0
        self.values: dict[str, list[np.ndarray]] = {name: [] for name in _PERCENTILES}
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._first_arrival = float("inf")
        self._last_arrival = 0.0
        self._last_finish = 0.0

    def add_refused(self, arrival: float, with_slo: bool) -> None:
        """Take in a refused request, which misses its SLO if it has one."""
        self.count += 1
        self._sums["refused"] += 1
        self._sums["with_slo"] += with_slo
        self._first_arrival = min(self._first_arrival, arrival)
        self._last_arrival = max(self._last_arrival, arrival)

    def add(self, block: _Block) -> None:
        self.count += len(block["e2e"])
        for name in _SUMMED:
            self._sums[name] += float(block[name].sum())
        self._first_arrival = min(self._first_arrival, float(block["arrival"].min()))
        self._last_arrival = max(self._last_arrival, float(block["arrival"].max()))
        self._last_finish = max(self._last_finish, float(block["finish"].max()))

    def metrics(self, rows: Sequence[Self]) -> dict[str, float]:
        """Metrics of this row; percentiles are those of the values of `rows`."""
        sums = self._sums
        finished = self.count - sums["refused"]
        # Not defined for one request, or for one burst.
        arriving = max(self._last_arrival - self._first_arrival, 1e-9)
        row = {
            "count": float(self.count),
            "refused": sums["refused"],
            "requests_per_second": (self.count - 1) / arriving,
        }
        if sums["with_slo"]:
            row["slo_met"] = sums["kept"] / sums["with_slo"]
            kept = row["slo_met"] * sums["with_slo"]
            row["goodput"] = kept / self.count * row["requests_per_second"]
        if finished:
            span = self._last_finish - self._first_arrival
            row |= {
                "normalized_waiting": sums["normalized"] / finished,
                "waiting_per_token": sums["e2e"] / sums["tokens"],
                **{f"{name}_mean": sums[name] / finished for name in _MEANS},
                **{name: sums[name] for name in ("recomputes", "swaps")},
                "preemptions_per_minute": (sums["recomputes"] + sums["swaps"]) / span * 60,
                "tokens_per_second": sums["tokens"] / span,
                "finish_order_violations": sums["inverted"] / finished,
                "seat_order_violations": sum(sums[name] for name in _SEAT_ORDER) / finished,
                **{name: sums[name] / finished for name in _SEAT_ORDER},
            }
            for name, columns in _PERCENTILES.items():
                parts: list[np.ndarray] = []
                for source in rows:
                    parts += source.values[name]
                percentiles = np.percentile(np.concatenate(parts), list(columns.values()))
                row |= dict(zip(columns, percentiles.tolist(), strict=True))
        return {name: row[name] for name in METRICS if name in row}


class Programs:
    """What the requests of each session took together. Memory grows with the sessions."""

    def __init__(self) -> None:
        self._seconds = defaultdict[tuple[int, str], float](float)  # by true level and session

    def add(self, run: Run) -> None:
        """Add a request of a session, whose other ones have its level."""
        request = run.request
        # A session without one of its answers has no end.
        seconds = math.inf if run.finish is None else run.finish - request.arrival
        self._seconds[request.level, request.session] += seconds

    def seconds(self) -> dict[str, list[float]]:
        """The sums of the sessions that have all their answers, by level and over all."""
        seconds: dict[str, list[float]] = {}
        for (level, _), total in self._seconds.items():
            if total < math.inf:
                seconds.setdefault(str(level), []).append(total)
                seconds.setdefault(ALL, []).append(total)
        return seconds


class TenantService:
    """Output tokens of each tenant, and the time in which it had requests. Memory grows with the
    tenants and the pauses in which a tenant has no request."""

    def __init__(self) -> None:
        self._tokens = Counter[str]()
        # Disjoint times, in order.
        self._active = defaultdict[str, list[tuple[float, float]]](list)

    def add(self, tenant: str, arrival: float, finish: float, tokens: int) -> None:
        """Add a finished request; in the order of finishes."""
        times = self._active[tenant]
        while times and times[-1][1] >= arrival:
            begin, _ = times.pop()
            arrival = min(arrival, begin)
        times.append((arrival, finish))
        self._tokens[tenant] += tokens

    def fairness(self) -> float | None:
        """Jain's index over tenants of output tokens per second in the time in which the tenant had
        requests: 1 if all got the same, 1 / tenants if one got all. None for fewer than two."""
        rates = []
        for tenant, tokens in self._tokens.items():
            seconds = sum(end - begin for begin, end in self._active[tenant])
            rates.append(tokens / max(seconds, 1e-9))
        return jain_index(rates) if len(rates) > 1 else None


def jain_index(values: Sequence[float]) -> float:
    """(sum of x)^2 / (n sum of x^2), 1 / n to 1 (Jain et al. 1984); there must be values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def mean_levels(repeats: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """The mean of each metric of each level over the repeats that have it."""
    means: dict[str, dict[str, float]] = {}
    for level in dict.fromkeys(itertools.chain(*repeats)):
        rows = [repeat[level] for repeat in repeats if level in repeat]
        means[level] = {}
        for name in METRICS:
            values = [row[name] for row in rows if name in row]
            if values:
                means[level][name] = float(np.mean(values))
    return means


class DepthHistory:
    """Mean number of waiting requests per level in each of at most 256 equal bins of time. Bins
    start short (`width`, seconds); when the time outgrows them, every two neighbors are merged."""

    def __init__(self, levels: int, width: float = 0.01) -> None:
        self._width = width
        self._areas = np.zeros((_DEPTH_BINS, levels))
        self._now = 0.0
        self._depths: Sequence[int] = [0] * levels

    def record(self, now: float, depths: Sequence[int]) -> None:
        """Set the number of waiting requests per level from `now` on."""
        if depths != self._depths:
            self._fill(now)
            self._depths = depths

    def points(self) -> list[tuple[float, tuple[float, ...]]]:
        """Middle of each bin in seconds, and the mean depth per level in it."""
        used = min(_DEPTH_BINS, int(self._now / self._width) + 1)
        means = (self._areas[:used] / self._width).tolist()
        return [((index + 0.5) * self._width, tuple(mean)) for index, mean in enumerate(means)]

    def _fill(self, now: float) -> None:
        while now >= _DEPTH_BINS * self._width:
            merged = self._areas[::2] + self._areas[1::2]
            self._areas = np.concatenate([merged, np.zeros_like(merged)])
            self._width *= 2
        index = int(self._now / self._width)
        while self._now < now:
            end = min(now, (index + 1) * self._width)
            if any(self._depths):
                area = np.multiply(self._depths, end - self._now)
                self._areas[min(index, _DEPTH_BINS - 1)] += area
            self._now = end
            index += 1
