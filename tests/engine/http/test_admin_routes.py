"""Access to the operator's endpoints, without an engine."""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_semantic_sched.engine.http.admin import router
from vllm_semantic_sched.engine.http.commands import UTILITY

pytestmark = pytest.mark.engine


class Core:
    """Two engines."""

    def __init__(self, *reports) -> None:
        self.reports = reports
        self.calls: list[str] = []

    async def call_utility_all_async(self, utility, command):
        assert utility == UTILITY
        self.calls.append(command)
        if not self.reports:
            raise AttributeError("no such method")
        return list(self.reports)


def client(host="127.0.0.1", *reports) -> TestClient:
    app = FastAPI()
    app.include_router(router)
    app.state.engine_client = SimpleNamespace(engine_core=Core(*reports))
    return TestClient(app, client=(host, 50000))


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("127.0.0.1", {}, 200),
        ("127.8.8.8", {}, 200),
        ("::1", {}, 200),
        ("10.0.0.7", {}, 403),
        ("2001:db8::1", {}, 403),
        ("testclient", {}, 403),
        ("127.0.0.1", {"X-Forwarded-For": "10.0.0.7"}, 403),
        ("127.0.0.1", {"Forwarded": "for=10.0.0.7"}, 403),
        ("127.0.0.1", {"Origin": "http://evil.example"}, 403),
    ],
)
def test_only_local_requests_are_answered(host, headers, status) -> None:
    reply = client(host, {"running": 0}).get("/v1/semsched/status", headers=headers)
    assert reply.status_code == status


def test_reload_is_rejected_if_any_engine_rejects_it() -> None:
    fine = {"result": "adopted", "version": 2}
    refused = {"result": "refused", "reason": "levels: 5 -> 4 needs a restart", "version": 1}
    good = client("::1", fine, fine)
    assert good.post("/v1/semsched/policy/reload").json() == {"engines": [fine, fine]}
    assert good.app.state.engine_client.engine_core.calls == ["load_policy", "adopt_policy"]
    bad = client("::1", fine, refused).post("/v1/semsched/policy/reload")
    assert bad.status_code == 422 and "levels: 5 -> 4" in bad.text


def test_error_names_another_scheduler() -> None:
    reply = client().get("/v1/semsched/status")
    assert reply.status_code == 501 and "status" in reply.text
