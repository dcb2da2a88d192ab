"""The predictor in the simulation: what it says, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from vllm_semantic_sched.policy.prediction import LengthBuckets, Prediction, Predictor
from vllm_semantic_sched.sim.events import EventQueue, Order
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.sections import PredictorModel


def draw_predictions(
    model: PredictorModel,
    requests: Sequence[SimRequest],
    levels: int,
    rng: np.random.Generator,
) -> tuple[list[Prediction], LengthBuckets]:
    """What the predictor will say about each request, and what its length buckets stand for.

    Each prediction is certain of itself: all probability is on one level and one bucket.
    """
    buckets = make_buckets(model, [request.output_tokens for request in requests])
    true_levels = np.array([request.level for request in requests], dtype=int)
    if model.confusion:
        said = _confused(true_levels, model.confusion, rng)
    else:
        said = mistaken(true_levels, levels, model.urgency_error, rng)
    true_buckets = np.searchsorted(
        buckets.edges, [request.output_tokens for request in requests], side="right"
    )
    lengths = mistaken(true_buckets, len(buckets.means), model.length_error, rng)
    urgency_of = [_certain(level, levels) for level in range(levels)]
    length_of = [_certain(bucket, len(buckets.means)) for bucket in range(len(buckets.means))]
    predictions = [
        Prediction(urgency_of[level], length_of[bucket])
        for level, bucket in zip(said, lengths, strict=True)
    ]
    return predictions, buckets


def mistaken(
    classes: np.ndarray, count: int, error_rate: float, rng: np.random.Generator
) -> np.ndarray:
    """Classes as a predictor of that error rate gives them (paper, section 4.1).

    One number stands for two: the share of requests that are classified wrongly, and the mean
    distance by which those are wrong over the number of classes. A mistake goes either way with
    equal chance where there is room for it, and to the far end where there is not.

    Args:
        classes: true classes, 0 to `count` - 1.
    """
    wrong = np.zeros(len(classes), dtype=bool)
    wrong[rng.permutation(len(classes))[: round(error_rate * len(classes))]] = True
    distance = error_rate * count
    # A fractional distance is the mean of its two neighbours, drawn in proportion.
    steps = np.floor(distance + rng.random(len(classes))).astype(int)
    steps = np.clip(steps, 1, max(1, count - 1))
    up = rng.random(len(classes)) < 0.5
    higher = np.minimum(classes + steps, count - 1)
    lower = np.maximum(classes - steps, 0)
    # Nothing is beyond the ends: there the mistake goes the other way.
    up = np.where(higher == classes, False, np.where(lower == classes, True, up))
    return np.where(wrong, np.where(up, higher, lower), classes)


def make_buckets(model: PredictorModel, lengths: Sequence[int]) -> LengthBuckets:
    """Length buckets as a predictor trained on such answers has them: the mean of each bucket
    is that of the answers in it, its middle where there are none."""
    longest = max(lengths, default=1)
    if model.bucket_edges:
        edges = list(model.bucket_edges)
    else:
        wanted = np.rint(np.arange(1, model.buckets) * (longest + 1) / model.buckets)
        edges = sorted({max(1, int(edge)) for edge in wanted})
    values = np.asarray(lengths, dtype=float)
    places = np.searchsorted(edges, values, side="right")
    lows, highs = [0, *edges], [*edges, max(longest, edges[-1] if edges else 0) + 1]
    means = [
        float(values[places == bucket].mean())
        if np.any(places == bucket)
        else (lows[bucket] + highs[bucket]) / 2
        for bucket in range(len(edges) + 1)
    ]
    return LengthBuckets(tuple(edges), tuple(means))


def _confused(
    levels: np.ndarray, confusion: Sequence[Sequence[float]], rng: np.random.Generator
) -> np.ndarray:
    edges = np.cumsum(np.asarray(confusion, dtype=float), axis=1)
    edges /= edges[:, -1:]
    draws = rng.random(len(levels))
    return np.array(
        [
            int(np.searchsorted(edges[level][:-1], draw, side="right"))
            for level, draw in zip(levels, draws, strict=True)
        ],
        dtype=int,
    )


def _certain(index: int, count: int) -> tuple[float, ...]:
    return tuple(1.0 if place == index else 0.0 for place in range(count))


class PredictorQueue:
    """Requests that wait for the predictor, which takes them in batches, one batch at a time.

    `immediate` takes what is there as soon as the predictor is free. `full_batching` waits for
    a full batch, for `max_wait` seconds, or for the end of all arrivals.

    Args:
        policy: mode and batch size, from the policy file.
        deliver: called with the requests of a batch when it is done.
    """

    def __init__(
        self,
        events: EventQueue,
        policy: Predictor,
        model: PredictorModel,
        deliver: Callable[[list[Run]], None],
    ) -> None:
        self._events = events
        self._policy = policy
        self._model = model
        self._deliver = deliver
        self._queue: deque[tuple[float, Run]] = deque()
        self._busy = False
        self._draining = False

    def submit(self, run: Run) -> None:
        """A request arrives. It is looked at once all arrivals of this moment are there."""
        deadline = self._events.now + self._policy.max_wait
        self._queue.append((deadline, run))
        self._events.at(self._events.now, Order.PREDICTOR, self._look)
        if self._policy.mode == "full_batching":
            self._events.at(deadline, Order.PREDICTOR, self._look)

    def drain(self) -> None:
        """No request will come any more: incomplete batches go as well."""
        self._draining = True
        self._events.at(self._events.now, Order.PREDICTOR, self._look)

    def _look(self) -> None:
        if self._busy or not self._queue or not self._due():
            return
        size = min(len(self._queue), self._policy.max_batch)
        batch = [self._queue.popleft()[1] for _ in range(size)]
        self._busy = True
        seconds = (
            self._model.latency
            + self._model.latency_per_request * size
            + self._policy.extra_latency
        )
        self._events.at(self._events.now + seconds, Order.PREDICTOR, lambda: self._done(batch))

    def _due(self) -> bool:
        if self._policy.mode == "immediate" or self._draining:
            return True
        oldest_deadline = self._queue[0][0]
        return len(self._queue) >= self._policy.max_batch or self._events.now >= oldest_deadline

    def _done(self, batch: list[Run]) -> None:
        self._busy = False
        self._deliver(batch)
        self._look()
