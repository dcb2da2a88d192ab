"""The ends of requests: how vLLM's requests ended, refusals that clients learn of, and readings
kept for corrections by operators."""

import re
from collections import OrderedDict
from collections.abc import Collection
from typing import Any, Protocol

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.vllm_api import EngineCoreOutputs, Request, RequestStatus
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.calibration import AnswerEnd
from vllm_semantic_sched.policy.facts.job import Job, JobState
from vllm_semantic_sched.policy.overload.refusal import Refusal

_MOST_ANSWERS = 128  # to a prompt
_REMEMBERED = 256  # refused prompts
_KEPT = 20_000  # readings, about 8 MB
_STOP_STRING_SLACK = 64  # tokens that may have been generated between a stop string and the abort

# vLLM's ids of the parts of one client request: answer number, route and client's id, prompt
# number, random suffix.
_ANSWER = re.compile(r"\d+_(?P<parent>.*)")  # one of several answers to a prompt
# What vLLM's routes put before the client's id of a request (`x-request-id`).
_ROUTE = re.compile(
    r"^(?:chatcmpl|cmpl|embd|pooling|classify|score|generate-tokens|decision|generative-scoring)-"
)
_SUFFIX = re.compile(r"-[0-9a-f]{8}$")  # random
_PROMPT_NUMBER = re.compile(r"[-_]\d+$")


def origin_of(request_id: str) -> str:
    """The id that all parts of a client's request share, from vLLM's id of one of them."""
    return _without_prompt_number(_SUFFIX.sub("", parent_of(request_id) or request_id))


def _without_prompt_number(answer: str) -> str:
    # A chat has one prompt, without a number; the client's id may end like one.
    return answer if answer.startswith("chatcmpl-") else _PROMPT_NUMBER.sub("", answer)


def is_part_of_beam(request: Request) -> bool:
    """Whether a request computes one token of a beam: its text and its length say nothing about
    what the client asked for."""
    params = request.sampling_params
    return params is not None and params.max_tokens == 1 and vllm_api.is_beam(request.request_id)


def parent_of(request_id: str) -> str | None:
    """The prompt to which a request is one of several answers; None if it is the only one."""
    answer = _ANSWER.fullmatch(request_id)
    return None if answer is None else answer["parent"]


def requests_named(request_ids: Collection[str], name: str) -> list[str]:
    """The ids, among vLLM's, of the requests that `name` stands for: an id of vLLM's, or of the
    client's, as in the answer or as sent in `x-request-id`. All prompts of a client's request have
    its name, and all answers to a prompt that of any of them. O(n)."""
    if name in request_ids:
        name = parent_of(name) or name
    # The first test spares most requests the second one.
    return [each for each in request_ids if name in each and name in _names_of(each)]


def _names_of(request_id: str) -> set[str]:
    prompt = parent_of(request_id) or request_id
    answer = _SUFFIX.sub("", prompt)
    names = {prompt, answer, _without_prompt_number(answer)}
    return names | {_ROUTE.sub("", name) for name in names} | {request_id}


# For the length estimates, and state and reason for the lifecycle.
RequestEnd = tuple[AnswerEnd, JobState, str]
_ENDS: dict[RequestStatus, RequestEnd] = {
    RequestStatus.FINISHED_STOPPED: (AnswerEnd.STOPPED, JobState.COMPLETED, "stop"),
    RequestStatus.FINISHED_LENGTH_CAPPED: (AnswerEnd.CUT, JobState.COMPLETED, "length"),
    RequestStatus.FINISHED_REPETITION: (AnswerEnd.ABORTED, JobState.COMPLETED, "repetition"),
    RequestStatus.FINISHED_IGNORED: (AnswerEnd.ABORTED, JobState.FAILED, "too_long"),
    RequestStatus.FINISHED_ERROR: (AnswerEnd.ABORTED, JobState.FAILED, "error"),
}
_ABORTED = (AnswerEnd.ABORTED, JobState.CANCELLED, "abort")


def end_of(request: Request, refusal: Refusal | None, tokenizer: Any) -> RequestEnd:
    """How a finished request ended. `refusal`: why the policy ended it, if it did."""
    if refusal is not None:
        return AnswerEnd.ABORTED, JobState.REFUSED, refusal.code.value
    ending, state, reason = _ENDS.get(request.status, _ABORTED)
    if state is JobState.CANCELLED and _has_stop_string(request, tokenizer):
        return AnswerEnd.ABORTED, JobState.COMPLETED, "stop_string"
    params = request.sampling_params
    # The model could not end it.
    if params is None or params.ignore_eos or is_part_of_beam(request):
        ending = AnswerEnd.ABORTED
    return ending, state, reason


def _has_stop_string(request: Request, tokenizer: Any) -> bool:
    """Whether vLLM's API server found a stop string, for which it aborts a request."""
    stops = request.sampling_params.stop if request.sampling_params else None
    if not stops or tokenizer is None:
        return False
    words = [stops] if isinstance(stops, str) else stops
    tokens = request.output_token_ids[-max(map(len, words)) - _STOP_STRING_SLACK :]
    text = tokenizer.decode(list(tokens))
    return any(word in text for word in words)


class EndingScheduler(Protocol):
    """The attributes of a `SemanticScheduler` that `Endings` needs."""

    core: SchedulingCore
    counters: Counters
    jobs: dict[str, Job]
    requests: dict[str, Request]
    log_stats: bool

    def finish_requests(self, request_ids: str, finished_status: RequestStatus) -> object:
        """See `vllm_api.Scheduler`."""


class Endings:
    """Ends requests from inside the scheduler: they leave the queues and free their KV at once.
    Their last outputs, which carry the refusal, go out with those of the next step. There always is
    one: vLLM keeps stepping until its workers know of every finished request."""

    def __init__(self, scheduler: EndingScheduler) -> None:
        self._scheduler = scheduler
        self._outputs: dict[int, list[vllm_api.EngineCoreOutput]] = {}
        self._deferred: dict[str, Refusal] | None = None
        self.refusal: Refusal | None = None  # of the request that vLLM frees right now
        self.refused_prompts: OrderedDict[str, Refusal] = OrderedDict()  # the last, see `parent_of`

    def can_end(self, request: Request) -> bool:
        """Whether the client can receive a refusal. Pooling outputs can carry one since vLLM 0.33;
        a session with streamed input does not end with one output."""
        can_carry = request.sampling_params is not None or vllm_api.OUTPUTS_CARRY_ERRORS
        return can_carry and not request.resumable

    def refuse(self, request_id: str, refusal: Refusal) -> bool:
        """End a waiting or running request with a code that its client sees, and count it; False if
        there is none, or it cannot be refused (`can_end`)."""
        job = self._scheduler.jobs.get(request_id)
        if not self._end(request_id, refusal):
            return False
        if job is not None:
            tier = self._scheduler.core.policy.tier_names[job.level]
            self._scheduler.counters.add("refused_requests", (refusal.code.value, tier))
        return True

    def refuse_prompt(self, job: Job, refusal: Refusal) -> None:
        """End a request, and the other answers to the same prompt: vLLM tells the client of the
        refusal when all of them have ended, those too that are still on their way here."""
        self.refuse(job.request_id, refusal)
        prompt = parent_of(job.request_id)
        if prompt is None:
            return
        self.refused_prompts[prompt] = refusal
        if len(self.refused_prompts) > _REMEMBERED:
            self.refused_prompts.popitem(last=False)
        for number in range(_MOST_ANSWERS):
            self.refuse(f"{number}_{prompt}", refusal)

    def _end(self, request_id: str, refusal: Refusal) -> bool:
        """End a request; during schedule(), after it. False if it is gone or cannot be ended."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished() or not self.can_end(request):
            return False
        if self._deferred is not None:
            is_new = request_id not in self._deferred
            self._deferred.setdefault(request_id, refusal)
            return is_new
        was_scheduled = request.num_output_tokens or request.num_preemptions
        if self._scheduler.log_stats and not was_scheduled:
            # Without this event vLLM would count the queue and prefill times of a request that
            # was never scheduled from the machine's boot.
            request.record_event(vllm_api.EngineCoreEventType.SCHEDULED)
        self.refusal = refusal
        try:
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ERROR)
        finally:
            self.refusal = None
        output = vllm_api.refused_output(request, refusal)
        self._outputs.setdefault(request.client_index, []).append(output)
        return True

    def defer(self) -> None:
        """Put endings off from now on: vLLM is about to iterate over its queues."""
        self._deferred = {}

    def end_deferred(self) -> None:
        """End the requests whose endings were put off, and no longer put any off."""
        deferred = self._deferred or {}
        self._deferred = None
        for request_id, refusal in deferred.items():
            self._end(request_id, refusal)

    def deliver(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Add the last outputs of ended requests to a step's outputs, which are by client."""
        pending = self._outputs
        self._outputs = {}
        for client, last in pending.items():
            outputs.setdefault(client, EngineCoreOutputs()).outputs.extend(last)


class RecentReadings:
    """Probabilities and level of the requests that ended last, by the client's id; of several
    prompts or answers, those of the last."""

    def __init__(self) -> None:
        self._readings: OrderedDict[str, dict[str, Any]] = OrderedDict()

    def keep(self, job: Job) -> None:
        """Remember a job that has ended, if the predictor has read it."""
        if job.prediction is None or job.awaits_prediction:
            return
        origin = origin_of(job.request_id)
        self._readings[origin] = {
            "probabilities": list(job.prediction.urgency),
            "level": job.level,
        }
        self._readings.move_to_end(origin)
        if len(self._readings) > _KEPT:
            self._readings.popitem(last=False)

    def find(self, request_id: str) -> dict[str, Any] | None:
        """`probabilities` and `level` of a request, by the client's id or vLLM's."""
        return self._readings.get(request_id) or self._readings.get(origin_of(request_id))
