"""The seam to vLLM: re-exports the classes that engine/ builds on, and wraps every private or
version-dependent name. A new vLLM release is supported by changing this package alone; differences
between releases are found by `capabilities`."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.exceptions import GenerationError
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    group_kernel_blocks,
    iter_layer_specs,
)
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.engine.vllm_api.capabilities import active_workarounds
from vllm_semantic_sched.engine.vllm_api.channels import (
    add_utility,
    attach_arrival,
    attach_message,
    attached_arrival,
    call_engines,
    detach_message,
    ray_metrics,
    refused_output,
    watch_new_requests,
)
from vllm_semantic_sched.engine.vllm_api.kv_cache import (
    KVConnector,
    all_kv_connectors,
    batched_block_copy,
    blocks_can_be_freed,
    blocks_freed_by,
    blocks_held,
    blocks_needed,
    free_blocks,
    free_blocks_at_once,
    free_kv_blocks,
    has_one_block_table,
    keep_blocks,
    kv_cache_groups,
    kv_cache_usage,
    most_blocks_of_a_step,
    pin_memory,
    prefix_cached_blocks,
    recompute_unloaded,
    tokens_with_kv,
    total_kv_blocks,
    watermark_blocks,
)
from vllm_semantic_sched.engine.vllm_api.machine import Hardware, describe_hardware, describe_model
from vllm_semantic_sched.engine.vllm_api.scheduling import (
    HookedScheduler,
    TokenLimits,
    can_advance,
    free_seats,
    hold_for_one_step,
    inflight_prefills,
    is_ready,
    let_prefills_run,
    preempt,
    replace_queues,
    restore_queues,
    set_token_limits,
    token_limits,
    total_seats,
    why_no_holds,
)
from vllm_semantic_sched.engine.vllm_api.server import (
    RANK,
    Unauthorized,
    api_server_count,
    api_server_rank,
    engine_count,
    shares_host,
)
