"""Gives the order of requests back to vLLM (policy key `observe`), and takes it over again.

While the scheduler observes, vLLM's own queues, victims and limits are in use; requests are read,
logged and counted. Both changes happen between two steps, O(n log n) in the requests.
"""

from __future__ import annotations

from typing import Any

from vllm_semantic_sched.engine.requests.queue import SemanticRequestQueue
from vllm_semantic_sched.engine.vllm_api import (
    Request,
    SchedulerOutput,
    replace_queues,
    restore_queues,
)
from vllm_semantic_sched.policy.facts.waits import Cause


def take_over(scheduler: Any) -> None:
    """Order waiting and running requests by the policy."""
    core = scheduler.core
    waiting, holding = list(scheduler.waiting), list(scheduler.kv_holding_waiting)
    queues = [
        SemanticRequestQueue(core, scheduler.jobs, queue, scheduler.guard)
        for queue in (core.waiting, core.new_queue())
    ]
    # self.running is kept sorted, so the tail, where vLLM takes its victims, is the least urgent
    # request.
    replace_queues(scheduler, *queues)
    for queue, requests in zip(queues, (waiting, holding), strict=True):
        for request in requests:
            queue.add_request(request)
    scheduler.view.reposition(core.rank_running(scheduler.view.observe))


def hand_back(scheduler: Any) -> None:
    """Give vLLM its own queues again, with all requests in order of arrival."""
    core, jobs = scheduler.core, scheduler.jobs
    waiting, holding = list(scheduler.waiting), list(scheduler.kv_holding_waiting)
    core.hold((), scheduler.clock())
    for job in list(core.waiting):
        core.waiting.remove(job)

    def arrival(request: Request) -> int:
        job = jobs.get(request.request_id)
        return -1 if job is None else job.sequence

    restore_queues(scheduler)
    for request in sorted(waiting, key=arrival):
        scheduler.waiting.add_request(request)
    for request in sorted(holding, key=arrival):
        scheduler.kv_holding_waiting.add_request(request)
    scheduler.running.sort(key=arrival)


def why_waiting(scheduler: Any, output: SchedulerOutput) -> Cause:
    """What kept vLLM's waiting requests from starting in a step that it has scheduled."""
    if scheduler.view.is_paused():
        return Cause.PAUSED
    if scheduler.view.free_seats() <= 0:
        return Cause.SEAT
    if not scheduler.waiting:
        return Cause.STEP
    spent = output.total_num_scheduled_tokens >= scheduler.view.token_budget()
    return Cause.TOKENS if spent or output.preempted_req_ids else Cause.KV
