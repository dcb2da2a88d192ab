"""A connector that loads KV from elsewhere beside steps, as LMCache, Offloading and NIXL do."""

from collections import Counter
from typing import Any

from engine_steps import SimulatedDevice
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus


def remote_config(
    found: dict[str, int], role: str = "kv_both", lookups: dict[str, int] | None = None
) -> KVTransferConfig:
    """By request id: `found`: tokens of a prompt whose KV is elsewhere; `lookups`: how often vLLM
    has to ask before it learns that."""
    return KVTransferConfig(
        kv_connector="RemoteKV",
        kv_connector_module_path="remote_kv",
        kv_role=role,
        kv_connector_extra_config={"found": found, "lookups": lookups or {}},
    )


class NoOrders(KVConnectorMetadata):
    """The scheduler's side asks for nothing: `RemoteDevice` knows by itself what is loaded."""


class RemoteKV(KVConnectorBase_V1, SupportsHMA):
    """Each request loads what was found for it, once, beside steps."""

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._found: dict[str, int] = dict(extra["found"])
        self.lookups: dict[str, int] = dict(extra["lookups"])

    def get_num_new_matched_tokens(
        self, request: Request, computed: int
    ) -> tuple[int | None, bool]:
        if self.lookups.get(request.request_id, 0) > 0:
            self.lookups[request.request_id] -= 1
            return None, False
        found = self._found.get(request.request_id, 0)
        return max(0, min(found, request.num_tokens - 1) - computed), bool(found)

    def update_state_after_alloc(self, request: Request, blocks: Any, tokens: int) -> None:
        if tokens:
            del self._found[request.request_id]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> NoOrders:
        return NoOrders()

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


class RemoteDevice(SimulatedDevice):
    """A device on which a load takes `load_steps`."""

    def __init__(self, scheduler: Scheduler, load_steps: int = 2) -> None:
        super().__init__(scheduler)
        self.load_steps = load_steps
        self._loading: Counter[str] = Counter()  # steps so far

    def execute(self) -> None:
        step, output = self._queue.popleft()
        ended = set()
        for request in self.scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                name = request.request_id
                self._loading[name] += 1
                if self._loading[name] == self.load_steps:
                    ended.add(name)
        output.kv_connector_output = KVConnectorOutput(finished_recving=ended or None)
        self.scheduler.update_from_output(step, output)
