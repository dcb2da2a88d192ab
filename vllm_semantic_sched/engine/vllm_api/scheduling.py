"""vLLM's scheduler: its private methods, its queues, limits and seats."""

import time
from collections.abc import Set
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.engine.vllm_api import capabilities


class HookedScheduler(Scheduler):
    """vLLM's scheduler with public hooks, which do nothing here; a subclass overrides them."""

    def before_step(self) -> None:
        """Called at the start of schedule()."""

    def before_preemption(self, request: Request, keep_kv: bool) -> None:
        """Called while a running request still holds its blocks, before vLLM frees them. `keep_kv`:
        whether its KV may be used later; False when the prefix cache is reset."""

    def before_free(self, request: Request) -> None:
        """Called when a request has finished, before vLLM frees its resources."""

    def after_turn(self, request: Request) -> None:
        """Called when a session with streamed input has got its next input."""

    def preprocess_request(self, request: Request) -> None:
        """Called where vLLM has just built a request: in a server on the input thread, beside the
        model's steps. Must not raise."""

    if capabilities.HOOKS.preempt_for_waiting:

        def preempt_for_waiting(self) -> None:
            self.before_step()

    else:

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            self.before_step()
            return super().schedule(*args, **kwargs)

    if capabilities.HOOKS.on_preemption:

        def on_preemption(self, request: Request, reset: bool) -> None:
            self.before_preemption(request, keep_kv=not (reset or self.requires_kv_delivery))
            base: Any = super()
            base.on_preemption(request, reset)

    else:

        def _preempt_request(
            self, request: Request, timestamp: float, drop_stale_output: bool = False, **kwargs: Any
        ) -> None:
            # vLLM drops stale output when it resets the cache, and then no KV may be kept.
            self.before_preemption(request, keep_kv=not drop_stale_output)
            super()._preempt_request(request, timestamp, drop_stale_output, **kwargs)

    def _update_request_as_session(self, session: Request, *args: Any, **kwargs: Any) -> None:
        super()._update_request_as_session(session, *args, **kwargs)
        self.after_turn(session)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.before_free(request)
        return super()._free_request(request, *args, **kwargs)


def replace_queues(
    scheduler: Scheduler, waiting: RequestQueue, kv_holding_waiting: RequestQueue
) -> None:
    """Replace the waiting queues of a new scheduler (`kv_holding_waiting`: of requests that already
    hold blocks), and let vLLM take its victims from the tail of `scheduler.running`, as under its
    policy FCFS."""
    scheduler.policy = SchedulingPolicy.FCFS
    scheduler.waiting = waiting
    scheduler.kv_holding_waiting = kv_holding_waiting


def restore_queues(scheduler: Scheduler) -> None:
    """Give a scheduler empty waiting queues of its own again, and its own choice of victims."""
    scheduler.policy = SchedulingPolicy(scheduler.scheduler_config.policy)
    scheduler.waiting = create_request_queue(scheduler.policy)
    scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)


def preempt(scheduler: Scheduler, request: Request, drop_output: bool = False) -> None:
    """Preempt a running request between two calls of schedule(). `drop_output`: drop its KV and its
    output of steps in flight, as a reset of the cache does."""
    if capabilities.HOOKS.preempt_for_waiting and not drop_output:
        scheduler.preempt(request)  # type: ignore[attr-defined]
        return
    scheduler.running.remove(request)
    drop = drop_output or scheduler.requires_kv_delivery
    reset = {"reset": True} if drop_output and capabilities.HOOKS.on_preemption else {}
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=drop, **reset)
    # Else vLLM would take a resumption in the next step for a run that never stopped.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def inflight_prefills(scheduler: Scheduler) -> Set[Request]:
    """Running requests whose prompt is not fully computed."""
    return scheduler._inflight_prefills


def hold_for_one_step(scheduler: Scheduler, request: Request) -> None:
    """Give a running request no token in the coming step; it keeps its seat and its KV."""
    if capabilities.HOOKS.skip_next_step:
        scheduler.skip_next_step(request)  # type: ignore[attr-defined]
        return
    # schedule() increments the step before it compares. vLLM itself may hold it for longer.
    request.next_decode_eligible_step = max(
        request.next_decode_eligible_step, scheduler.current_step + 2
    )


def can_advance(scheduler: Scheduler, request: Request) -> bool:
    """Whether schedule() would give a running request a token in the coming step."""
    in_flight = request.num_output_placeholders
    computed = request.num_computed_tokens
    if in_flight and computed + 2 - in_flight >= request.num_prompt_tokens + request.max_tokens:
        return False  # its last token is in flight
    if scheduler.current_step + 1 < request.next_decode_eligible_step:
        return False
    return request.num_tokens_with_spec + in_flight > computed


def let_prefills_run(scheduler: Scheduler) -> None:
    """Compute prefills in the coming step in spite of `prefill_schedule_interval`."""
    # vLLM looks at it when it puts prefills off, and sets it anew in a step that does not.
    scheduler.prefill_capacity_bound = True


def why_no_holds(config: VllmConfig) -> str | None:
    """Why running requests cannot be held on this engine; None if they can."""
    # vLLM itself decides then in which steps a request decodes.
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    # The V1 model runner loses the draft tokens of a request that sits out a step.
    if config.speculative_config is not None and not config.use_v2_model_runner:
        return "speculative decoding on vLLM's V1 model runner"
    return None


def is_ready(scheduler: Scheduler, request: Request) -> bool:
    """Whether vLLM could admit a waiting request now if a seat and blocks were free."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        structured = request.structured_output_request
        return structured is not None and structured.grammar is not None
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        return False
    lora_config = scheduler.lora_config
    if not lora_config or not request.lora_request:
        return True
    active = {
        running.lora_request.lora_int_id for running in scheduler.running if running.lora_request
    }
    return request.lora_request.lora_int_id in active or len(active) < lora_config.max_loras
