"""How requests end: reads the outcome from vLLM's request, and ends requests so that their clients
learn why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_semantic_sched.engine.vllm_api import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestStatus,
    Scheduler,
    refused_output,
)
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.overload.refusal import Refusal

# Tokens that the engine may have generated between a stop string and the abort.
_STOP_STRING_SLACK = 64


class RequestEnd(NamedTuple):
    """How a request ended: `state` and `reason` for the lifecycle, `ending` for the length
    estimates."""

    state: JobState
    reason: str
    ending: AnswerEnd


_ENDS = {
    RequestStatus.FINISHED_STOPPED: RequestEnd(JobState.COMPLETED, "stop", AnswerEnd.STOPPED),
    RequestStatus.FINISHED_LENGTH_CAPPED: RequestEnd(JobState.COMPLETED, "length", AnswerEnd.CUT),
    RequestStatus.FINISHED_REPETITION: RequestEnd(
        JobState.COMPLETED, "repetition", AnswerEnd.ABORTED
    ),
    RequestStatus.FINISHED_IGNORED: RequestEnd(JobState.FAILED, "too_long", AnswerEnd.ABORTED),
    RequestStatus.FINISHED_ERROR: RequestEnd(JobState.FAILED, "error", AnswerEnd.ABORTED),
}
_ABORTED = RequestEnd(JobState.CANCELLED, "abort", AnswerEnd.ABORTED)


def end_of(
    request: Request, refusal: Refusal | None, decode: Callable[[list[int]], str] | None
) -> RequestEnd:
    """How a finished request ended.

    Args:
        refusal: why the policy ended it; None if the policy did not.
        decode: token ids to text; None if the engine has no tokenizer.
    """
    if refusal is not None:
        return RequestEnd(JobState.REFUSED, refusal.code.value, AnswerEnd.ABORTED)
    end = _ENDS.get(request.status, _ABORTED)
    params = request.sampling_params
    if params is None or params.ignore_eos:  # the model could not end it
        end = end._replace(ending=AnswerEnd.ABORTED)
    if end.state is JobState.CANCELLED and _has_stop_string(request, decode):
        return RequestEnd(JobState.COMPLETED, "stop_string", AnswerEnd.ABORTED)
    return end


def _has_stop_string(request: Request, decode: Callable[[list[int]], str] | None) -> bool:
    """Whether a request was aborted because of a stop string. vLLM's API servers find stop
    strings and then abort the request, as if the client had disconnected."""
    stops = request.sampling_params.stop if request.sampling_params else None
    if not stops or decode is None:
        return False
    words = [stops] if isinstance(stops, str) else stops
    tail = list(request.output_token_ids[-max(map(len, words)) - _STOP_STRING_SLACK :])
    text = decode(tail)
    return any(word in text for word in words)


class Endings:
    """Ends requests from inside the scheduler and delivers their last outputs.

    A refused request leaves the queues and frees its KV at once. Its last output, which carries the
    refusal, goes out with the outputs of the next step. There always is a next step, on an idle
    engine too: vLLM keeps stepping until its workers know of every finished request.

    Attributes:
        refusal: the refusal of the request that vLLM frees right now; None for other requests.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._deferred: dict[str, Refusal] | None = None
        self.refusal: Refusal | None = None

    def can_end(self, request: Request) -> bool:
        """Whether the client of a request can receive a refusal. Pooling outputs cannot carry
        one, and a session with streamed input does not end with one output."""
        return request.sampling_params is not None and not request.resumable

    def end(self, request_id: str, refusal: Refusal) -> bool:
        """End a waiting or running request; during schedule(), right after it.

        Returns:
            False if the request is gone or cannot be ended.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished() or not self.can_end(request):
            return False
        if self._deferred is not None:
            return self._deferred.setdefault(request_id, refusal) is refusal
        self._end(request, refusal)
        return True

    def defer(self) -> None:
        """Put endings off from now on: vLLM is about to iterate over its queues."""
        self._deferred = {}

    def end_deferred(self) -> None:
        """End the requests that were put off since `defer`."""
        deferred, self._deferred = self._deferred, None
        for request_id, refusal in (deferred or {}).items():
            self.end(request_id, refusal)

    def deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the last outputs of ended requests to a step's outputs, which are by client."""
        pending, self._outputs = self._outputs, {}
        for client, last in pending.items():
            if client not in outputs:
                outputs[client] = EngineCoreOutputs()
            outputs[client].outputs.extend(last)

    def _end(self, request: Request, refusal: Refusal) -> None:
        if (
            self._scheduler.log_stats
            and not request.num_output_tokens
            and not request.num_preemptions
        ):
            # Without this event vLLM would count the queue and prefill times of a request that
            # was never scheduled from the machine's boot.
            request.record_event(EngineCoreEventType.SCHEDULED)
        self.refusal = refusal
        try:
            self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        finally:
            self.refusal = None
        self._outputs.setdefault(request.client_index, []).append(refused_output(request, refusal))
