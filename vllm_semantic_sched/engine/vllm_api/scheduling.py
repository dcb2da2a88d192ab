"""vLLM's scheduler: its private methods, its queues, limits and seats."""

import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakSet

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.engine.vllm_api import capabilities

_LOOKUP = 16  # steps for which an unanswered lookup counts as pending, see `awaits_lookup`


class HookedScheduler(Scheduler):
    """vLLM's scheduler with public hooks, which do nothing here; a subclass overrides them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector is not None:
            _watch_lookups(self, self.connector)

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
            """Called by vLLM at the start of schedule()."""
            self.before_step()

    else:

        def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
            """One step of vLLM's scheduler, after `before_step`."""
            self.before_step()
            return super().schedule(*args, **kwargs)

    if capabilities.HOOKS.on_preemption:

        def on_preemption(self, request: Request, reset: bool) -> None:
            """Called by vLLM before it frees a victim's blocks. `reset`: of the prefix cache."""
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


def _watch_lookups(scheduler: Scheduler, connector: Any) -> None:
    """Note on a request the step in which a KV connector could not say yet what it has for it."""

    def watched(request: Request, *args: Any, **kwargs: Any) -> Any:
        answer = type(connector).get_num_new_matched_tokens(connector, request, *args, **kwargs)
        tokens, _ = answer
        pending = tokens is None
        request.semsched_lookup = scheduler.current_step if pending else None  # type: ignore[attr-defined]
        return answer

    connector.get_num_new_matched_tokens = watched


def awaits_lookup(scheduler: Scheduler, request: Request) -> bool:
    """Whether a KV connector (LMCache) still looks for a waiting request's KV: vLLM skips it. vLLM
    asks again only where a seat is free, so after some steps without one it counts as found."""
    asked: int | None = getattr(request, "semsched_lookup", None)
    return asked is not None and scheduler.current_step < asked + _LOOKUP


def lacks_lookup(scheduler: Scheduler, request: Request) -> bool:
    """Whether a KV connector could not say in this step what it has for a request, so that vLLM
    skips it."""
    asked = getattr(request, "semsched_lookup", None)
    # vLLM ignores the answer for prompts with log-probabilities.
    return asked == scheduler.current_step and not request.skip_reading_prefix_cache


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


def running_prefills(scheduler: Scheduler) -> list[Request]:
    """Running requests whose prompt is not fully computed."""
    # vLLM's set also has requests whose KV is being loaded: they have blocks, but no seat.
    inflight = scheduler._inflight_prefills
    return [request for request in inflight if request.status is RequestStatus.RUNNING]


def drafting_slots(scheduler: Scheduler) -> int:
    """Tokens of `max_num_batched_tokens` that a request takes in a step beside those that are
    computed: draft models and parallel drafters compute more than the model."""
    speculative = scheduler.vllm_config.speculative_config
    return 0 if speculative is None else speculative.max_num_new_slots_for_drafting


def is_loading(request: Request) -> bool:
    """Whether a request waits for a load of its KV, beside steps."""
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS


def loading(scheduler: Scheduler) -> list[Request]:
    """Requests whose KV is being loaded beside steps."""
    done = scheduler.finished_recving_kv_req_ids
    inflight = scheduler._inflight_prefills
    return [
        request for request in inflight if is_loading(request) and request.request_id not in done
    ]


def loaded(scheduler: Scheduler) -> int:
    """Number of requests without a seat whose KV is on the device: vLLM seats them first."""
    holding = len(scheduler.kv_holding_waiting)
    if not holding:
        return 0
    # Sessions that wait for input are among them, and have their seats.
    return max(0, holding - scheduler.num_waiting_for_streaming_input - len(loading(scheduler)))


def free_seats(scheduler: Scheduler) -> int:
    """Seats that nobody has; sessions that wait for input keep theirs. May be negative."""
    taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    return scheduler.max_num_active_reqs - taken


def is_stale(scheduler: Scheduler, request: Request) -> bool:
    """Whether a preempted request waits for output that was in flight: vLLM skips it until then."""
    waits = request.status is RequestStatus.PREEMPTED and request.request_id in scheduler.requests
    return waits and request.num_stale_output_tokens > 0 and not request.drop_stale_output


def is_unannounced(scheduler: Scheduler, name: str) -> bool:
    """Whether a waiting request was preempted since the last step, which a KV connector other than
    ours does not know yet. vLLM itself never loads KV for such a request; OffloadingConnector dies
    of it."""
    connector = scheduler.connector
    if connector is None or name not in scheduler.reset_preempted_req_ids:
        return False
    if getattr(connector, "saves_before_loads", False):
        return False
    request = scheduler.requests.get(name)
    return request is not None and not is_stale(scheduler, request)


def seats(scheduler: Scheduler) -> int:
    """Most requests that vLLM lets run at once."""
    return min(scheduler.max_num_running_reqs, scheduler.max_num_active_reqs)


_without_kv: WeakSet[Request] = WeakSet()  # idle sessions that gave way


def idle_sessions(scheduler: Scheduler) -> list[Request]:
    """Sessions that hold KV and wait for input, with no output in flight."""
    if not scheduler.num_waiting_for_streaming_input:
        return []
    return [
        request
        for request in scheduler.kv_holding_waiting
        if request.status is RequestStatus.WAITING_FOR_STREAMING_REQ
        and request not in _without_kv
        and not request.num_in_flight_tokens
    ]


def release_idle(scheduler: Scheduler, session: Request) -> None:
    """Free the KV of an idle session: with its next input, its tokens are computed again."""
    _without_kv.add(session)
    scheduler._free_request_blocks(session)


def compute_again(scheduler: Scheduler, session: Request) -> None:
    """Let a session with new input compute all of its tokens if it gave way; no-op if not."""
    if session in _without_kv:
        # Not earlier: until its next input, vLLM tells by the computed tokens what it has said.
        session.num_computed_tokens = 0
        _without_kv.discard(session)
        scheduler.kv_holding_waiting.remove_request(session)
        scheduler.waiting.add_request(session)


class _Limits(NamedTuple):
    """vLLM's fields, as configured."""

    tokens: int  # max_num_scheduled_tokens
    prompt_tokens: int  # long_prefill_token_threshold
    adaptive: bool  # adaptive_long_prefill_threshold


class StepLimits:
    """Lowers vLLM's limits on the tokens of a step, for one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._saved: _Limits | None = None

    def lower(self, tokens: int | None, prompt_tokens: int | None) -> None:
        """At most `tokens` in the step, and of each request at most `prompt_tokens` of its prompt;
        None: as configured."""
        scheduler = self._scheduler
        config = scheduler.scheduler_config
        if self._saved is None:
            self._saved = _Limits(
                tokens=scheduler.max_num_scheduled_tokens,
                prompt_tokens=config.long_prefill_token_threshold,
                adaptive=scheduler.adaptive_long_prefill_threshold,
            )
        if tokens is not None:
            configured = scheduler.max_num_scheduled_tokens
            scheduler.max_num_scheduled_tokens = min(tokens, configured)
        if prompt_tokens is not None:
            # It counts for decodes with drafts, too, and the last tokens of a prompt go together.
            shortest = 1 + max(scheduler.num_spec_tokens, scheduler.num_prefill_lookahead)
            given = config.long_prefill_token_threshold
            cap = max(shortest, prompt_tokens)
            if given and not scheduler.adaptive_long_prefill_threshold:
                cap = min(cap, given)
            config.long_prefill_token_threshold = cap
            # Adaptive, it would be at least an even share of the step.
            scheduler.adaptive_long_prefill_threshold = False

    def restore(self) -> None:
        """Put the limits back that `lower` has changed."""
        if self._saved is not None:
            scheduler = self._scheduler
            scheduler.max_num_scheduled_tokens = self._saved.tokens
            scheduler.scheduler_config.long_prefill_token_threshold = self._saved.prompt_tokens
            scheduler.adaptive_long_prefill_threshold = self._saved.adaptive
            self._saved = None


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
    if not can_sit_out(config):
        return "LoRA, before vLLM 0.33"
    return None


def can_sit_out(config: VllmConfig) -> bool:
    """Whether a running request, in prefill or not, may sit out a step. Before 0.33 vLLM does not
    count the adapter of one that does, and dies of one adapter too many when it comes back."""
    return config.lora_config is None or capabilities.HELD_ADAPTERS_COUNT


def is_ready(scheduler: Scheduler, request: Request) -> bool:
    """Whether vLLM could admit a waiting request now if seat, blocks, adapter slot and room for its
    encoder outputs were free (`obstacles`)."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        structured = request.structured_output_request
        grammar = structured.grammar if structured is not None else None
        # What failed to compile ends without a seat.
        return grammar is not None and not isinstance(grammar, Exception)
    if is_loading(request):
        return request.request_id in scheduler.finished_recving_kv_req_ids
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def is_pending(scheduler: Scheduler, request: Request) -> bool:
    """Whether a waiting request has to wait for something outside the scheduler, a grammar or its
    KV, so that vLLM need not look at it. One whose grammar failed to compile waits for a free seat:
    vLLM looks for it only then, and ends it."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        structured = request.structured_output_request
        grammar = structured.grammar if structured is not None else None
        failed = isinstance(grammar, Exception)
        return grammar is None or (failed and free_seats(scheduler) <= 0)
    return is_loading(request) and request.request_id not in scheduler.finished_recving_kv_req_ids


def obstacles(scheduler: Scheduler, request: Request) -> Sequence[Collection[Request]]:
    """Groups of running requests, each of which holds all that a waiting one lacks besides a seat
    and blocks: the slot of an adapter, or room in the encoder cache. Empty: it lacks nothing."""
    return [*_adapter_holders(scheduler, request), *_encoder_holders(scheduler, request)]


def _adapter_holders(scheduler: Scheduler, request: Request) -> Sequence[Collection[Request]]:
    """The running requests of each adapter, if all slots are taken and none has the request's."""
    if not request.lora_request or not scheduler.lora_config:
        return ()
    users: dict[int, list[Request]] = {}
    for running in scheduler.running:
        if running.lora_request:
            users.setdefault(running.lora_request.lora_int_id, []).append(running)
    return list(users.values()) if lacks_adapter(scheduler, request, users.keys()) else ()


def adapter_of(request: Request) -> int | None:
    """The LoRA adapter of a request, if it has one."""
    return request.lora_request.lora_int_id if request.lora_request else None


def adapters_in_use(scheduler: Scheduler) -> set[int]:
    """The LoRA adapters of the running requests."""
    if not scheduler.lora_config:
        return set()
    return {
        request.lora_request.lora_int_id for request in scheduler.running if request.lora_request
    }


def lacks_adapter(scheduler: Scheduler, request: Request, in_use: Collection[int]) -> bool:
    """Whether a waiting request needs an adapter beside those in use, and there is no slot left."""
    config = scheduler.lora_config
    wanted = request.lora_request
    if not config or not wanted:
        return False
    return wanted.lora_int_id not in in_use and len(in_use) >= config.max_loras


def _encoder_holders(scheduler: Scheduler, request: Request) -> Sequence[Collection[Request]]:
    """The running requests with encoder outputs, last in the list first, that have to go before the
    outputs of a waiting request fit beside the rest."""
    manager = scheduler.encoder_cache_manager
    free = getattr(manager, "num_freeable_slots", None)
    if not request.has_encoder_inputs or request.num_computed_tokens or free is None:
        return ()
    first = request.mm_features[0]
    if first.mm_position.offset or first.identifier in manager.cached:
        return ()  # what is in front of it can be computed meanwhile
    missing = first.mm_position.get_num_embeds() - free
    holders: list[Request] = []
    for running in reversed(scheduler.running):
        if missing <= 0:
            break
        if running.has_encoder_inputs:
            inputs = manager.get_cached_input_ids(running)
            missing -= sum(map(running.get_num_encoder_embeds, inputs))
            if inputs:
                holders.append(running)
    return [holders] if holders and missing <= 0 else ()
