"""Two clocks: the seconds that the policy counts, and how long engine steps take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm_semantic_sched.policy.profile.formula import Batch

if TYPE_CHECKING:  # this module loads without vLLM
    from vllm_semantic_sched.engine.vllm_api import Request, SchedulerOutput

# Steps in flight: two with asynchronous scheduling, more with pipeline parallelism. A limit,
# because steps that failed never come back.
_MAX_IN_FLIGHT = 64
_SAMPLE_GAP = 0.04  # seconds between two samples of steps
_MOST_SAMPLES = 250  # kept until they are written down


_replacement: Callable[[], float] | None = None
_REPLACED_EPOCH = 1_767_225_600.0  # Unix time at second 0 of a replaced clock: 2026 begins


def monotonic() -> float:
    """The monotonic clock. All of engine/ that runs in a step reads this one, or `unix_time`."""
    return time.monotonic() if _replacement is None else _replacement()


def unix_time() -> float:
    """Seconds since 1970."""
    return time.time() if _replacement is None else _REPLACED_EPOCH + _replacement()


def replace_clock(read: Callable[[], float] | None) -> None:
    """Count seconds by another clock in this process, as under an emulated device; None: by the
    real one again."""
    global _replacement
    _replacement = read


class ServiceClock:
    """Seconds during which the engine was serving: the monotonic clock, less pauses. While an
    operator pauses the queue, requests do not age and no timeout or deadline comes closer."""

    def __init__(self, seconds: Callable[[], float] = monotonic) -> None:
        self.seconds = seconds
        self._paused = 0.0  # total seconds
        self._since: float | None = None

    def __call__(self) -> float:
        """Seconds since an arbitrary time; the same value during a pause."""
        now = self.seconds() if self._since is None else self._since
        return now - self._paused

    def pause(self) -> None:
        """Stop the clock; no-op if it stands."""
        if self._since is None:
            self._since = self.seconds()

    def resume(self) -> None:
        """Let the clock go on; no-op if it does."""
        if self._since is not None:
            self._paused += self.seconds() - self._since
            self._since = None


class StepClock:
    """Times steps, from one output to the next: only one is computed at a time, and what the host
    does between two is part of a step. After idleness, from the begin of schedule()."""

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[Batch | None, float]] = {}
        self._last_output = 0.0
        self._went_on = False  # from the last output to the next step at once

    def scheduled(self, output: SchedulerOutput, batch: Batch | None, begin: float) -> None:
        """schedule() has returned; `begin`: when it was called, in seconds. `batch` None: the step
        is of no interest."""
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._in_flight.clear()
        self._in_flight[id(output)] = (batch, begin)

    def finished(self, output: SchedulerOutput, now: float) -> tuple[Batch, float] | None:
        """A step whose output has arrived, and its seconds; None if it is of no interest, or its
        start is unknown."""
        batch, begin = self._in_flight.pop(id(output), (None, 0.0))
        start = self._last_output if self._went_on else max(begin, self._last_output)
        self._last_output = now
        self._went_on = True
        return None if batch is None else (batch, now - start)

    def idle(self) -> None:
        """The engine may wait before its next step."""
        self._went_on = False


class StepSamples:
    """Seconds of a few of an engine's steps, see `StepClock`: the model, and all that the engine
    does between two steps."""

    def __init__(self) -> None:
        self._next = 0.0
        self._samples: list[tuple[Batch, float]] = []
        self._clock = StepClock()

    def scheduled(self, output: SchedulerOutput, begin: float, batch: Callable[[], Batch]) -> None:
        """A step's schedule() began then, in seconds: sample it if it is time for one."""
        sampled = None
        if begin >= self._next and len(self._samples) < _MOST_SAMPLES:
            self._next = begin + _SAMPLE_GAP
            sampled = batch()
        self._clock.scheduled(output, sampled, begin)

    def finished(self, output: SchedulerOutput, now: float) -> None:
        """The output of a step has arrived."""
        step = self._clock.finished(output, now)
        if step is not None:
            self._samples.append(step)

    def idle(self) -> None:
        """The engine may wait before its next step."""
        self._clock.idle()

    def drain(self) -> list[tuple[int, int, int, int, int, int]]:
        """The samples: decodes, context, prefills, tokens, squares (see `Batch`), microseconds."""
        rows = [
            (
                batch.decodes,
                batch.context,
                batch.prefills,
                batch.prefill_tokens,
                batch.prefill_squares,
                round(seconds * 1e6),
            )
            for batch, seconds in self._samples
        ]
        self._samples = []
        return rows


def batch_of(
    output: SchedulerOutput,
    requests: Mapping[str, Request],
    running: Sequence[Request],
    draft_tokens: int = 0,
) -> Batch:
    """What schedule() put into a step. O(requests in it).

    Args:
        requests: the scheduler's, after schedule(): their computed tokens include this step's.
        running: those of them that have seats.
        draft_tokens: speculative tokens that a decoding request may have in a step.
    """
    scheduled = output.num_scheduled_tokens
    most = 1 + draft_tokens  # of a decoding request
    computing: Iterable[Request] = running
    if len(running) != len(scheduled):  # else they are the same, and take half the time
        computing = map(requests.__getitem__, scheduled)
    batch = Batch(
        decodes=len(scheduled),
        context=sum([request.num_computed_tokens for request in computing]),
    )
    if output.total_num_scheduled_tokens > len(scheduled):
        prefills = [(name, tokens) for name, tokens in scheduled.items() if tokens > most]
        for name, tokens in prefills:
            end = requests[name].num_computed_tokens
            batch.add_prefill(end - tokens, end)
            batch.decodes -= 1
            batch.context -= end
    return batch
