"""The parts of Ray 2.60 that `vllm_semantic_sched.fleet.ray` builds on, for tests without Ray.

The router tests run on Ray's own class where Ray is installed.
"""

import asyncio
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

HAS_RAY = find_spec("ray") is not None
LARGE = 1000


# ray.serve.request_router


@dataclass
class PendingRequest:
    args: list[Any]
    metadata: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    future: asyncio.Future | None = None
    routing_context: Any = field(default_factory=lambda: SimpleNamespace(should_backoff=False))


class RequestRouter:
    def __init__(self, **options: Any) -> None:
        self._replicas: dict[str, Any] = {}
        self.blocked: asyncio.Event | None = None  # holds requests back after the choice

    def update_replicas(self, replicas: list[Any]) -> None:
        self._replicas = {one.replica_id: one for one in replicas}

    def on_replica_actor_died(self, replica_id: str) -> None:
        self._replicas.pop(replica_id, None)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> Any:
        ranks = await self.choose_replicas(list(self._replicas.values()), pending_request)
        if self.blocked is not None:
            await self.blocked.wait()
        for rank in ranks:
            free = [one for one in rank if one.queue < one.max_ongoing_requests]
            if free:
                return min(free, key=lambda one: one.queue)
        await asyncio.Event().wait()


class Replica:
    """A running replica with a queue of its own."""

    def __init__(self, name: str, queue: int = 0, load: dict[str, Any] | None = None) -> None:
        self.replica_id = name
        self.queue = queue
        self.max_ongoing_requests = LARGE
        self.routing_stats = {} if load is None else {"semsched": load}

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue


def in_flight(choice: Any, replica: str) -> int:
    """Requests that a `ReplicaChoice` counts at a replica."""
    entries = [entry for entries in choice._requests.values() for entry in entries]
    return sum(entry.replica == replica for entry in entries)


def pending(name: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    """A request on its way to a replica."""
    metadata = SimpleNamespace(internal_request_id=name, multiplexed_model_id="")
    args = [body] if headers is None else [body, SimpleNamespace(headers=headers)]
    if not HAS_RAY:
        return PendingRequest(args, metadata)
    from ray.serve.request_router import PendingRequest as RayPendingRequest

    return RayPendingRequest(args=args, kwargs={}, metadata=metadata)


def make_router(router_class: Any, **kwargs: Any) -> Any:
    """A router as Ray makes it; call it in an event loop."""
    if HAS_RAY:
        from ray.serve._private.common import DeploymentHandleSource, DeploymentID

        source = DeploymentHandleSource.REPLICA
        router = router_class(
            deployment_id=DeploymentID("server"),
            handle_source=source,
            use_replica_queue_len_cache=False,
        )
    else:
        router = router_class(self_node_id="node")
    router.initialize_state(**kwargs)
    return router


# ray.serve.llm


class LLMServer:
    def __init__(self, state: Any, parts: list[Any] | None = None) -> None:
        self._state, self.parts = state, parts or []

    async def start(self) -> None:
        self.engine = SimpleNamespace(_app_state=self._state)

    async def record_routing_stats(self) -> dict[str, Any]:
        return {"rays": "own"}

    async def chat(self, request: Any, raw_request_info: Any = None) -> Any:
        return self._run(request)

    async def completions(self, request: Any, raw_request_info: Any = None) -> Any:
        return self._run(request)

    async def _run(self, request: Any) -> Any:
        async for output in self._state.engine_client.generate(request):
            yield output


@dataclass
class ErrorInfo:
    message: str
    type: str
    code: int


@dataclass
class ErrorResponse:
    error: ErrorInfo


class OpenAIHTTPException(Exception):
    def __init__(self, status_code: int, message: str, type: str = "Unknown") -> None:
        self.status_code, self.message, self.type = status_code, message, type


class OpenAiIngress:
    error: ErrorInfo | None = None

    async def chat(self, body: Any, request: Any) -> Any:
        if self.error is not None:
            raise OpenAIHTTPException(self.error.code, self.error.message, self.error.type)
        return "answer"

    completions = chat


_MODELS = "ray.llm._internal.serve.core.configs.openai_api_models"
_CONTENTS: dict[str, dict[str, Any]] = {
    "ray.serve": {"get_replica_context": None},
    "ray.serve.request_router": {
        "PendingRequest": PendingRequest,
        "ReplicaID": str,
        "RequestRouter": RequestRouter,
        "RunningReplica": Replica,
    },
    "ray.serve.llm": {"LLMServer": LLMServer},
    _MODELS: {
        "ChatCompletionRequest": dict,
        "CompletionRequest": dict,
        "ErrorInfo": ErrorInfo,
        "ErrorResponse": ErrorResponse,
        "OpenAIHTTPException": OpenAIHTTPException,
    },
    "ray.llm._internal.serve.core.ingress.ingress": {"OpenAiIngress": OpenAiIngress},
}


def load(module: str, real: bool = False) -> ModuleType:
    """Import a module of `vllm_semantic_sched.fleet.ray` on the stand-ins.

    Args:
        real: on Ray itself, if it is installed.
    """
    name = f"vllm_semantic_sched.fleet.ray.{module}"
    if real and HAS_RAY:
        return importlib.import_module(name)
    if module in ("answers", "server"):
        # Imports vLLM, which looks for Ray then.
        importlib.import_module("vllm_semantic_sched.engine.http.middleware")
    with _stand_ins():
        loaded = importlib.import_module(name)
    del sys.modules[name]
    return loaded


@contextmanager
def _stand_ins() -> Iterator[None]:
    before = {name: one for name, one in sys.modules.items() if name.split(".")[0] == "ray"}
    for name in before:
        del sys.modules[name]
    for path, content in _CONTENTS.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                if end > 1:
                    setattr(
                        sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[name]
                    )
        vars(sys.modules[path]).update(content)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "ray"]:
            del sys.modules[name]
        sys.modules.update(before)
