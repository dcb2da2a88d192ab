"""Reads new requests on vLLM's input thread, beside the model's steps, as far as that needs no
scheduler state. In an offline engine, and without an engine, everything happens on one thread."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_semantic_sched.engine.clock import unix_time
from vllm_semantic_sched.engine.guard import logger
from vllm_semantic_sched.engine.metrics.counters import Counters, Series
from vllm_semantic_sched.engine.requests.endings import (
    Endings,
    is_part_of_beam,
    origin_of,
    parent_of,
)
from vllm_semantic_sched.engine.requests.prediction import PredictionFeed
from vllm_semantic_sched.engine.vllm_api import Request, parameters_of
from vllm_semantic_sched.policy import step
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.estimates import LONGEST_TENANT
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.estimates.decision import Hint
from vllm_semantic_sched.policy.facts.job import (
    FREE_LENGTH,
    Job,
    LevelSource,
    SessionTurn,
    Source,
    StatedDeadlines,
    StatedLength,
)
from vllm_semantic_sched.policy.facts.prediction import Prediction
from vllm_semantic_sched.policy.order.tenants import ANONYMOUS
from vllm_semantic_sched.policy.overload.dedup import BadKey, read_key
from vllm_semantic_sched.policy.overload.refusal import TOO_LARGE
from vllm_semantic_sched.policy.sessions import SessionKey
from vllm_semantic_sched.policy.snapshot import Snapshot

# Longer lists of choices are not read: it would delay the request.
_MOST_CHOICES = 1024
_MOST_CHARACTERS = 16_384

SESSION = "session"  # key of a session's name in `vllm_xargs`

_LONGEST_TIME = 1e15  # milliseconds

# Keys of the milliseconds in which a client wants its request to start, to have its first token,
# and to be answered.
TTL, FIRST_TOKEN, DEADLINE = "ttl_ms", "slo_ttft_ms", "deadline_ms"

_LONGEST_SESSION = 128  # characters at which names of sessions are cut

_LITERAL = r'"(?:[^"\\]|\\.)*"'
# The grammar that vLLM's frontend makes of a list of choices (`choice_as_grammar`).
_CHOICES = re.compile(rf"root ::= {_LITERAL}(?: \| {_LITERAL})*\s*")
_ONE_CHOICE = re.compile(_LITERAL)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A new request, as far as it can be read without the scheduler's state."""

    policy: Policy  # by which it was read
    job: Job  # not known to the core yet (`SchedulingCore.arrive`)
    problems: Mapping[str, str | None]  # by counter, what is wrong; None: not to be logged
    dedup_key: str | None  # None without a usable one
    origin: str  # the client's request; the same for all its prompts and answers
    parent: str | None  # the prompt, if this is one of several answers to it
    refusable: bool  # whether its client can receive a refusal
    read_at_once: bool  # whether the instant reader has read its text
    fits: bool  # whether its KV can ever fit
    counted_as: Series  # the counter of requests to which it adds


@dataclass(eq=False)
class Arrivals:
    """Prepares new requests on vLLM's input thread, and hands them to the scheduler's thread. What
    was prepared is kept on vLLM's request, so that nothing is left of one that never arrives."""

    core: SchedulingCore
    jobs: Mapping[str, Job]  # of the scheduler
    predictions: PredictionFeed
    endings: Endings
    counters: Counters
    most_kv_tokens: Callable[[Request], int]  # that a request can have
    logs_blocks: bool  # jobs keep the hashes of their KV blocks, for the event log

    def prepare(self, request: Request) -> None:
        """Read a request and attach the result. Safe on any thread; may raise. `prepared` reads the
        parts of a session with streamed input: they share an id, and it sees them in order."""
        if not request.resumable and request.request_id not in self.jobs:
            request.semsched_arrival = self._read(request)  # type: ignore[attr-defined]

    def prepared(self, request: Request) -> Arrival:
        """What was prepared for a request; read now if nothing was, or if the policy has changed
        since. Only on the scheduler's thread."""
        arrival: Arrival | None = getattr(request, "semsched_arrival", None)
        if arrival is None or arrival.policy is not self.core.policy_ref.policy:
            submitted = arrival is not None and arrival.job.awaits_prediction
            arrival = self._read(request, submitted)
        if arrival.job.awaits_prediction:
            self.predictions.arrived(request.request_id)
        return arrival

    def _fit(self, request: Request) -> bool:
        """Whether a new request can ever fit into the KV cache. An answer that may grow too long
        ends where the blocks do, as it would at `max_model_len`. If vLLM orders the requests
        (policy key `observe`), it decides about that, too."""
        params = request.sampling_params
        if params is None or self.core.policy.observe:
            return True
        room = 1 + self.most_kv_tokens(request) - request.num_prompt_tokens  # its last needs no KV
        if room < max(1, params.min_tokens):
            return False
        request.max_tokens = min(request.max_tokens, room)
        return True

    def unread(self, request: Request) -> Job:
        """A job at the default level, for a request that could not be read."""
        return self.core.draft(
            request.request_id,
            prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_tokens,
            hint=Hint(None, LevelSource.DEFAULT),
            awaits_prediction=False,
        )

    def turn(self, job: Job, request: Request) -> None:
        """A session has got its next input. A level that it states counts from now on; the text is
        not read again."""
        params = request.sampling_params
        extra_args = params.extra_args if params else None
        hint = self.core.read_hints(extra_args, request.priority, job.tenant)
        if hint.problem:
            self.counters.add("invalid_hints")
        stated = stated_length(params)
        self.core.turn(job, request.num_prompt_tokens, request.max_tokens, hint, stated)

    def arrived(self, arrival: Arrival, snapshot: Callable[[], Snapshot] | None) -> None:
        """A request is in the queue; it, or others because of it, may end. Without a snapshot it is
        only counted."""
        job = arrival.job
        self.counters.totals[arrival.counted_as] += 1
        if arrival.read_at_once:
            self.counters.add("instant_predictions")
        if arrival.problems:
            self._count_problems(job, arrival.problems)
        if not arrival.fits:
            self.endings.refuse_prompt(job, TOO_LARGE)
            return
        if not arrival.refusable or snapshot is None:
            return
        if arrival.parent is not None and arrival.parent in self.endings.refused_prompts:
            self.endings.refuse_prompt(job, self.endings.refused_prompts[arrival.parent])
            return
        overload = self.core.overload
        if overload is not None and overload.admits_all.table and arrival.dedup_key is None:
            overload.enter(job)  # without the engine's accounts, which cost as much as the rest
            return
        ends = step.arrived(self.core, snapshot(), job, arrival.dedup_key, arrival.origin)
        for end in ends:
            self.endings.refuse_prompt(end.job, end.refusal)

    def _count_problems(self, job: Job, problems: Mapping[str, str | None]) -> None:
        for counter, problem in problems.items():
            if problem is not None and not self.counters.total(counter, ()):
                logger.warning(
                    "Request %s: %s; served without it. Further ones are counted in "
                    "semsched:%s_total only.",
                    job.request_id,
                    problem,
                    counter,
                )
            self.counters.add(counter)

    def _read(self, request: Request, submitted: bool = False) -> Arrival:
        """Read a request by the policy in force. `submitted`: the predictor has its text."""
        core = self.core
        request_id = request.request_id
        extra_args = parameters_of(request)
        tenant = read_tenant(extra_args)
        hint = core.read_hints(extra_args, request.priority, tenant)
        problems: dict[str, str | None] = {}
        dedup_key = None
        try:
            if core.policy.dedup != "none":
                dedup_key = read_key(extra_args)
        except BadKey as problem:
            problems["invalid_dedup_keys"] = str(problem)
        times: dict[str, float | None] = dict.fromkeys((TTL, DEADLINE, FIRST_TOKEN))
        for key in times:
            try:
                times[key] = read_milliseconds(extra_args, key)
            except ValueError as problem:
                problems["invalid_hints"] = str(problem)
        stated = stated_length(request.sampling_params)
        reads = submitted or self.predictions.reads(request, hint, stated.exact)
        passed, forgery = read_passed(extra_args)
        provisional, awaits_prediction = None, False
        turn = None
        if core.policy.sessions.memory is not None:
            turn = self._session_turn(request, extra_args)
        if reads:
            provisional, awaits_prediction = self.predictions.read(
                request, hint, passed, submitted, turn
            )
        if reads and not awaits_prediction and not is_part_of_beam(request):  # its queue is full
            problems["unread_prompts"] = None
        if hint.problem:
            problems["invalid_hints"] = hint.problem
        if forgery:
            problems["forged_readings"] = forgery
        fits = self._fit(request)
        job = core.draft(
            request_id,
            prompt_tokens=request.num_prompt_tokens,
            max_output_tokens=request.max_tokens,
            hint=hint,
            awaits_prediction=awaits_prediction,
            tenant=tenant,
            stated=stated,
            provisional=provisional,
            session=turn,
        )
        job.patience = times[TTL]
        if times[DEADLINE] is not None or times[FIRST_TOKEN] is not None:
            job.deadlines = StatedDeadlines(times[DEADLINE], times[FIRST_TOKEN])
        job.source = Source(unix_time(), request.block_hashes if self.logs_blocks else ())
        return Arrival(
            policy=core.policy,
            job=job,
            problems=problems,
            dedup_key=dedup_key,
            origin=origin_of(request_id),
            parent=parent_of(request_id),
            refusable=self.endings.can_end(request),
            read_at_once=provisional is not None,
            fits=fits,
            counted_as=("requests", (job.level_source.value,)),
        )

    def _session_turn(self, request: Request, extra_args: Any) -> SessionTurn | None:
        """The turn of a request in the session that it names; None if it names none."""
        key = session_key(extra_args)
        if key is None or is_part_of_beam(request):
            return None
        return self.core.sessions.begin(*key, self.core.lifecycle.clock())


# The HTTP server hands its reading of a text to the engine, so that the engine does not read it
# again and both see the same level. The reading travels in the request's `extra_args`, which
# clients fill too (`vllm_xargs`), as an entry of bytes: clients send JSON, which has none, so they
# cannot forge it. Text or numbers in its place come from a client; they are ignored and counted.

READING = "semsched_reading"  # key of the entry


def pass_reading(params: Any, reading: Prediction) -> None:
    """Add a reading to a request's sampling parameters. What a client has put in its place stays,
    for the engine to count."""
    extra_args = params.extra_args or {}
    if READING not in extra_args:
        values = reading.urgency, reading.length, reading.unreadable, reading.part
        params.extra_args = {**extra_args, READING: json.dumps(values).encode()}


def read_passed(extra_args: Any) -> tuple[Prediction | None, str | None]:
    """The reading in a request's `extra_args`, or why the entry is not the HTTP server's."""
    entry = extra_args.get(READING) if isinstance(extra_args, dict) else None
    if entry is None:
        return None, None
    if not isinstance(entry, bytes):
        return None, f"{READING} in vllm_xargs: only the server itself may set it"
    urgency, length, unreadable, part = json.loads(entry)
    prediction = Prediction(
        urgency=tuple(urgency),
        length=None if length is None else tuple(length),
        unreadable=unreadable,
        part=None if part is None else tuple(part),
    )
    return prediction, None


def read_tenant(extra_args: Any) -> str:
    """The tenant named in `vllm_xargs` of any type, cut to 64 characters; else `ANONYMOUS`."""
    return _read_name(extra_args, "tenant", LONGEST_TENANT) or ANONYMOUS


def read_session(extra_args: Any) -> str:
    """The session named in `vllm_xargs` of any type, cut to 128 characters; empty without one."""
    return _read_name(extra_args, SESSION, _LONGEST_SESSION)


def session_key(extra_args: Any) -> SessionKey | None:
    """The tenant and the session named in `vllm_xargs` of any type; None without a session."""
    session = read_session(extra_args)
    return (read_tenant(extra_args), session) if session else None


def _read_name(extra_args: Any, key: str, longest: int) -> str:
    name = extra_args.get(key) if isinstance(extra_args, dict) else None
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    return name.strip()[:longest] if isinstance(name, str) else ""


def read_milliseconds(extra_args: Any, key: str) -> float | None:
    """Seconds by a key of `vllm_xargs` in milliseconds; None without it. ValueError if that is not
    a positive number."""
    if not isinstance(extra_args, dict) or key not in extra_args:
        return None
    sent = extra_args[key]
    if isinstance(sent, int | float) and not isinstance(sent, bool) and 0 < sent < _LONGEST_TIME:
        return sent / 1000.0
    text = repr(sent)
    raise ValueError(f"{key} must be a positive number of milliseconds, got {text[:60]}")


def stated_length(sampling_params: Any) -> StatedLength:
    """Bounds on the output tokens, from vLLM's `SamplingParams`.

    - `min_tokens` is a lower bound. `ignore_eos` without stop strings, stop tokens, repetition
      detection or a grammar makes `max_tokens` the exact length.
    - A list of choices (`structured_outputs.choice`, or the grammar made of it) is an upper bound:
      the bytes of the longest choice and one token that ends it. Other grammars are not read.
    """
    if sampling_params is None:
        return FREE_LENGTH
    shortest = sampling_params.min_tokens or 0
    structured = sampling_params.structured_outputs
    if structured is not None:
        longest = _longest_choice(structured)
        return StatedLength(min(shortest, longest) if longest else shortest, longest)
    limit = sampling_params.max_tokens
    endless = (
        sampling_params.ignore_eos
        and not sampling_params.stop
        and not sampling_params.stop_token_ids
        and getattr(sampling_params, "repetition_detection", None) is None
    )
    if endless and limit is not None:
        return StatedLength(limit, limit)
    return StatedLength(shortest) if shortest else FREE_LENGTH


def _longest_choice(structured: Any) -> int | None:
    """Most output tokens of an answer from a list of choices; None for any other grammar."""
    choices, grammar = structured.choice, structured.grammar
    if choices:
        short = len(choices) <= _MOST_CHOICES
        return max(map(_most_tokens, choices)) + 1 if short else None
    short = isinstance(grammar, str) and len(grammar) <= _MOST_CHARACTERS
    if short and _CHOICES.fullmatch(grammar) is not None:
        # The quotes that are counted leave room for the token that ends the answer.
        return max(_most_tokens(choice.group()) for choice in _ONE_CHOICE.finditer(grammar))
    return None


def _most_tokens(text: str) -> int:
    # A token has at least one byte, and a character at most four.
    return len(text) if text.isascii() else 4 * len(text)
