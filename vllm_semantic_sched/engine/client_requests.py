"""Requests on their way in and out: deduplication keys, and the parts of one client request."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable

from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.view import VllmView
from vllm_semantic_sched.engine.vllm_api import Request
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.overload.dedup import BadKey, read_key
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.step import SchedulingStep

# vLLM's ids of the parts of one client request: answer number, id, prompt number, random suffix.
_PART = re.compile(r"(?:\d+_)?(?P<origin>.*?)(?:-\d+)?(?:-[0-9a-f]{8})?")

# One of several answers to a prompt.
_ANSWER = re.compile(r"\d+_(?P<parent>.*)")
_MOST_ANSWERS = 128
_REMEMBERED = 256


class ClientRequests:
    """Requests of clients, of which vLLM makes several: one for each prompt and each answer.

    Args:
        refuse: ends one of vLLM's requests.
    """

    def __init__(
        self,
        core: SchedulingCore,
        refuse: Callable[[str, Refusal], bool],
        counters: Counters,
        logger: logging.Logger,
    ) -> None:
        self._core = core
        self._refuse = refuse
        self._counters = counters
        self._logger = logger
        self._refused_parents: OrderedDict[str, Refusal] = OrderedDict()

    def arrived(self, request: Request, job: Job, step: SchedulingStep, view: VllmView) -> None:
        """A request is in the queue; it, or others because of it, may end."""
        answer = _ANSWER.fullmatch(request.request_id)
        if answer and (refusal := self._refused_parents.get(answer["parent"])) is not None:
            self.end(job, refusal)
            return
        part = _PART.fullmatch(request.request_id)
        origin = part["origin"] if part else request.request_id
        step.arrived(view, job, self._dedup_key(request), origin)

    def end(self, job: Job, refusal: Refusal) -> None:
        """End a request, and the other answers to the same prompt."""
        self._refuse(job.request_id, refusal)
        if answer := _ANSWER.fullmatch(job.request_id):
            self._end_other_answers(answer["parent"], refusal)

    def _end_other_answers(self, parent: str, refusal: Refusal) -> None:
        """vLLM tells the client of the refusal when all answers have ended: end the others too,
        and those that are still on their way here."""
        self._refused_parents[parent] = refusal
        if len(self._refused_parents) > _REMEMBERED:
            self._refused_parents.popitem(last=False)
        for number in range(_MOST_ANSWERS):
            self._refuse(f"{number}_{parent}", refusal)

    def _dedup_key(self, request: Request) -> str | None:
        params = request.sampling_params
        try:
            return read_key(params.extra_args if params else None, self._core.policy.dedup)
        except BadKey as problem:
            if not self._counters.total("invalid_dedup_keys"):
                self._logger.warning(
                    "Request %s: %s; served without it. Further ones are counted in "
                    "semsched:invalid_dedup_keys_total only.",
                    request.request_id,
                    problem,
                )
            self._counters.add("invalid_dedup_keys")
            return None
