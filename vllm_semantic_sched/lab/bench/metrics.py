"""Metrics of a comparison, computed from the records of its requests."""

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls

from vllm_semantic_sched.lab.bench.client import Record
from vllm_semantic_sched.lab.bench.workload import LEVELS
from vllm_semantic_sched.policy.order.inversions import FinishOrder
from vllm_semantic_sched.sim.metrics import TenantService

MARGIN_LIMIT = 1e-4
"""If the two best log-probabilities differ by less, either token may win in fp32."""


@dataclass(frozen=True)
class IdleModel:
    """E2E latency of a request alone on the engine, in seconds and seconds per token, at least
    `floor`, the shortest that was measured."""

    base: float
    per_prompt_token: float
    per_output_token: float
    floor: float

    def seconds(self, prompt_tokens: int, output_tokens: int) -> float:
        """E2E latency of a request of these lengths."""
        line = self.per_prompt_token * prompt_tokens + self.per_output_token * output_tokens
        return max(self.floor, self.base + line)


def fit_idle(records: Sequence[Record]) -> IdleModel | None:
    """Fit requests that were sent one by one; None if fewer than four of them were answered."""
    done = [record for record in records if record.ok]
    if len(done) < 4:
        return None
    measured = np.array([record.e2e for record in done])
    design = np.array([(1.0, record.prompt_tokens, record.output_tokens) for record in done])
    # Noise must not make a coefficient negative, which would shorten longer requests.
    coefficients, _ = nnls(design, measured)
    base, per_prompt, per_output = coefficients.tolist()
    return IdleModel(base, per_prompt, per_output, float(measured.min()))


@dataclass(frozen=True)
class Summary:
    """Mean and percentiles (linear interpolation between ranks) of one metric. `p99` is over
    `tail_count` requests, which may be more than the `count` of mean and median."""

    count: int
    mean: float
    p50: float
    p99: float
    tail_count: int


LevelValues = dict[str, dict[str, list[float]]]
"""Defined values by level ("0" to "4" and "all") and metric: seconds, and the ratio `slowdown`."""


def summarize(values: Sequence[float], tail: Sequence[float] | None = None) -> Summary:
    """Summarize values, with p99 of `tail` if it is given; NaN without values."""
    if not values:
        return Summary(0, math.nan, math.nan, math.nan, 0)
    if tail is None:
        tail = values
    return Summary(
        count=len(values),
        mean=float(np.mean(values)),
        p50=float(np.percentile(values, 50)),
        p99=float(np.percentile(tail, 99)),
        tail_count=len(tail),
    )


def mean_waiting(records: Iterable[Record], levels: Container[int] = range(LEVELS)) -> float:
    """Return the mean normalized waiting time of the answered requests of these levels, s/token;
    NaN without any."""
    chosen = (record for record in records if record.ok and record.level in levels)
    return summarize([record.normalized_waiting for record in chosen]).mean


def by_level(records: Sequence[Record], idle: IdleModel | None) -> LevelValues:
    """Return the values of every metric of the answered requests; no slowdown without `idle`."""
    done = [record for record in records if record.ok]
    groups: dict[str, list[Record]] = {"all": done}
    for record in done:
        groups.setdefault(str(record.level), []).append(record)
    return {group: _values(members, idle) for group, members in sorted(groups.items())}


def _values(records: Sequence[Record], idle: IdleModel | None) -> dict[str, list[float]]:
    slowdowns = []
    if idle is not None:
        for record in records:
            slowdowns.append(record.e2e / idle.seconds(record.prompt_tokens, record.output_tokens))
    columns: dict[str, list[float | None]] = {
        "ttft": [record.ttft for record in records],
        "tpot": [record.tpot for record in records],
        "e2e": [record.e2e for record in records],
        "queueing": [record.engine_queue_seconds for record in records],
        "normalized_waiting": [record.normalized_waiting for record in records],
    }
    defined = {
        name: [value for value in values if value is not None] for name, values in columns.items()
    }
    return {**defined, "slowdown": slowdowns}


def finish_order_violations(records: Sequence[Record]) -> float:
    """Return the share of the answered requests that were there when a less urgent one finished
    (paper, eq. 2), by true urgency; NaN without any."""
    done = sorted(
        (record.finish, record.arrival, record.level)
        for record in records
        if record.ok and record.finish is not None
    )
    order = FinishOrder(1 + max((level for *_, level in done), default=0))
    inverted = [order.finish(level, arrival, finish) for finish, arrival, level in done]
    return sum(inverted) / len(inverted) if inverted else math.nan


def fairness(records: Sequence[Record]) -> float:
    """Return Jain's index over tenants of the output tokens per second that each got while it had
    requests, as the simulator does; NaN for fewer than two tenants."""
    service = TenantService()
    done = [
        (record.finish, record) for record in records if record.ok and record.finish is not None
    ]
    for finish, record in sorted(done, key=lambda pair: pair[0]):
        if record.tenant:
            service.add(record.tenant, record.arrival, finish, record.output_tokens)
    index = service.fairness()
    return math.nan if index is None else index


def duration(records: Sequence[Record]) -> float:
    """Return the seconds from the first arrival to the last finish; 0 if nothing finished."""
    finishes = [record.finish for record in records if record.finish is not None]
    return max(finishes) - min(record.arrival for record in records) if finishes else 0.0


def latest_send(records: Iterable[Record]) -> float:
    """Return the largest delay between arrival and sending of a request, in seconds. If it is
    large, this machine was too busy to keep the open loop, and no figure is reliable."""
    delays = (record.sent - record.arrival for record in records if record.sent is not None)
    return max(delays, default=0.0)


def throughput(records: Sequence[Record]) -> float:
    """Return the output tokens per second."""
    seconds = duration(records)
    return sum(record.output_tokens for record in records) / seconds if seconds else 0.0


@dataclass(frozen=True)
class Difference:
    """First position where a greedy output differs from the reference's; `margin`: difference of
    the two best log-probabilities there, None while unknown."""

    index: int
    position: int
    margin: float | None = None

    @property
    def counts(self) -> bool:
        """False if the two best tokens were too close to call."""
        return self.margin is None or self.margin >= MARGIN_LIMIT


def differences(reference: Sequence[Record], records: Sequence[Record]) -> list[Difference]:
    """Return the requests that both, in the same order, answered with different output tokens."""
    differing = []
    for first, second in zip(reference, records, strict=True):
        if first.ok and second.ok and first.token_ids != second.token_ids:
            pairs = enumerate(zip(first.token_ids, second.token_ids, strict=False))
            position = next((place for place, (a, b) in pairs if a != b), 0)
            differing.append(Difference(first.index, position))
    return differing


def explain(difference: Difference, answer: Record, repeated: Record) -> Difference:
    """Add the margin, taken from the same request sent again with log-probabilities. It stays
    unknown if the repeated output differs from `answer` before the position in question."""
    position = difference.position
    same = repeated.token_ids[:position] == answer.token_ids[:position]
    if not same or position >= len(repeated.margins):
        return difference
    return replace(difference, margin=repeated.margins[position])
