"""Requests of clients on their way in and out, and the parts of one client request."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

from vllm_semantic_sched.engine.metrics.counters import Counters
from vllm_semantic_sched.engine.requests.arrivals import Arrival, parent_of
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.overload.refusal import Refusal
from vllm_semantic_sched.policy.step import SchedulingStep
from vllm_semantic_sched.policy.view import EngineView

_MOST_ANSWERS = 128
_REMEMBERED = 256


class ClientRequests:
    """Requests of clients, of which vLLM makes several: one for each prompt and each answer.

    Args:
        refuse: ends one of vLLM's requests.
    """

    def __init__(
        self,
        refuse: Callable[[str, Refusal], bool],
        counters: Counters,
        logger: logging.Logger,
    ) -> None:
        self._refuse = refuse
        self._counters = counters
        self._logger = logger
        self._refused_parents: OrderedDict[str, Refusal] = OrderedDict()

    def arrived(self, arrival: Arrival, step: SchedulingStep | None, view: EngineView) -> None:
        """A request is in the queue; it, or others because of it, may end. Without a step it is
        only counted."""
        self._counters.add("requests", arrival.source)
        if arrival.read_at_once:
            self._counters.add("instant_predictions")
        if arrival.has_problem:
            self._report(arrival)
        if not arrival.refusable or step is None:
            return
        if self._refused_parents and arrival.parent is not None:
            refusal = self._refused_parents.get(arrival.parent)
            if refusal is not None:
                self.end(arrival.job, refusal)
                return
        step.arrived(view, arrival.job, arrival.dedup_key, arrival.origin)

    def end(self, job: Job, refusal: Refusal) -> None:
        """End a request, and the other answers to the same prompt."""
        self._refuse(job.request_id, refusal)
        if (parent := parent_of(job.request_id)) is not None:
            self._end_other_answers(parent, refusal)

    def _end_other_answers(self, parent: str, refusal: Refusal) -> None:
        """vLLM tells the client of the refusal when all answers have ended: end the others too,
        and those that are still on their way here."""
        self._refused_parents[parent] = refusal
        if len(self._refused_parents) > _REMEMBERED:
            self._refused_parents.popitem(last=False)
        for number in range(_MOST_ANSWERS):
            self._refuse(f"{number}_{parent}", refusal)

    def _report(self, arrival: Arrival) -> None:
        """Count what is wrong with a request, and log the first of each kind."""
        if arrival.unread:
            self._counters.add("unread_prompts")
        for counter, problem in (
            ("invalid_hints", arrival.hint_problem),
            ("forged_readings", arrival.reading_problem),
            ("invalid_dedup_keys", arrival.dedup_problem),
        ):
            if problem is None:
                continue
            if not self._counters.total(counter, ()):
                self._logger.warning(
                    "Request %s: %s; served without it. Further ones are counted in "
                    "semsched:%s_total only.",
                    arrival.job.request_id,
                    problem,
                    counter,
                )
            self._counters.add(counter)
