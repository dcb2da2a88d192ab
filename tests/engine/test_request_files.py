"""How many files of the package one text request runs through, under the default policy."""

import asyncio
import json
import re
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from executed_files import PACKAGE, ExecutedFiles
from vllm.sampling_params import SamplingParams

from vllm_semantic_sched.engine.http.middleware import Middleware
from vllm_semantic_sched.engine.http.preparation import PreviewRules
from vllm_semantic_sched.engine.http.request_context import ServerState
from vllm_semantic_sched.engine.requests import prediction
from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine
from vllm_semantic_sched.policy.config import load_policy
from vllm_semantic_sched.policy.facts.job import LevelSource

pytestmark = pytest.mark.engine

# What one text request runs in the engine's process. Each file is one more to read for whoever
# follows a request: a new one has to be needed by a request that uses no optional feature.
ENGINE = {
    "engine/apply.py",
    "engine/clock.py",
    "engine/guard.py",
    "engine/metrics/counters.py",
    "engine/metrics/gauges.py",
    "engine/requests/arrivals.py",
    "engine/requests/aside.py",
    "engine/requests/endings.py",
    "engine/requests/prediction.py",
    "engine/requests/queue.py",
    "engine/scheduler.py",
    "engine/snapshot.py",
    "engine/vllm_api/channels.py",
    "engine/vllm_api/kv_cache.py",
    "engine/vllm_api/scheduling.py",
    "engine/vllm_api/server.py",
    "policy/config/__init__.py",
    "policy/config/estimates.py",
    "policy/core.py",
    "policy/estimates/calibration.py",
    "policy/estimates/decision.py",
    "policy/estimates/estimator.py",
    "policy/estimates/length.py",
    "policy/facts/capacity.py",
    "policy/facts/heap.py",
    "policy/facts/job.py",
    "policy/facts/lately.py",
    "policy/facts/prediction.py",
    "policy/holds/budget.py",
    "policy/levels.py",
    "policy/order/queues.py",
    "policy/order/running.py",
    "policy/order/seating.py",
    "policy/order/waiting.py",
    "policy/overload/account.py",
    "policy/overload/control.py",
    "policy/overload/load.py",
    "policy/overload/slo.py",
    "policy/preemption.py",
    "policy/prefills.py",
    "policy/profile/correction.py",
    "policy/profile/filter.py",
    "policy/profile/formula.py",
    "policy/record/lifecycle.py",
    "policy/snapshot.py",
    "policy/step.py",
    "predict/instant.py",
    "predict/process.py",
    "predict/service.py",
    "predict/window.py",
}
# In the predictor's process.
WORKER = {
    "predict/instant.py",
    "predict/model.py",
    "predict/network.py",
    "predict/window.py",
    "predict/worker.py",
}
# In the HTTP server's process, before and after the application.
HTTP_SERVER = {
    "engine/guard.py",
    "engine/http/admin.py",
    "engine/http/dispatch.py",
    "engine/http/middleware.py",
    "engine/http/preparation.py",
    "engine/http/preparation_queue.py",
    "engine/http/request_context.py",
    "engine/http/stated_times.py",
    "engine/metrics/stat_logger.py",
    "engine/requests/arrivals.py",
    "engine/vllm_api/server.py",
    "policy/config/estimates.py",
    "policy/estimates/decision.py",
    "policy/overload/refusal.py",
    "predict/instant.py",
    "predict/window.py",
}
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

ROOMS = ("policy", "engine", "predict")

PATIENCE = 300.0  # real seconds for the predictor, which has the lowest priority
TRACED_WORKER = Path(__file__).with_name("traced_worker.py")


def text(name: str, first_token: int, level: int | None, answer: int) -> LoadRequest:
    return LoadRequest(name, 0.0, level, tuple(range(first_token, first_token + 40)), answer, {})


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> dict[str, set[str]]:
    """Files of a request from its arrival to its end, by process: `engine` and `worker`."""
    folder = tmp_path_factory.mktemp("request")
    worker_files = folder / "worker.json"
    service = partial(
        prediction.PredictionService,
        command=(sys.executable, str(TRACED_WORKER), str(worker_files)),
    )
    files = ExecutedFiles()
    config = EngineConfig(
        policy="ems",
        predictor=True,
        seats=8,
        blocks=2000,
        block_size=32,
        budget=512,
        max_model_len=512,
        model=folder / "model",
    )
    with (
        pytest.MonkeyPatch.context() as patches,
        files.watch_new_threads(),
    ):
        patches.setattr(prediction, "PredictionService", service)
        with VirtualEngine(config) as engine:
            scheduler = engine.scheduler
            service = scheduler.predictions.service
            wait_for(lambda: service.up)
            # One before it, so that nothing is done for the first time, and others beside it.
            engine.add(text("before", 10, None, 4))
            for number in range(4):
                engine.add(text(f"beside {number}", 100 + number, 4, 100))
            wait_for(lambda: len(service._done) == 5)
            while engine.records["before"].ended is None:
                engine.step()
            with files.recording():
                engine.add(text("request", 60, None, 12))
                engine.step()
                wait_for(lambda: service._done)
                job = scheduler.jobs["request"]
                while engine.records["request"].ended is None:
                    engine.step()
            assert job.level_source is LevelSource.PREDICTION
            assert scheduler.counters.total("policy_errors") == 0
    return {"engine": files.names, "worker": set(json.loads(worker_files.read_text()))}


def files_of_the_http_server() -> set[str]:
    """Files that run while a request for a chat passes the middleware, as the second of two."""
    rules = PreviewRules.of(load_policy("ems"))

    async def generate(prompt, sampling_params, request_id, **options):
        yield "output"

    async def application(scope, receive, send):
        await receive()
        async for _ in app.state.engine_client.generate("", SamplingParams(), "id"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    parallel = SimpleNamespace(
        data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False
    )
    app = SimpleNamespace(
        state=SimpleNamespace(
            semsched=ServerState(rules=rules, routes=True),
            engine_client=SimpleNamespace(generate=generate),
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )
    )
    stack = Middleware(application)
    messages = [{"role": "user", "content": "There is smoke in the stairwell."}]
    body = json.dumps({"messages": messages}).encode()
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    async def ask():
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "app": app}
        await stack({**scope, "headers": []}, receive, send)

    files = ExecutedFiles()
    asyncio.run(ask())
    with files.recording():
        asyncio.run(ask())
    assert [message.get("status") for message in sent] == [200, None] * 2
    return files.names


def serving(names: set[str]) -> set[str]:
    """Those in the packages that serve; the emulated device is not one."""
    return {name for name in names if name.split("/")[0] in ROOMS}


def check(executed: set[str], expected: set[str]) -> None:
    names = serving(executed)
    unexpected, unused = sorted(names - expected), sorted(expected - names)
    assert not unexpected, f"a text request now also runs {', '.join(unexpected)}"
    assert not unused, f"a text request no longer runs {', '.join(unused)}: take it off the list"


def test_engine_and_predictor_run_the_listed_files(executed) -> None:
    check(executed["engine"], ENGINE)
    check(executed["worker"], WORKER)


def test_http_server_runs_the_listed_files() -> None:
    check(files_of_the_http_server(), HTTP_SERVER)


def test_page_states_the_numbers() -> None:
    page = " ".join(ARCHITECTURE.read_text().split())
    sentence = (
        r"One text request runs (\d+) files .*? in the engine's process, "
        r"(\d+) in the predictor's .*? and (\d+) in the HTTP server's"
    )
    stated = re.search(sentence, page, re.IGNORECASE)
    assert stated is not None
    assert [int(number) for number in stated.groups()] == [
        len(ENGINE),
        len(WORKER),
        len(HTTP_SERVER),
    ]
