"""Carries the decisions about overload (policy/overload/control.py) into the scheduler."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm_semantic_sched.engine.capacity import Capacity
from vllm_semantic_sched.engine.metrics.counters import Counters, Gauges
from vllm_semantic_sched.engine.vllm_api import PauseState, Request, kv_cache_usage
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.job import Job
from vllm_semantic_sched.policy.overload.control import Ending, OverloadControl
from vllm_semantic_sched.policy.overload.dedup import BadKey, read_key
from vllm_semantic_sched.policy.overload.refusal import Refusal

if TYPE_CHECKING:
    from vllm_semantic_sched.engine.scheduler import SemanticScheduler

# vLLM's ids of the parts of one client request: answer number, id, prompt number, random suffix.
_PART = re.compile(r"(?:\d+_)?(?P<origin>.*?)(?:-\d+)?(?:-[0-9a-f]{8})?")

# One of several answers to a prompt.
_ANSWER = re.compile(r"\d+_(?P<parent>.*)")
_MOST_ANSWERS = 128
_REMEMBERED = 256


class Overload:
    """Tells the policy what arrives and how the engine is, and ends the requests that it names.

    Attributes:
        control: the policy's side; listens to the lifecycle.
    """

    def __init__(
        self,
        scheduler: SemanticScheduler,
        core: SchedulingCore,
        capacity: Capacity,
        counters: Counters,
        clock: Callable[[], float],
        logger: logging.Logger,
    ) -> None:
        self._scheduler = scheduler
        self._core = core
        self._capacity = capacity
        self._counters = counters
        self._clock = clock
        self._logger = logger
        self._refused_parents: OrderedDict[str, Refusal] = OrderedDict()
        total = capacity.total()
        self.control = OverloadControl(
            core,
            seats=total.seats,
            kv_tokens=(total.blocks or 0) * total.block_size,
        )

    def arrived(self, request: Request, job: Job) -> None:
        """A request is in the queue; it, or others because of it, may end."""
        if not self._scheduler.can_refuse(request):
            return
        answer = _ANSWER.fullmatch(request.request_id)
        if answer and (refusal := self._refused_parents.get(answer["parent"])) is not None:
            self._end([(job, refusal)])
            return
        key = self._dedup_key(request)
        origin = _PART.fullmatch(request.request_id)
        self._end(
            self.control.arrive(
                job,
                self._clock(),
                self._free_seats(),
                key,
                origin["origin"] if origin else request.request_id,
            )
        )

    def revised(self, jobs: Iterable[Job]) -> None:
        """Levels or expected lengths of jobs have changed."""
        for job in jobs:
            if not job.state.is_end:
                self._end(self.control.revised(job, self._clock(), self._free_seats()))

    def step(self) -> None:
        """A step is about to be arranged."""
        self._end(self.control.step(self._clock(), kv_cache_usage(self._scheduler)))

    def gauges(self) -> Gauges:
        """Pressure, shedding and promises."""
        load, names = self.control.load, self._core.policy.tier_names
        use = load.use()
        levels = range(len(names))
        # Where nothing was measured of late, nothing was broken.
        promised = [level for level in levels if load.slo.promises(level)]
        compliance = {level: load.slo.compliance(level) for level in promised}
        headroom = {level: load.slo.headroom(level) for level in promised}
        return {
            "pressure": float(load.pressure.level),
            "resource_use": {
                name: round(getattr(use, name), 4) for name in ("kv", "seats", "queue", "step")
            },
            "shed_tiers": float(sum(map(load.is_shed, levels))),
            "queued_tokens": {
                name: round(self.control.account.level(level).tokens)
                for level, name in enumerate(names)
            },
            "slo_compliance": {
                names[level]: 1.0 if share is None else round(share, 4)
                for level, share in compliance.items()
            },
            "slo_headroom": {
                names[level]: 1.0 if room is None else round(room, 4)
                for level, room in headroom.items()
            },
        }

    def _end(self, endings: Iterable[Ending]) -> None:
        for job, refusal in endings:
            self._scheduler.refuse(job.request_id, refusal)
            if answer := _ANSWER.fullmatch(job.request_id):
                self._end_other_answers(answer["parent"], refusal)

    def _end_other_answers(self, parent: str, refusal: Refusal) -> None:
        """vLLM tells the client of the refusal when all answers have ended: end the others too,
        and those that are still on their way here."""
        self._refused_parents[parent] = refusal
        if len(self._refused_parents) > _REMEMBERED:
            self._refused_parents.popitem(last=False)
        for number in range(_MOST_ANSWERS):
            self._scheduler.refuse(f"{number}_{parent}", refusal)

    def _free_seats(self) -> int:
        if self._scheduler.pause_state is not PauseState.UNPAUSED:
            return 0
        return max(0, self._capacity.free_seats())

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
