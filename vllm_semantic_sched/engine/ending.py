"""Ends requests from inside the scheduler so that their clients are told."""

from __future__ import annotations

from vllm_semantic_sched.engine.vllm_api import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    Request,
    RequestStatus,
    Scheduler,
)
from vllm_semantic_sched.policy.overload.refusal import Refusal


class Endings:
    """Refused requests on their way out.

    A request leaves the queues and its KV is freed at once; its last output, with the refusal as
    `stop_reason`, goes with the outputs of the next step. vLLM steps until it has told its
    workers of every finished request, so there always is one, on an idle engine too.

    Attributes:
        refusal: why the request that vLLM is freeing now is ended; None while it frees others.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._deferred: dict[str, Refusal] | None = None
        self.refusal: Refusal | None = None

    def can_end(self, request: Request) -> bool:
        """Whether the client of a request could be told. Pooling outputs have no room for it,
        and a session with streamed input does not end with one output."""
        return request.sampling_params is not None and not request.resumable

    def end(self, request_id: str, refusal: Refusal) -> bool:
        """End a waiting or running request; while vLLM arranges a step, right after it.

        Returns:
            False if the request is not there any more or cannot be ended.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished() or not self.can_end(request):
            return False
        if self._deferred is not None:
            return self._deferred.setdefault(request_id, refusal) is refusal
        self._end(request, refusal)
        return True

    def hold(self) -> None:
        """vLLM begins to arrange a step and iterates over its queues."""
        self._deferred = {}

    def release(self) -> None:
        """The step is arranged: end what was to be ended meanwhile."""
        deferred, self._deferred = self._deferred, None
        for request_id, refusal in (deferred or {}).items():
            self.end(request_id, refusal)

    def deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the last outputs of ended requests to a step's outputs, by client."""
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
            # Else vLLM's queue and prefill times of a request that was never scheduled would
            # count from the start of the machine.
            request.record_event(EngineCoreEventType.SCHEDULED)
        self.refusal = refusal
        try:
            self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
        finally:
            self.refusal = None
        self._outputs.setdefault(request.client_index, []).append(
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=refusal.to_text(),
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
        )
