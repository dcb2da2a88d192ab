"""Reads from vLLM's request how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_semantic_sched.engine.vllm_api import Request, RequestStatus
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.overload.refusal import Refusal

# Tokens that the engine may have gone on for after a stop string, until the abort came.
_SLACK = 64


class RequestEnd(NamedTuple):
    """How a request ended: for the lifecycle, why in a word, and for the length estimates."""

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
_GONE = RequestEnd(JobState.CANCELLED, "abort", AnswerEnd.ABORTED)


def end_of(
    request: Request, refusal: Refusal | None, decode: Callable[[list[int]], str] | None
) -> RequestEnd:
    """How a finished request ended.

    Args:
        refusal: why the policy ended it, if it was the policy.
        decode: token ids to text, where the engine has a tokenizer.
    """
    if refusal is not None:
        return RequestEnd(JobState.REFUSED, refusal.code.value, AnswerEnd.ABORTED)
    end = _ENDS.get(request.status, _GONE)
    params = request.sampling_params
    if params is None or params.ignore_eos:  # the model was not free to end it
        end = end._replace(ending=AnswerEnd.ABORTED)
    if end.state is JobState.CANCELLED and _has_stop_string(request, decode):
        return RequestEnd(JobState.COMPLETED, "stop_string", AnswerEnd.ABORTED)
    return end


def _has_stop_string(request: Request, decode: Callable[[list[int]], str] | None) -> bool:
    """vLLM's API servers look for stop strings and abort the request when they find one, which
    looks like a client that went away."""
    stops = request.sampling_params.stop if request.sampling_params else None
    if not stops or decode is None:
        return False
    words = [stops] if isinstance(stops, str) else stops
    tail = list(request.output_token_ids[-max(map(len, words)) - _SLACK :])
    text = decode(tail)
    return any(word in text for word in words)
