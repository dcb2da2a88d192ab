"""Two servers of one group of engines that share experts, behind a load balancer of the operator's:
one with a single engine (external), one that chooses among two (hybrid). The device is emulated."""

import http.client
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import patch

import pytest
from metrics_page import UNENDING, page_value, wait_until

from vllm_semantic_sched.lab.bench import server as server_module
from vllm_semantic_sched.lab.bench.server import ServerConfig, VllmServer, free_port
from vllm_semantic_sched.operate.client import AdminClient

pytestmark = pytest.mark.engine

EXTERNAL, HYBRID = 0, 1  # servers
ENGINES = {EXTERNAL: [0], HYBRID: [1, 2]}
WHOSE = {
    EXTERNAL: ("--data-parallel-rank", "0"),
    HYBRID: (
        *("--data-parallel-hybrid-lb", "--data-parallel-start-rank", "1"),
        *("--data-parallel-size-local", "2", "--api-server-count", "1"),
    ),
}


@pytest.fixture(scope="module")
def servers(models, tmp_path_factory, nursery) -> Iterator[list[VllmServer]]:
    """One seat on each engine."""
    folder = tmp_path_factory.mktemp("servers")
    policy = folder / "policy.yaml"
    policy.write_text("predictor: {enabled: false}\n")
    additional = {
        "semantic_sched": {"policy": str(policy)},
        "emulated_device": {"profile": "h100-8b", "kv_gib": 16},
    }
    given = ("--scheduler-cls", "vllm_semantic_sched.SemanticScheduler")
    given += ("--middleware", "vllm_semantic_sched.Middleware")
    given += ("--additional-config", json.dumps(additional))
    given += ("--max-model-len", str(2 * UNENDING), "--enable-expert-parallel")
    given += ("--data-parallel-size", "3", "--data-parallel-address", "127.0.0.1")
    given += ("--data-parallel-rpc-port", str(free_port()))
    with ExitStack() as stack, patch.object(server_module, "subprocess", nursery):
        servers = [
            VllmServer(
                ServerConfig(
                    model=models("qwen3-30b-a3b"),
                    log=folder / f"{number}.log",
                    seats=1,
                    scheduler_args=given + whose,
                    device=additional["emulated_device"],
                    environment={"VLLM_WORKER_MULTIPROC_METHOD": "fork"},
                )
            )
            for number, whose in WHOSE.items()
        ]
        for server in servers:  # none is ready before the others have started
            server.launch()
        for server in servers:
            stack.enter_context(server)
        yield servers


def body(level: int, tokens: int, **more: Any) -> bytes:
    fields = {"model": "bench", "prompt": "hello", "max_tokens": tokens, "ignore_eos": True}
    return json.dumps(fields | {"vllm_xargs": {"urgency": level}} | more).encode()


def ask(server: VllmServer, level: int) -> int:
    """Tokens of the answer."""
    request = urllib.request.Request(
        server.url + "/v1/completions", body(level, 4), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        tokens: int = json.load(reply)["usage"]["completion_tokens"]
        return tokens


def unending(server: VllmServer, level: int, engine: int) -> http.client.HTTPConnection:
    """A request that runs on an engine, the server's first being 0, until it is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(engine)}
    content = body(level, UNENDING, stream=True)
    connection.request("POST", "/v1/completions", content, headers)
    assert connection.getresponse().fp.readline()
    return connection


def answered(server: VllmServer) -> list[float]:
    """By engine."""
    name = "vllm:request_success_total"
    engines = ENGINES[EXTERNAL if server.config.log.stem == "0" else HYBRID]
    return [
        page_value(server, name, finished_reason="length", engine=str(engine)) for engine in engines
    ]


@pytest.mark.parametrize("number", [EXTERNAL, HYBRID], ids=["external", "hybrid"])
def test_urgent_request_takes_the_seat_of_another(servers, number) -> None:
    """It would wait for the end of the others. The engines of the other server have no requests,
    and take part in each step."""
    server = servers[number]
    with ExitStack() as others:
        for engine in range(len(ENGINES[number])):
            others.enter_context(closing(unending(server, 4, engine)))
        for _ in range(3):
            assert ask(server, 0) == 4
    wait_until(lambda: not page_value(server, "vllm:num_requests_running"))
    assert page_value(server, "semsched:policy_errors_total") == 0


@pytest.mark.parametrize("engine", [0, 1])
def test_hybrid_server_chooses_among_its_engines_by_urgency(servers, engine) -> None:
    server = servers[HYBRID]
    before = answered(server)
    with closing(unending(server, 0, engine)):
        for _ in range(3):
            assert ask(server, 0) == 4
    wait_until(lambda: answered(server)[1 - engine] == before[1 - engine] + 3)
    assert answered(server)[engine] == before[engine]


def test_pause_waits_for_all_servers_and_keeps_requests(servers) -> None:
    first, second = (AdminClient(server.url) for server in servers)
    with ThreadPoolExecutor() as pool:
        pauses = [pool.submit(first.post, "/pause")]
        assert ask(servers[HYBRID], 2) == 4  # the others go on until they are paused
        assert not pauses[0].done()
        pauses.append(pool.submit(second.post, "/pause"))
        assert [pause.result() for pause in pauses] == [{"paused": True}] * 2
        answers = [pool.submit(ask, server, 2) for server in servers]
        wait_until(lambda: all(client.status()[0]["paused"] for client in (first, second)))
        wait_until(lambda: first.status()[0]["waiting"] == 1)
        resumptions = [pool.submit(client.post, "/resume") for client in (first, second)]
        assert [resumption.result() for resumption in resumptions] == [{"paused": False}] * 2
        assert [answer.result() for answer in answers] == [4, 4]
