"""A model of the predictor and of the instant reader: predictions, and when they arrive."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from vllm_semantic_sched.policy.facts.decision import Decision
from vllm_semantic_sched.policy.facts.prediction import MAX_PASS, LengthBuckets, Prediction
from vllm_semantic_sched.sim.events import EventQueue, Order
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.sections import PredictorModel
from vllm_semantic_sched.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Predictions:
    """The prediction for each request, None for a text that is not read, and their buckets."""

    by_request: Sequence[Prediction | None]
    buckets: LengthBuckets


def draw_instant(
    model: PredictorModel, workload: Workload, levels: int, rng: np.random.Generator
) -> Predictions | None:
    """Draw the instant reader's predictions for the requests of a run; None without such a reader.
    Its mistakes are independent of the predictor's."""
    error = model.instant_error
    if error is None:
        return None
    errors = {"urgency_error": error, "length_error": error, "mistakes": "inside", "confusion": ()}
    return draw_predictions(model.model_copy(update=errors), workload, levels, rng, doubt=error)


def draw_predictions(
    model: PredictorModel,
    workload: Workload,
    levels: int,
    rng: np.random.Generator,
    doubt: float = 0.0,
) -> Predictions:
    """Draw the predictor's predictions for the requests of a run: a level and a length bucket for
    each. The others share the probability `doubt`."""
    clipped = model.mistakes == "clipped"
    if model.confusion:
        predicted = _confused(workload.levels, model.confusion, rng)
    else:
        predicted = mistaken(workload.levels, levels, model.urgency_error, rng, clipped)
    buckets = make_buckets(model, workload.outputs)
    count = len(buckets.means)
    true_buckets = np.searchsorted(buckets.edges, workload.outputs, side="right")
    lengths = mistaken(true_buckets, count, model.length_error, rng, clipped)
    # Requests of a predicted level and bucket share one object.
    by_class: dict[tuple[int, int], Prediction] = {}
    likeliest = Decision(bounds=(0.5,) * (levels - 1))
    for level, bucket in itertools.product(range(levels), range(count)):
        by_class[level, bucket] = Prediction(
            urgency=_peaked(level, levels, doubt),
            length=_peaked(bucket, count, doubt),
            decision=likeliest,
        )
    classes = zip(predicted.tolist(), lengths.tolist(), strict=True)
    return Predictions([by_class[level, bucket] for level, bucket in classes], buckets)


def mistaken(
    classes: np.ndarray,
    count: int,
    error_rate: float,
    rng: np.random.Generator,
    clipped: bool = False,
) -> np.ndarray:
    """Predicted classes for an error rate (paper, section 4.1): both the share of wrong classes and
    their mean distance from the true class as a share of the number of classes. Mistakes go either
    way with equal probability, and stop at the first and last class. Those beyond the ends are
    dropped if `clipped`; otherwise they go the other way."""
    wrong = np.zeros(len(classes), dtype=bool)
    wrong[rng.permutation(len(classes))[: round(error_rate * len(classes))]] = True
    # A fractional distance is the mean of its two neighbors, drawn in proportion.
    steps = np.floor(error_rate * count + rng.random(len(classes))).astype(int)
    steps = np.clip(steps, 1, max(1, count - 1))
    up = rng.random(len(classes)) < 0.5
    higher = np.minimum(classes + steps, count - 1)
    lower = np.maximum(classes - steps, 0)
    if not clipped:
        up[lower == classes] = True
        up[higher == classes] = False
    mistakes = np.where(up, higher, lower)
    return np.where(wrong, mistakes, classes)


def make_buckets(model: PredictorModel, lengths: Sequence[int] | np.ndarray) -> LengthBuckets:
    """Length buckets of a predictor that was trained on these answers. The mean of a bucket is
    that of the answers in it, or its middle if there are none."""
    longest = int(max(lengths, default=1))
    wanted = np.rint(np.arange(1, model.buckets) * (longest + 1) / model.buckets)
    edges = sorted({max(1, int(edge)) for edge in wanted})
    values = np.asarray(lengths, dtype=float)
    places = np.searchsorted(edges, values, side="right")
    bounds = [0, *edges, max([longest, *edges]) + 1]
    means = []
    for bucket, (low, high) in enumerate(itertools.pairwise(bounds)):
        members = values[places == bucket]
        if len(members):
            means.append(float(members.mean()))
        else:
            means.append((low + high) / 2)
    return LengthBuckets(tuple(edges), tuple(means))


def _confused(
    levels: np.ndarray, confusion: Sequence[Sequence[float]], rng: np.random.Generator
) -> np.ndarray:
    edges = np.cumsum(np.asarray(confusion, dtype=float), axis=1)
    edges /= edges[:, -1:]
    predicted: np.ndarray = (rng.random(len(levels))[:, None] >= edges[levels, :-1]).sum(axis=1)
    return predicted


def _peaked(index: int, count: int, doubt: float) -> tuple[float, ...]:
    if count == 1:
        return (1.0,)
    return tuple(1.0 - doubt if place == index else doubt / (count - 1) for place in range(count))


class PredictorQueue:
    """Requests that wait for the predictor, which processes one batch at a time.

    In mode `immediate` it takes, when free, the waiting requests up to a full batch or `MAX_PASS`
    seconds, the most urgent first as far as is known. In mode `full_batching` it waits for a full
    batch, for `max_wait` seconds, or for the end of all arrivals. `deliver` gets each batch.
    """

    def __init__(
        self,
        events: EventQueue,
        model: PredictorModel,
        deliver: Callable[[list[Run]], None],
    ) -> None:
        self._events = events
        self._model = model
        self._deliver = deliver
        self._queue: list[tuple[float, float, Run]] = []  # order, deadline, request
        self._busy = False
        self._draining = False

    def submit(self, run: Run, order: float = 0) -> None:
        """Add a request; those with the smallest `order` are read first (`reading_order`). The
        predictor starts after all arrivals of this moment."""
        now = self._events.now
        deadline = now + self._model.max_wait
        self._queue.append((order, deadline, run))
        self._events.at(now, Order.PREDICTOR, self._start_batch)
        if self._model.mode == "full_batching":
            self._events.at(deadline, Order.PREDICTOR, self._start_batch)

    def drain(self) -> None:
        """Process incomplete batches from now on: no more requests will arrive."""
        self._draining = True
        self._events.at(self._events.now, Order.PREDICTOR, self._start_batch)

    def _start_batch(self) -> None:
        if self._busy or not self._queue or not self._due():
            return
        size = min(len(self._queue), self._largest_batch())
        self._queue.sort(key=itemgetter(0))  # stable: then by arrival
        batch = [run for _, _, run in self._queue[:size]]
        del self._queue[:size]
        self._busy = True
        model = self._model
        seconds = model.latency + model.latency_per_request * size

        def done() -> None:
            self._busy = False
            self._deliver(batch)
            self._start_batch()

        self._events.at(self._events.now + seconds, Order.PREDICTOR, done)

    def _largest_batch(self) -> int:
        largest = self._model.max_batch
        seconds = self._model.latency_per_request
        if self._model.mode == "full_batching" or not seconds:
            return largest
        in_a_pass = int((MAX_PASS - self._model.latency) / seconds)
        return min(largest, max(1, in_a_pass))

    def _due(self) -> bool:
        if self._model.mode == "immediate" or self._draining:
            return True
        oldest_deadline = min(deadline for _, deadline, _ in self._queue)
        return len(self._queue) >= self._model.max_batch or self._events.now >= oldest_deadline
