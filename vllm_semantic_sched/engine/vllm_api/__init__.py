"""The seam to vLLM: re-exports the classes that engine/ builds on, and wraps every private or
version-dependent name. A new vLLM release is supported by changing this package alone; differences
between releases are found by `capabilities`."""

from vllm.config import SchedulerConfig, VllmConfig
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

from vllm_semantic_sched.engine.vllm_api.capabilities import OUTPUTS_CARRY_ERRORS
from vllm_semantic_sched.engine.vllm_api.channels import *
from vllm_semantic_sched.engine.vllm_api.kv_cache import *
from vllm_semantic_sched.engine.vllm_api.scheduling import *
from vllm_semantic_sched.engine.vllm_api.server import *
