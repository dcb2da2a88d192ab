"""A device of plain lists behind the real swap connector: next tokens are a function of the KV that
a request's blocks hold, so wrong KV gives wrong answers."""

from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector
from vllm_semantic_sched.engine.vllm_api import all_kv_connectors
from vllm_semantic_sched.lab.bench.standalone import BLOCK_SIZE


def swap_config(role: str = "kv_producer", **extra) -> KVTransferConfig:
    """The swap connector; `extra`: its own configuration."""
    return KVTransferConfig(
        kv_connector="SemanticSwapConnector",
        kv_connector_module_path="vllm_semantic_sched.engine.kv_swap",
        kv_role=role,
        kv_connector_extra_config=extra,
    )


class FakeDevice:
    """Executes steps in order: each token's KV stands for all tokens up to it. Copies are ordered
    by the worker side of our connector, alone or in a MultiConnector, if the engine has it.
    `load_steps`: steps that a copy beside steps takes."""

    def __init__(
        self, scheduler: SemanticScheduler, window: int | None = None, load_steps: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.window = window
        self.load_steps = load_steps
        self.executed = 0  # steps
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        blocks = scheduler.kv_cache_config.num_blocks
        self.device: list[list] = [[None] * BLOCK_SIZE for _ in range(blocks)]
        self.host: dict[int, list] = {}
        self.queue: deque = deque()
        self.copying: list = []  # beside steps: key, copy, blocks, slots, step in which it ends
        self.saves = {"before": 0, "beside": 0}
        self.ended: set[str] = set()
        self.worker: KVConnectorBase_V1 | None = None
        if any(isinstance(one, SemanticSwapConnector) for one in all_kv_connectors(scheduler)):
            self.worker = type(scheduler.connector)(
                scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
            )
            for one in (self.worker, *getattr(self.worker, "sub_connectors", ())):
                one.backend = self

    def add(self, *requests: Request) -> None:
        """Hand requests to the scheduler."""
        for request in requests:
            self.requests[request.request_id] = request
            self.tokens[request.request_id] = list(request.prompt_token_ids)
            self.scheduler.add_request(request)

    def schedule(self) -> SchedulerOutput:
        """Schedule a step; it is executed later, with what is known now."""
        step = self.scheduler.schedule()
        tables = {
            name: self.scheduler.kv_cache_manager.get_block_ids(name)
            for name in step.num_scheduled_tokens
        }
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        # As vLLM sends them: output that was dropped is forgotten.
        resumed = {name: list(self.requests[name].all_token_ids) for name in cached.resumed_req_ids}
        self.queue.append((step, tables, starts, resumed))
        return step

    def execute(self) -> None:
        """Execute the oldest step and hand its output to the scheduler."""
        step, tables, starts, resumed = self.queue.popleft()
        self.executed += 1
        self.tokens |= resumed
        worker = self.worker
        began = len(self.copying)
        if worker is not None:
            worker.handle_preemptions(step.kv_connector_metadata)
            worker.bind_connector_metadata(step.kv_connector_metadata)
            worker.start_load_kv(None)
        self.end_copies(began)
        sampled = {}
        for name in step.num_scheduled_tokens:
            sampled[name] = self.compute(
                name, tables[name], starts[name], step.num_scheduled_tokens[name]
            )
        order = list(step.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={name: index for index, name in enumerate(order)},
            sampled_token_ids=[sampled[name] for name in order],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=worker
            and KVConnectorOutput(
                finished_recving=worker.get_finished(set())[1],
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            ),
        )
        self.scheduler.update_from_output(step, output)

    # The copy backend

    def copy_to_host(self, device, host) -> None:
        for block, slot in zip(device, chain(*host), strict=True):
            self.host[slot] = list(self.device[block])

    def copy_to_device(self, device, host) -> None:
        for block, slot in zip(device, chain(*host), strict=True):
            self.device[block] = list(self.host[slot])

    def save(self, device, host, number=None) -> None:
        self.saves["before" if number is None else "beside"] += 1
        self.copy(number, self.copy_to_host, device, host)

    def load(self, device, host, key=None) -> None:
        self.copy(key, self.copy_to_device, device, host)

    def copy(self, key, copy, device, host) -> None:
        """At once, or with a key while the next step runs."""
        if key is None:
            self.end_copies(len(self.copying), now=True)  # in the order of their orders
            copy(device, host)
        else:
            self.copying.append((key, copy, device, host, self.executed + self.load_steps))

    def finished(self) -> set[str]:
        return self.take_ended(str)

    def saved(self) -> set[int]:
        return self.take_ended(int)

    def take_ended(self, kind: type) -> set:
        ended = {key for key in self.ended if isinstance(key, kind)}
        self.ended -= ended
        return ended

    def drain(self) -> tuple[set[str], set[int]]:
        self.end_copies(len(self.copying), now=True)
        return self.finished(), self.saved()

    def end_copies(self, most: int, now: bool = False) -> None:
        """End those of the oldest copies that are due, or all of them `now`."""
        while self.copying[:most] and (now or self.executed >= self.copying[0][-1]):
            key, copy, device, host, _ = self.copying.pop(0)
            copy(device, host)
            self.ended.add(key)
            most -= 1

    def take_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0

    def compute(self, name: str, tables: list[list[int]], start: int, count: int) -> list[int]:
        """Write the KV of `count` tokens, and read what each group's layers look at."""
        tokens = self.tokens[name]
        seen = []
        for table, window in zip(tables, (None, self.window), strict=False):
            for position in range(start, start + count):
                block, place = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                if block:  # else it is behind the window already
                    self.device[block][place] = hash(tuple(tokens[: position + 1]))
            first = max(0, len(tokens) - window) if window else 0
            seen += [
                self.device[table[position // BLOCK_SIZE]][position % BLOCK_SIZE]
                for position in range(first, min(len(tokens), start + count))
            ]
        if start + count < len(tokens):
            return []
        tokens.append(hash(tuple(seen)) % 900 + 1)
        return [tokens[-1]]

    def answer(
        self,
        requests: list[Request],
        steps_ahead: int,
        before_step: Callable[[int], Any],
        late: int = 0,
    ) -> dict[str, list[int]]:
        """Serve the requests, the last `late` of which arrive in the fourth step."""
        self.requests, self.tokens = {}, {}
        first = len(requests) - late
        self.add(*requests[:first])
        for step in range(20_000):
            if step == 3:
                self.add(*requests[first:])
            if step > 3 and not self.scheduler.get_num_unfinished_requests():
                break
            before_step(step)
            self.schedule()
            if len(self.queue) > steps_ahead:
                self.execute()
        else:
            raise AssertionError("no progress")
        while self.queue or self.copying:
            if not self.queue:
                self.schedule()
            self.execute()
        return {name: list(r.output_token_ids) for name, r in self.requests.items()}


def expected(request: Request, window: int | None = None) -> list[int]:
    """The answer on a device that keeps all KV."""
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        seen = [hash(tuple(tokens[: position + 1])) for position in range(len(tokens))]
        seen += seen[max(0, len(tokens) - window) :] if window else []
        tokens.append(hash(tuple(seen)) % 900 + 1)
    return tokens[request.num_prompt_tokens :]
