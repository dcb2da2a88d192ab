"""How long engine steps take, and what was in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_semantic_sched.policy.facts.profile import Batch

if TYPE_CHECKING:
    from vllm_semantic_sched.engine.vllm_api import Request, SchedulerOutput

# Batches in flight: two with asynchronous scheduling, more with pipeline parallelism. Outputs
# that never come back (a failed step) must not pile up.
_MOST_IN_FLIGHT = 64


class StepClock:
    """Pairs each schedule() with the update_from_output() of the same output.

    A step lasts from the return of schedule() to its output; with several in flight, from the
    output before it, since only one is computed at a time.
    """

    def __init__(self) -> None:
        self._in_flight: dict[int, tuple[Batch, float]] = {}
        self._last_output = 0.0

    def scheduled(self, output: SchedulerOutput, batch: Batch, now: float) -> None:
        """schedule() has returned; `now` in seconds."""
        if len(self._in_flight) >= _MOST_IN_FLIGHT:
            self._in_flight.clear()
        self._in_flight[id(output)] = (batch, now)

    def finished(self, output: SchedulerOutput, now: float) -> tuple[Batch, float] | None:
        """The output of a step is there: what was in the step and its seconds. None if its
        start was not seen."""
        started = self._in_flight.pop(id(output), None)
        since, self._last_output = self._last_output, now
        if started is None:
            return None
        batch, at = started
        return batch, now - max(at, since)


def batch_of(
    output: SchedulerOutput,
    requests: Mapping[str, Request],
    draft_tokens: int = 0,
    context: int | None = None,
) -> Batch:
    """What schedule() has put into a step.

    Args:
        requests: the scheduler's, after schedule(): their computed tokens include this step's.
        draft_tokens: speculative tokens that a decoding request may have in a step.
        context: an estimate of the decoding requests' tokens, where adding them up would cost
            too much.
    """
    scheduled = output.num_scheduled_tokens
    batch = Batch(decodes=len(scheduled))
    most = 1 + draft_tokens
    if output.total_num_scheduled_tokens > len(scheduled):
        for request_id, tokens in scheduled.items():
            if tokens > most:
                end = requests[request_id].num_computed_tokens
                batch.add_prefill(end - tokens, end)
        batch.decodes -= batch.prefills
    if context is None:
        context = sum(
            requests[request_id].num_computed_tokens
            for request_id, tokens in scheduled.items()
            if tokens <= most
        )
    batch.context = context
    return batch
