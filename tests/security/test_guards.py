"""An exception in this package costs one request its place, no server its life."""

import ast
import asyncio
import builtins
import inspect
import textwrap
from types import FunctionType, SimpleNamespace

import pytest
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.http import middleware, preparation
from vllm_semantic_sched.engine.http.preparation import PreviewRules
from vllm_semantic_sched.engine.http.request_context import ServerState
from vllm_semantic_sched.engine.kv.connector import SemanticSwapConnector
from vllm_semantic_sched.engine.metrics import stat_logger
from vllm_semantic_sched.engine.metrics.stat_logger import SemanticStatLogger
from vllm_semantic_sched.engine.requests.queue import SemanticRequestQueue
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.predict.instant import InstantReader

pytestmark = pytest.mark.engine


@pytest.fixture
def scheduler(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\npreemption: {enabled: false}\n")
    return build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)}, max_num_seqs=1)


def add(scheduler, name: str, urgency: int, **fields) -> None:
    scheduler.add_request(make_request(name, urgency=urgency, output_tokens=2, **fields))


def served(scheduler) -> list[str]:
    """Names in the order in which they got their seat."""
    order: list[str] = []
    for _ in range(200):
        if not scheduler.requests:
            return order
        run_step(scheduler)
        order += [one.request_id for one in scheduler.running if one.request_id not in order]
    raise AssertionError(scheduler.requests)


def fail(*args, **kwargs):
    raise RuntimeError("broken")


def test_request_that_cannot_be_read_runs_at_the_default_level(scheduler, monkeypatch) -> None:
    add(scheduler, "running", 0)
    run_step(scheduler)
    add(scheduler, "small talk", 4)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.arrivals, "_read", fail)
        add(scheduler, "unreadable", 0)
    add(scheduler, "urgent", 1)
    add(scheduler, "routine", 3)
    assert served(scheduler) == ["urgent", "unreadable", "routine", "small talk"]
    assert not scheduler.core.waiting and not scheduler.jobs


def test_order_by_urgency_returns_after_a_step(scheduler, monkeypatch) -> None:
    add(scheduler, "running", 0)
    run_step(scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.core, "enqueue", fail)
        patch.setattr(scheduler.core, "requeue", fail)
        add(scheduler, "first", 4)
        add(scheduler, "second", 0)
        assert [one.request_id for one in scheduler.waiting] == ["first", "second"]  # by arrival
        run_step(scheduler)
        assert [one.request_id for one in scheduler.waiting] == ["first", "second"]
    run_step(scheduler)
    for name, urgency in (("filler", 4), ("late", 4), ("early", 0)):
        add(scheduler, name, urgency)
    assert served(scheduler)[-3:] == ["early", "filler", "late"]
    assert not len(scheduler.core.waiting) and not len(scheduler.core.running)


# Inventory: what vLLM calls


def called_by_vllm(ours: type, base: type) -> list[str]:
    """Names of our methods that vLLM knows. What runs once, at the start, may end it."""
    own = [one for one in ours.__mro__ if one.__module__.startswith(PACKAGE)]
    kinds = FunctionType | property
    names = {name for one in own for name, value in vars(one).items() if isinstance(value, kinds)}
    return sorted(name for name in names - START if hasattr(base, name))


PACKAGE = "vllm_semantic_sched."
START = {"__init__", "__new__"}
CONNECTOR = called_by_vllm(SemanticSwapConnector, vllm_api.KVConnector.__mro__[1])
SCHEDULER = called_by_vllm(SemanticScheduler, vllm_api.Scheduler)
QUEUE = [*called_by_vllm(SemanticRequestQueue, vllm_api.RequestQueue), "__bool__"]
LOUD = {"self.preemptions.make_up_for_failures"}
"""If this fails, the output of the step may be wrong, and nobody must get it."""
SAFE = {"get", "pop", "items", "values", "move_to_end", "because", "debug"}
"""Methods of dictionaries; `because` sets an attribute."""


def tree_of(function) -> ast.FunctionDef:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree


def is_constant(function) -> bool:
    *_, last = tree_of(function).body
    return isinstance(last, ast.Pass) or (
        # The expression is a docstring.
        isinstance(last, ast.Return | ast.Expr) and isinstance(last.value, ast.Constant)
    )


@pytest.mark.parametrize("name", CONNECTOR)
def test_each_method_of_the_connector_is_guarded(name) -> None:
    method = inspect.getattr_static(SemanticSwapConnector, name)
    method = getattr(method, "fget", method)
    if is_constant(inspect.unwrap(method)):
        return
    parameters = list(inspect.signature(method).parameters.values())
    given = {one.name: None for one in parameters if one.kind is not one.VAR_KEYWORD}
    of_default = inspect.signature(method.default)
    try:  # by position as well as by name
        of_default.bind(*given.values())
        of_default.bind(None, **{name: None for name in list(given)[1:]})
    except TypeError as error:
        raise AssertionError(f"{name}: {of_default} for {given}") from error


def test_connector_has_an_answer_for_each_method_that_vllm_calls() -> None:
    assert {"update_state_after_alloc", "build_connector_meta", "handle_preemptions"} < {*CONNECTOR}
    assert len(CONNECTOR) >= 18


def test_stat_logger_is_guarded() -> None:
    for name in called_by_vllm(SemanticStatLogger, vllm_api.StatLoggerBase):
        method = getattr(SemanticStatLogger, name)
        assert hasattr(method, "default") or is_constant(method), name


def unguarded_calls(ours: type, name: str) -> set[str]:
    """What a method calls outside `with self.guard(...)` and `try`, and what the methods of its own
    that it calls there call."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.With):
            contexts = [ast.unparse(item.context_expr) for item in node.items]
            if any(context.startswith(("self.guard(", "self._guard(")) for context in contexts):
                return
        if isinstance(node, ast.Try):
            caught = [ast.unparse(handler.type) for handler in node.handlers if handler.type]
            for part in (*([] if "Exception" in caught else node.body), *node.handlers):
                visit(part)
            for part in (*node.orelse, *node.finalbody):
                visit(part)
            return
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
        for child in ast.iter_child_nodes(node):
            visit(child)

    for statement in tree_of(inspect.getattr_static(ours, name)).body:
        visit(statement)
    calls: set[str] = set()
    for call in found:
        owner, _, method = call.rpartition(".")
        if owner == "self" and hasattr(ours, method):
            calls |= unguarded_calls(ours, method)
        elif not (
            call.startswith(("super()", "base.", "monotonic", "self.guard", "self._guard"))
            or hasattr(builtins, call)
            or (owner and method in SAFE)
        ):
            calls.add(call)
    return calls


@pytest.mark.parametrize("name", [*SCHEDULER, "preprocess_request"])
def test_scheduler_calls_nothing_of_ours_unguarded(name) -> None:
    assert unguarded_calls(SemanticScheduler, name) <= LOUD


@pytest.mark.parametrize("name", QUEUE)
def test_queue_calls_nothing_of_ours_unguarded(name) -> None:
    assert unguarded_calls(SemanticRequestQueue, name) == set()


def test_unguarded_calls_are_found() -> None:
    class Careless(SemanticScheduler):
        def add_request(self, request):
            self.core.arrive(request)
            super().add_request(request)

        def schedule(self):
            self.helper()
            with self.guard("guarded"):
                self.core.tick()
            try:
                self.core.tock()
            except Exception:
                self.guard.failed("tock")
            return super().schedule()

        def helper(self):
            self.clock.pause()

    globals()["Careless"] = Careless
    assert {"add_request", "schedule", "make_stats", "shutdown", "_free_request"} < {*SCHEDULER}
    assert unguarded_calls(Careless, "add_request") == {"self.core.arrive"}
    assert unguarded_calls(Careless, "schedule") == {"self.clock.pause"}


def test_statistics_that_cannot_be_published_end_nothing(monkeypatch) -> None:
    monkeypatch.setattr(stat_logger.vllm_api, "detach_message", fail)
    SemanticStatLogger(None).record(object())


# The HTTP server


class DoorServer:
    """The ASGI stack in front of an application that generates, without an engine."""

    def __init__(self) -> None:
        parallel = SimpleNamespace(
            data_parallel_size=2, data_parallel_size_local=2, local_engines_only=False
        )
        rules = PreviewRules(Policy(), InstantReader.load())
        self.state = SimpleNamespace(
            semsched=ServerState(rules=rules, routes=True),
            engine_client=self,
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )
        self.generated = 0
        self.stack = middleware.Middleware(self.app)

    async def generate(self, prompt, sampling_params, request_id, **options):
        self.generated += 1
        yield "output"

    async def app(self, scope, receive, send):
        await receive()
        async for _ in self.state.engine_client.generate("", SamplingParams(), "id"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


async def ask(server: DoorServer, body: bytes, path: str = "/v1/completions") -> int:
    """The status of the answer to a request."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "app": server}
    await server.stack(scope, receive, send)
    return sent[0]["status"]


AT_THE_DOOR = [
    (middleware, "add_routes"),
    (middleware, "watch"),
    (middleware.RequestContext, "of"),
    (middleware.Unauthorized, "__call__"),
    (middleware.Dispatch, "_place"),
    (preparation, "state_of"),
    (preparation, "asks_for_completion"),
    (preparation.PreviewRules, "preview"),
    (preparation.PreparationQueue, "enter"),
    (preparation.PreparationQueue, "leave"),
    (preparation.SemanticStatLogger, "in_api_server"),
]


@pytest.mark.parametrize(("owner", "name"), AT_THE_DOOR)
def test_requests_pass_whatever_fails_at_the_door(monkeypatch, owner, name) -> None:
    monkeypatch.setattr(owner, name, fail)
    server = DoorServer()
    body = b'{"prompt": "hello", "user": "a"}'

    async def at_once() -> list[int]:
        return await asyncio.gather(*(ask(server, body) for _ in range(10)))

    assert asyncio.run(asyncio.wait_for(at_once(), 120)) == [200] * 10
    assert server.generated == 10
