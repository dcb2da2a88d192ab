"""A KV connector that loads KV from elsewhere beside steps and sends KV away, as those of LMCache,
Offloading and NIXL do. What it loads takes time on the emulated device's copy queue."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched.lab.device.answers import mix
from vllm_semantic_sched.lab.device.sanitizer import NULL_BLOCK, Chain
from vllm_semantic_sched.policy.config.section import Section, parse_section

if TYPE_CHECKING:
    from vllm_semantic_sched.lab.device.runner import Runner

REMOTE_CONNECTOR: dict[str, Any] = {
    "kv_connector": "RemoteKV",
    "kv_connector_module_path": "vllm_semantic_sched.lab.device.remote",
    "kv_role": "kv_both",
}
"""For vLLM's `--kv-transfer-config`."""
_ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class RemoteSettings(Section):
    """`kv_connector_extra_config`. Shares are of requests, drawn by their prompts."""

    found: float = 0.5
    """Share for whose prompts there is KV elsewhere, of a drawn length."""
    whole: bool = False
    """Whether it loads the last token of a prompt too, which is computed again all the same."""
    lookups: int = 0
    """Most times that vLLM has to ask before it learns that."""
    failing: float = 0.0
    """Share whose first load fails, after its first half."""
    sent: float = 0.0
    """Share whose KV is sent away at their end."""
    seconds: float = 0.0
    """Further time of each load and of each sending."""


@dataclass(frozen=True)
class Order:
    """KV of tokens `start` to `end` of a request, in blocks of each group."""

    request: str
    tokens: list[int]
    adapter: int
    blocks: tuple[list[int], ...]
    start: int
    end: int
    fails: bool = False


@dataclass
class Orders(KVConnectorMetadata):
    """What the worker's side has to begin in a step."""

    loads: list[Order] = field(default_factory=list)
    sends: list[Order] = field(default_factory=list)


class RemoteKV(KVConnectorBase_V1, SupportsHMA):
    """Finds the KV of prompts elsewhere, each time that one is computed.

    Attributes:
        runner: the emulated device; on the worker's side.
    """

    runner: "Runner"

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        given = self._kv_transfer_config.kv_connector_extra_config
        self.settings = parse_section(RemoteSettings, given, "kv_connector_extra_config")
        groups = self._kv_cache_config.kv_cache_groups
        self._block_size = max(group.kv_cache_spec.block_size for group in groups)
        self._orders = Orders()
        self._asked: dict[str, int] = {}  # lookups, by request
        self._start: dict[str, int] = {}  # tokens that the engine has itself, by request
        self._failed: set[str] = set()  # requests; each fails once
        self._loading: dict[str, float] = {}  # end of the copy, by request
        self._sending: dict[str, float] = {}
        self._failing: dict[str, set[int]] = {}  # blocks, by request that loads
        self._invalid: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        return self.settings.sent > 0

    # Scheduler's side

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        settings = self.settings
        name = request.request_id
        asked = self._asked.get(name, 0)
        if asked < int(_draw(request, 1) * (settings.lookups + 1)):
            self._asked[name] = asked + 1
            return None, False
        if request.mm_features or _draw(request, 2) >= settings.found:
            return 0, False
        tokens = int(_draw(request, 3) * 1.3 * request.num_prompt_tokens)
        # All of a prompt, or whole blocks of it.
        tokens -= tokens % self._block_size
        tokens = min(tokens, request.num_prompt_tokens - (not settings.whole))
        self._start[name] = num_computed_tokens
        more = max(0, tokens - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        start = self._start.pop(request.request_id, 0)
        if num_external_tokens:
            order = _order(request, blocks.get_block_ids(), start, start + num_external_tokens)
            if _draw(request, 4) < self.settings.failing and order.request not in self._failed:
                self._failed.add(order.request)
                order = replace(order, fails=True)
            self._orders.loads.append(order)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = self._orders
        self._orders = Orders()
        return orders

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._failed.discard(request.request_id)
        self._asked.pop(request.request_id, None)
        self._start.pop(request.request_id, None)
        if request.status not in _ENDED or _draw(request, 5) >= self.settings.sent:
            return False, None
        self._orders.sends.append(_order(request, block_ids, 0, request.num_prompt_tokens))
        return True, None

    # Worker's side

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None:
        orders = self._connector_metadata
        assert isinstance(orders, Orders)
        for order in orders.loads:
            self._loading[order.request] = self._load(order)
        for order in orders.sends:
            self._sending[order.request] = self._send(order)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        failing = dict(self._failing)
        results = super().get_transfer_results(finished_req_ids)
        if len(self._kv_cache_config.kv_cache_groups) > 1:  # blocks would not say of which group
            results.failed_recving.update(failing.keys() & results.finished_recving)
            self._invalid.clear()
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        now = self.runner.clock.now()
        sent = _take_ended(self._sending, now)
        loaded = _take_ended(self._loading, now)
        for name in loaded:
            self._invalid |= self._failing.pop(name, set())
        return sent, loaded

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid = self._invalid
        self._invalid = set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...

    def _load(self, order: Order) -> float:
        """Queue a load; when it ends."""
        begin, end = self._copy(self.runner.profile.load(order.end - order.start))
        what = f"a load for {order.request}"
        blocks = list(self._contents(order))
        if order.fails:
            middle = len(blocks) // 2
            self._failing[order.request] = {block for block, _, _ in blocks[middle:]}
            blocks = blocks[:middle]
        for block, group, content in blocks:
            self.runner.sanitizer.fill(block, (group, content), begin, end, what, True)
        return end

    def _send(self, order: Order) -> float:
        begin, end = self._copy(self.runner.profile.save(order.end - order.start))
        what = f"a sending of {order.request}"
        for block, group, content in self._contents(order):
            self.runner.sanitizer.send(block, (group, content), begin, end, what)
        return end

    def _copy(self, seconds: float) -> tuple[float, float]:
        runner = self.runner
        return runner.timeline.copy(runner.clock.now(), seconds + self.settings.seconds, True)

    def _contents(self, order: Order) -> Iterator[tuple[int, int, list[int | None]]]:
        """Each block of an order, its group, and what its tokens stand for."""
        hashes = Chain(order.tokens, order.adapter).upto(order.end)
        for number, group in enumerate(self.runner.sanitizer.groups):
            size = group.block_size
            for place in range(order.start // size, -(-order.end // size)):
                block = order.blocks[number][place]
                if block != NULL_BLOCK:  # not one before a sliding window
                    content: list[int | None] = [*hashes[place * size : order.end][:size]]
                    yield block, number, content + [None] * (size - len(content))


def _order(request: Request, blocks: tuple[list[int], ...], start: int, end: int) -> Order:
    return Order(
        request=request.request_id,
        tokens=list(request.all_token_ids[:end]),
        adapter=request.lora_request.lora_int_id if request.lora_request else 0,
        blocks=blocks,
        start=start,
        end=end,
    )


def _draw(request: Request, what: int) -> float:
    """A number from 0 to 1, by the request's prompt."""
    prompt = request.prompt_token_ids or []
    return mix(hash((*prompt[-8:], len(prompt), what)) & (1 << 64) - 1) / 2**64


def _take_ended(copies: dict[str, float], now: float) -> set[str]:
    ended = {name for name, end in copies.items() if end <= now}
    for name in ended:
        del copies[name]
    return ended
