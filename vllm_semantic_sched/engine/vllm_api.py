"""The seam to vLLM: the only module of the package that imports it.

It re-exports the classes that engine/ builds on, and wraps every private or version-dependent
name of vLLM in a function, a hook or a property. A new vLLM release is supported by changing
this module alone.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.exceptions import GenerationError
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    group_kernel_blocks,
    iter_layer_specs,
)
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

# Re-exported; what this module defines itself needs no entry.
__all__ = [
    "AsyncScheduler", "AttentionSpec", "EngineCoreEventType", "EngineCoreOutput",
    "EngineCoreOutputs", "GenerationError", "KVCacheBlocks", "KVCacheConfig", "KVCacheManager",
    "KVConnectorMetadata", "KVConnectorOutput", "KVConnectorRole", "KVConnectorWorkerMetadata",
    "PauseState", "Request", "RequestQueue", "RequestStatus", "Scheduler", "SchedulerOutput",
    "StatLoggerBase", "VllmConfig", "group_kernel_blocks", "iter_layer_specs",
]  # fmt: skip

logger = logging.getLogger("vllm.semantic_sched")

# Version

# vLLM calls the scheduler interface non-public and changes it between minor releases. Both ends
# of the range have passed scripts/conformance.sh.
SUPPORTED = SpecifierSet(">=0.32.0,<0.33")


class UnsupportedVersion(RuntimeError):
    """vLLM is outside the supported range."""


def check_vllm_version(version: str = vllm.__version__) -> None:
    """Refuse to start on a vLLM release whose scheduler this package was not tested with.

    Raises:
        UnsupportedVersion: names the installed version and the supported range.
    """
    try:
        # Local parts (0.32.0+cpu) and development builds count as their release.
        release = Version(Version(version).base_version)
    except InvalidVersion:
        release = None
    if release is None or release not in SUPPORTED:
        raise UnsupportedVersion(
            f"vllm-semantic-sched supports vLLM {SUPPORTED}, but vLLM {version} is installed. "
            "Install a supported release, or start without --scheduler-cls."
        )


# Scheduler


class HookedScheduler(Scheduler):
    """vLLM's scheduler with public hooks around its private methods. The hooks do nothing here;
    a subclass overrides them."""

    def before_preemption(self, request: Request, keep_kv: bool) -> Any:
        """Called while a running request still holds its blocks, before vLLM frees them.

        Args:
            keep_kv: whether its KV may be used later; False when the prefix cache is reset.

        Returns:
            A value for `after_preemption`.
        """

    def after_preemption(self, request: Request, value: Any) -> None:
        """Called when a preempted request is back in the waiting queue, with what
        `before_preemption` returned."""

    def before_free(self, request: Request) -> None:
        """Called when a request has finished, before vLLM frees its resources."""

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = False, **kwargs: Any
    ) -> None:
        # vLLM drops stale output when it resets the cache, and then no KV may be kept.
        value = self.before_preemption(request, keep_kv=not drop_stale_output)
        super()._preempt_request(request, timestamp, drop_stale_output, **kwargs)
        self.after_preemption(request, value)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self.before_free(request)
        return super()._free_request(request, *args, **kwargs)


def replace_queues(
    scheduler: Scheduler, waiting: RequestQueue, kv_holding_waiting: RequestQueue
) -> None:
    """Replace the waiting queues of a new scheduler, and make vLLM take its victims from the tail
    of `scheduler.running`, as it does under its policy FCFS.

    Args:
        kv_holding_waiting: queue of the waiting requests that already hold blocks.
    """
    scheduler.policy = SchedulingPolicy.FCFS
    scheduler.waiting = waiting
    scheduler.kv_holding_waiting = kv_holding_waiting


def preempt(scheduler: Scheduler, request: Request) -> None:
    """Preempt a running request between two calls of schedule()."""
    scheduler.running.remove(request)
    scheduler._preempt_request(
        request, time.monotonic(), drop_stale_output=scheduler.requires_kv_delivery
    )
    # Else vLLM would take a resumption in the next step for a run that never stopped.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def inflight_prefills(scheduler: Scheduler) -> Collection[Request]:
    """Running requests whose prompt is not fully computed."""
    prefills: set[Request] = scheduler._inflight_prefills
    return prefills


def hold_for_one_step(scheduler: Scheduler, request: Request) -> None:
    """Give a running request no token in the coming step; it keeps its seat and its KV."""
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
    tokens: int = request.num_tokens_with_spec
    return tokens + in_flight > computed


def why_no_holds(config: VllmConfig) -> str | None:
    """Why running requests cannot be held on this engine; None if they can.

    The V1 model runner loses the draft tokens of a request that sits out a step, and with pipeline
    parallelism vLLM itself decides in which steps a request decodes.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism"
    if config.speculative_config is not None and not config.use_v2_model_runner:
        return "speculative decoding on vLLM's V1 model runner"
    return None


# Model and device


class Hardware(NamedTuple):
    """The device of an engine.

    Attributes:
        kind: torch's device type: cpu, cuda.
        name: as the driver reports it.
        dtype: of weights and activations, as torch names it.
        memory: GB of one device.
        here: whether the calling process uses the device.
    """

    kind: str
    name: str
    dtype: str
    memory: float
    here: bool


def describe_hardware(config: VllmConfig) -> Hardware:
    """The device that an engine runs on."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    return Hardware(
        kind=kind,
        name="this processor" if kind == "cpu" else current_platform.get_device_name(),
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        memory=current_platform.get_device_total_memory() / 1e9,
        here=kind == "cpu" or (kind == "cuda" and torch.cuda.is_initialized()),
    )


def describe_model(config: VllmConfig) -> tuple[int, dict[str, Any]]:
    """The size of an engine's tensor-parallel group, and the arguments of
    `ModelShape.from_config`."""
    model = config.model_config
    facts = {
        "name": str(model.served_model_name or model.model),
        "config": model.hf_config.to_dict(),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": model.quantization,
    }
    return config.parallel_config.tensor_parallel_size, facts


# Limits of a step


class TokenLimits(NamedTuple):
    """Limits of one step. `step`: tokens of all requests; `prefill`: tokens of one prefill, 0 for
    no limit."""

    step: int
    prefill: int


def token_limits(scheduler: Scheduler) -> TokenLimits:
    """The limits that the next schedule() obeys."""
    return TokenLimits(
        scheduler.max_num_scheduled_tokens, scheduler.scheduler_config.long_prefill_token_threshold
    )


def set_token_limits(scheduler: Scheduler, limits: TokenLimits) -> None:
    """Change the limits for the next schedule() and all after it."""
    scheduler.max_num_scheduled_tokens = limits.step
    scheduler.scheduler_config.long_prefill_token_threshold = limits.prefill


# Seats


def total_seats(scheduler: Scheduler) -> int:
    """Requests that can run at the same time."""
    seats: int = scheduler.max_num_running_reqs
    return seats


def free_seats(scheduler: Scheduler) -> int:
    """Seats that waiting requests can take in the coming step; may be negative."""
    taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
    # vLLM seats waiting requests that hold blocks before all others.
    free: int = scheduler.max_num_active_reqs - taken - len(scheduler.kv_holding_waiting)
    return free


def is_ready(scheduler: Scheduler, request: Request) -> bool:
    """Whether vLLM could admit a waiting request now if a seat and blocks were free."""
    if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        structured = request.structured_output_request
        return structured is not None and structured.grammar is not None
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
        return False
    return _adapter_has_a_slot(scheduler, request)


def _adapter_has_a_slot(scheduler: Scheduler, request: Request) -> bool:
    lora_config = scheduler.lora_config
    if not lora_config or not request.lora_request:
        return True
    active = {
        running.lora_request.lora_int_id for running in scheduler.running if running.lora_request
    }
    return request.lora_request.lora_int_id in active or len(active) < lora_config.max_loras


# KV blocks


def kv_cache_groups(scheduler: Scheduler) -> int:
    """Groups of layers that have block tables of their own; at least 1."""
    return max(1, len(scheduler.kv_cache_config.kv_cache_groups))


def has_one_block_table(scheduler: Scheduler) -> bool:
    """Whether all layers share one block table and look at the whole context."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return len(groups) == 1 and isinstance(groups[0].kv_cache_spec, FullAttentionSpec)


def total_kv_blocks(scheduler: Scheduler) -> int:
    """Blocks that requests can hold: all but vLLM's null block."""
    blocks: int = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return blocks - 1


def free_kv_blocks(scheduler: Scheduler) -> int:
    """Blocks that no request holds; O(1)."""
    free: int = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return free


def watermark_blocks(scheduler: Scheduler) -> int:
    """Free blocks that vLLM keeps back when it admits a request."""
    blocks: int = scheduler.kv_cache_manager.watermark_blocks
    return blocks


def kv_cache_usage(scheduler: Scheduler) -> float:
    """Share of the blocks that requests hold, 0 to 1."""
    usage: float = scheduler.kv_cache_manager.usage
    return usage


def blocks_needed(scheduler: Scheduler, request: Request) -> int:
    """Blocks for all tokens that a waiting request has so far, less those in use that the prefix
    cache already holds for it."""
    manager = scheduler.kv_cache_manager
    tokens = min(request.num_tokens, scheduler.max_model_len)
    # A lookup is reported to subscribers of KV events; do without it then.
    if manager.enable_kv_cache_events:
        cached, hits = manager.empty_kv_cache_blocks, 0
    else:
        cached, hits, _ = manager.get_computed_blocks(request)
    needed: int = manager.coordinator.get_num_blocks_to_allocate(
        request_id=request.request_id,
        num_tokens=tokens,
        new_computed_blocks=cached.blocks,
        num_encoder_tokens=0,
        total_computed_tokens=hits,
        num_local_computed_tokens=hits,
        num_tokens_main_model=tokens,
        apply_admission_cap=True,
        prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
    )
    return needed


def blocks_held(scheduler: Scheduler, request: Request) -> int:
    """Blocks in a running request's block tables, shared ones included."""
    groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    return sum(not block.is_null for group in groups for block in group)


def blocks_freed_by(scheduler: Scheduler, request: Request) -> int:
    """Blocks that preempting a running request frees: those that it does not share."""
    groups = scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
    return sum(1 for group in groups for block in group if block.ref_cnt == 1 and not block.is_null)


def blocks_can_be_freed(scheduler: Scheduler, request: Request) -> bool:
    """Whether a preempted request's blocks are free at once; not while a step in flight may
    still write to them."""
    free: bool = scheduler._request_blocks_can_be_freed(request)
    return free


def free_blocks_at_once(scheduler: Scheduler) -> None:
    """Free blocks without waiting for steps in flight, although a KV connector is present."""
    scheduler.defer_block_free = False


def prefix_cached_blocks(scheduler: Scheduler, request: Request, first: int) -> tuple[int, int]:
    """How much of a running request the prefix cache can find again, counted in whole blocks from
    the start of the request's only block table.

    Args:
        first: look at so many blocks.

    Returns:
        Blocks in the prefix cache, and how many of these other requests hold as well.
    """
    manager = scheduler.kv_cache_manager
    if not manager.enable_caching:
        return 0, 0
    blocks = manager.get_blocks(request.request_id).blocks[0][:first]
    cached = list(itertools.takewhile(lambda block: block.block_hash is not None, blocks))
    shared = sum(1 for _ in itertools.takewhile(lambda block: block.ref_cnt > 1, cached))
    return len(cached), shared


def tokens_with_kv(request: Request) -> int:
    """Tokens whose KV is on the device. vLLM counts tokens in flight as computed, but their KV
    is not there yet."""
    return max(0, request.num_computed_tokens - request.num_in_flight_tokens)


# KV connectors and copies


class KVConnector(KVConnectorBase_V1, SupportsHMA):
    """Base of a KV connector, with public names for what vLLM's base keeps in private ones."""

    @property
    def extra_config(self) -> dict[str, Any]:
        """The `kv_connector_extra_config` of the command line."""
        config: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        return config

    @property
    def cache_config(self) -> KVCacheConfig:
        """The layout of the KV cache."""
        return self._kv_cache_config

    @property
    def cache_manager(self) -> KVCacheManager:
        """The scheduler's KV cache manager; only on the scheduler's side."""
        assert self._kv_cache_manager is not None
        return self._kv_cache_manager

    @property
    def step_metadata(self) -> KVConnectorMetadata:
        """What the scheduler's side sent for this step; only on a worker."""
        return self._get_connector_metadata()


def all_kv_connectors(scheduler: Scheduler) -> list[Any]:
    """The scheduler's KV connector and, if it combines several, its members."""
    connector = scheduler.connector
    if connector is None:
        return []
    return [connector, *getattr(connector, "sub_connectors", ())]


def batched_block_copy() -> Callable[..., Any]:
    """vLLM's `swap_blocks_batch(sources, targets, sizes)`: int64 tensors of addresses and bytes."""
    from vllm import _custom_ops  # needs the compiled extension of a GPU build

    copy: Callable[..., Any] = _custom_ops.swap_blocks_batch
    return copy


def pin_memory(tensor: Any) -> None:
    """Pin a host tensor in place. torch's own pinned allocations take up to twice the memory,
    because they are rounded up to powers of two."""
    from vllm.v1.simple_kv_offload.cuda_mem_ops import pin_tensor

    pin_tensor(tensor)


# Channels between the processes

# vLLM's SchedulerStats drops unknown fields on its way between the processes, but this one of
# its dictionaries keeps any string as a key.
_CARRIER = "num_kv_fetch_reqs_by_stage"
_MARK = "semsched:"


def attach_message(stats: Any, message: dict[str, Any]) -> None:
    """Let a SchedulerStats carry a message of plain values to the API server."""
    getattr(stats, _CARRIER)[_MARK + json.dumps(message)] = 0


def detach_message(stats: Any) -> dict[str, Any] | None:
    """Take the message off a SchedulerStats; None if there is none."""
    carrier = getattr(stats, _CARRIER, None) or {}
    text = next((key for key in carrier if key.startswith(_MARK)), None)
    if text is None:
        return None
    del carrier[text]
    message: dict[str, Any] = json.loads(text.removeprefix(_MARK))
    return message


_PREPROCESS = EngineCore.preprocess_add_request


def on_new_request(function: Callable[[Any, Request], None]) -> None:
    """Call a function for every new request of this engine process, where vLLM has just built it:
    in a server on the input thread, beside the model's steps.

    Args:
        function: gets the scheduler and the request. If it raises, vLLM goes on without it.
    """

    def preprocess(core: EngineCore, request: Any) -> Any:
        new = _PREPROCESS(core, request)
        try:
            function(core.scheduler, new[0])
        except Exception:
            logger.debug("Semantic scheduling could not read a request ahead.", exc_info=True)
        return new

    setattr(EngineCore, _PREPROCESS.__name__, preprocess)


def attach_arrival(request: Request, arrival: object) -> None:
    """Keep what was read of a new request on it; see `attached_arrival`."""
    request.semsched_arrival = arrival  # type: ignore[attr-defined]


def attached_arrival(request: Request) -> Any:
    """What `attach_arrival` has kept; None if nothing."""
    return getattr(request, "semsched_arrival", None)


def add_utility(name: str, function: Callable[[Any, Any], Any]) -> None:
    """Let API servers call a function in this engine process; see `call_engines`.

    vLLM looks a utility call up among the methods of EngineCore and runs it between two steps on
    the scheduling thread, whether the engine is busy, idle or paused.

    Args:
        function: gets the scheduler and the argument of the call; returns plain values or a
            future of them.
    """

    def call(core: EngineCore, argument: Any) -> Any:
        return function(core.scheduler, argument)

    setattr(EngineCore, name, call)


async def call_engines(engine_client: Any, name: str, argument: Any) -> Sequence[Any]:
    """Call a utility (`add_utility`) in every engine process; what each returned."""
    answers: Sequence[Any] = await engine_client.engine_core.call_utility_all_async(name, argument)
    return answers
