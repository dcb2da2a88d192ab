"""What a stranger sends to a real server, with and without an API key."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from metrics_page import UNENDING, page_value, wait_until

from vllm_semantic_sched.policy.config.private_files import TOKEN_HEADER, admin_token

pytestmark = pytest.mark.engine

OURS = (
    *("--scheduler-cls", "vllm_semantic_sched.SemanticScheduler"),
    *("--middleware", "vllm_semantic_sched.Middleware"),
)
KEY = "secret"


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "folder" / "events.jsonl"


@pytest.fixture(scope="module")
def server(serve, log):
    """With an API key, one API server, tenants and an event log."""
    policy = log.parents[1] / "policy.yaml"
    policy.write_text(f"dedup: waiting\ntenants: {{fair: true}}\nevents: {{path: {log}}}\n")
    settings = json.dumps({"semantic_sched": {"policy": str(policy)}})
    arguments = (*OURS, "--additional-config", settings, "--api-key", KEY)
    return serve(*arguments, seats=2, longest=UNENDING)


def post(server, path="/v1/completions", body=None, key=KEY, timeout=120, **headers):
    """Status and text of an answer."""
    body = {"model": "bench", "prompt": "hello", "max_tokens": 4} if body is None else body
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(
        server.url + path, raw, {"Content-Type": "application/json"} | headers
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_large_body_without_a_key_is_refused_unread(server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(100 * 2**20))
    connection.putheader("Content-Type", "application/json")
    connection.endheaders(b"{")  # one byte of a hundred million: the answer does not wait for more
    assert connection.getresponse().status == 401
    connection.close()


@pytest.mark.parametrize(("key", "status"), [(None, 401), (KEY, 400)])
def test_brackets_are_a_bad_request(server, key, status) -> None:
    errors = page_value(server, "semsched:policy_errors_total")
    assert post(server, body=b'{"user": "a", "x": ' + b"[" * 20_000, key=key)[0] == status
    assert page_value(server, "semsched:policy_errors_total") == errors


def test_nested_messages_do_not_stop_the_server(server) -> None:
    nested = ["a"] * 55_000
    for _ in range(400):
        nested = [nested]
    body = {"model": "bench", "messages": nested, "max_tokens": 4}
    assert post(server, "/v1/chat/completions", body)[0] in (400, 422)
    assert post(server)[0] == 200


CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
BODIES = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/batch": CHAT | {"messages": [CHAT["messages"]] * 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": CHAT,
    "/invocations": CHAT,
}


@pytest.mark.parametrize("path", BODIES)
def test_gateway_names_the_tenant_on_every_route(server, log, path) -> None:
    """Of those in test_routes.py, all that need neither sound, labels nor an option."""
    body = {"model": "bench", "vllm_xargs": {"tenant": "hospital-a"}} | BODIES[path]
    status, text = post(server, path, body, X_Semsched_Tenant=f"mallory{path}")
    assert status == 200, text

    def logged() -> set[str]:
        return {json.loads(line).get("tenant", "") for line in log.read_text().splitlines()}

    wait_until(lambda: f"mallory{path}" in logged())
    assert "hospital-a" not in logged()


def test_long_id_is_refused_or_cut(server, log) -> None:
    body = {"model": "bench", "prompt": "hello", "max_tokens": 4, "request_id": "a" * 4_000_000}
    assert post(server, body=body)[0] in (400, 500)
    assert post(server, body=body | {"request_id": "b" * 400})[0] == 200
    wait_until(lambda: "bbbb" in log.read_text())
    assert max(map(len, log.read_text().splitlines())) < 1000


def test_event_log_is_nobody_elses_business(server, log) -> None:
    assert post(server)[0] == 200
    wait_until(log.exists)
    assert log.stat().st_mode & 0o777 == 0o600
    assert log.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "headers",
    [{}, {TOKEN_HEADER: "guessed"}, {"X-Forwarded-For": "10.0.0.7"}, {"Host": "evil.example"}],
)
def test_operator_endpoints_want_the_servers_own_token(server, headers) -> None:
    token = {TOKEN_HEADER: admin_token(server.port) or ""} if headers else {}
    status, _ = post(server, "/v1/semsched/pause", {}, **(token | headers))
    assert status == 403
    assert urllib.request.urlopen(server.url + "/semsched/ready").status == 200


def maintenance(server, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from vllm_semantic_sched.cli import main; main()"]
    options = ["maintenance", *words, "--server", server.url, "--api-key", KEY]
    return subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)


def ready(server) -> int:
    try:
        return int(urllib.request.urlopen(server.url + "/semsched/ready", timeout=120).status)
    except urllib.error.HTTPError as error:
        return error.code


def test_pause_shows_and_ends_by_itself(server) -> None:
    assert maintenance(server, "pause", "--lease", "600").wait(240) == 0
    assert ready(server) == 503
    assert page_value(server, "semsched:paused", engine="http") == 1
    assert maintenance(server, "pause", "--lease", "1").wait(240) == 0
    wait_until(lambda: ready(server) == 200)
    assert page_value(server, "semsched:paused", engine="http") == 0
    assert post(server)[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_maintenance_that_is_killed_resumes_the_server(server, number) -> None:
    body = {"model": "bench", "prompt": "hi", "max_tokens": UNENDING, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    # Requests that run keep the pause waiting.
    long = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=120) for _ in range(8)]
    for connection in long:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
    wait_until(lambda: page_value(server, "vllm:num_requests_running") > 0)
    command = maintenance(server, "reload-weights")
    wait_until(lambda: ready(server) == 503)
    assert command.poll() is None
    os.kill(command.pid, number)
    command.wait(240)
    wait_until(lambda: ready(server) == 200)
    for connection in long:
        connection.close()
    deadline = time.monotonic() + 120
    while post(server)[0] != 200:
        assert time.monotonic() < deadline
