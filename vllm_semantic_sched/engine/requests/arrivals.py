"""Reads new requests before they reach the scheduler's thread.

vLLM builds a request on its input thread, beside the model's steps, and hands it to the scheduler
between two steps. Everything about a request that needs no scheduler state is read there. In an
offline engine, and for a scheduler without an engine, both happen on one thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_semantic_sched.engine.requests.prediction import PredictionFeed
from vllm_semantic_sched.engine.requests.stated_lengths import stated_length
from vllm_semantic_sched.engine.vllm_api import Request, attach_arrival, attached_arrival
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.hints import Hint
from vllm_semantic_sched.policy.facts.job import Job, LevelSource
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.order.tenants import read_tenant
from vllm_semantic_sched.policy.overload.dedup import BadKey, read_key

# vLLM's ids of the parts of one client request: answer number, id, prompt number, random suffix.
_PART = re.compile(r"(?:\d+_)?(?P<origin>.*?)(?:-\d+)?(?:-[0-9a-f]{8})?")

# One of several answers to a prompt.
_ANSWER = re.compile(r"\d+_(?P<parent>.*)")


def origin_of(request_id: str) -> str:
    """The client's id of a request, from vLLM's."""
    part = _PART.fullmatch(request_id)
    return part["origin"] if part else request_id


def parent_of(request_id: str) -> str | None:
    """The prompt to which a request is one of several answers; None if it is the only one."""
    answer = _ANSWER.fullmatch(request_id)
    return answer["parent"] if answer else None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new request, as far as it can be read without the scheduler's state.

    Attributes:
        policy: the policy by which it was read.
        job: not known to the core yet (`SchedulingCore.arrive`).
        source: origin of its level, as in metrics.
        hint_problem: why the urgency hint is unusable; None if it is usable or absent.
        reading_problem: why its entry of the HTTP server's reading is ignored; None if it is not.
        dedup_key: None without a usable one.
        dedup_problem: why the key is unusable; None if it is usable or absent.
        origin: the client's request; the same for all its prompts and answers.
        parent: the prompt, if this is one of several answers to it; else None.
        refusable: whether its client can receive a refusal.
        unread: whether its text should be read, but the predictor's queue is full.
        has_problem: whether there is anything to report about it.
        read_at_once: whether the instant reader has read its text.
    """

    policy: Policy
    job: Job
    source: str
    hint_problem: str | None
    reading_problem: str | None
    dedup_key: str | None
    dedup_problem: str | None
    origin: str
    parent: str | None
    refusable: bool
    unread: bool
    has_problem: bool
    read_at_once: bool


class Arrivals:
    """Prepares new requests on vLLM's input thread, and hands them to the scheduler's thread.

    What was prepared is kept on vLLM's request, so that nothing is left of a request that never
    arrives.

    Args:
        predictions: reads the texts.
        known: whether the scheduler has a request of this id.
        refusable: whether the client of a request can receive a refusal.
        logs_blocks: whether jobs keep the hashes of their KV blocks, for the event log.
    """

    def __init__(
        self,
        core: SchedulingCore,
        predictions: PredictionFeed,
        known: Callable[[str], bool],
        refusable: Callable[[Request], bool],
        logs_blocks: bool = False,
    ) -> None:
        self._logs_blocks = logs_blocks
        self._core = core
        self._predictions = predictions
        self._known = known
        self._refusable = refusable

    def prepare(self, request: Request) -> None:
        """Read a request and attach the result. Safe on any thread; may raise.

        The parts of a session with streamed input share one id and are left to `prepared`, which
        sees them in order.
        """
        if not request.resumable and not self._known(request.request_id):
            attach_arrival(request, self._read(request, submitted=False))

    def prepared(self, request: Request) -> Arrival:
        """What was prepared for a request; read now if nothing was, or if the policy has changed
        since. Only on the scheduler's thread."""
        arrival: Arrival | None = attached_arrival(request)
        if arrival is None:
            arrival = self._read(request, submitted=False)
        elif arrival.policy is not self._core.policy:
            arrival = self._read(request, submitted=arrival.job.awaits_prediction)
        if arrival.job.awaits_prediction:
            self._predictions.arrived(request.request_id)
        return arrival

    def unread(self, request: Request) -> Job:
        """A job at the default level, for a request that could not be read."""
        return self._core.draft(
            request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_tokens,
            hint=Hint(None, LevelSource.DEFAULT),
            awaits_prediction=False,
        )

    def _read(self, request: Request, submitted: bool) -> Arrival:
        """Read a request by the policy in force.

        Args:
            submitted: the predictor has its text.
        """
        core, request_id, params = self._core, request.request_id, request.sampling_params
        extra_args = params.extra_args if params else None
        hint = core.read_hints(extra_args, request.priority)
        dedup_key = dedup_problem = None
        try:
            dedup_key = read_key(extra_args, core.policy.dedup)
        except BadKey as problem:
            dedup_problem = str(problem)
        stated = stated_length(params)
        reads = submitted or self._predictions.reads(request, hint, stated.exact)
        passed = read_passed(extra_args)
        first = self._predictions.first_reading(request, passed.reading) if reads else None
        awaits_prediction = submitted or (
            first is not None and self._predictions.submit(request_id, hint, first)
        )
        unread = reads and not awaits_prediction
        job = core.draft(
            request_id,
            prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_tokens,
            hint=hint,
            awaits_prediction=awaits_prediction,
            tenant=read_tenant(extra_args),
            stated=stated,
            provisional=None if first is None else first.provisional,
        )
        job.came = time.time()
        if self._logs_blocks:
            job.block_hashes = request.block_hashes
        return Arrival(
            policy=core.policy,
            job=job,
            source=job.level_source.value,
            hint_problem=hint.problem,
            reading_problem=passed.problem,
            dedup_key=dedup_key,
            dedup_problem=dedup_problem,
            origin=origin_of(request_id),
            parent=parent_of(request_id),
            refusable=self._refusable(request),
            unread=unread,
            read_at_once=first is not None and first.provisional is not None,
            has_problem=unread or any((hint.problem, passed.problem, dedup_problem)),
        )


# The HTTP server hands its reading of a text to the engine, so that the engine does not read it
# again and both see the same level. The reading travels in the request's `extra_args`, which
# clients fill too (`vllm_xargs`), as an entry of bytes: clients send JSON, which has none, so they
# cannot forge it. Text or numbers in its place come from a client; they are ignored and counted.

READING = "semsched_reading"
"""Key of the entry."""


class PassedReading(NamedTuple):
    """What `read_passed` has found.

    Attributes:
        reading: None if the HTTP server passed none.
        problem: why the entry is not the HTTP server's; None if it is, or is absent.
    """

    reading: Prediction | None
    problem: str | None = None


_ABSENT = PassedReading(None)
_FORGED = PassedReading(None, f"{READING} in vllm_xargs: only the server itself may set it")


def pass_reading(params: Any, reading: Prediction) -> None:
    """Add a reading to a request's sampling parameters. What a client has put in its place stays,
    for the engine to count."""
    extra_args = params.extra_args or {}
    if READING not in extra_args:
        entry = json.dumps((reading.urgency, reading.length, reading.unreadable)).encode()
        params.extra_args = {**extra_args, READING: entry}


def read_passed(extra_args: Any) -> PassedReading:
    """The reading in the `extra_args` of a request, which may be of any type."""
    entry = extra_args.get(READING) if isinstance(extra_args, dict) else None
    if entry is None:
        return _ABSENT
    if not isinstance(entry, bytes):
        return _FORGED
    urgency, length, unreadable = json.loads(entry)
    return PassedReading(
        Prediction(tuple(urgency), None if length is None else tuple(length), unreadable)
    )
