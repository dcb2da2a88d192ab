"""Access to the operator's endpoints, without an engine."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from metrics_page import wait_until

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.engine.http import admin
from vllm_semantic_sched.engine.http.admin import probes, router
from vllm_semantic_sched.engine.http.commands import UTILITY
from vllm_semantic_sched.engine.http.request_context import state_of
from vllm_semantic_sched.engine.startup import settings as startup
from vllm_semantic_sched.engine.startup.settings import PolicyFile
from vllm_semantic_sched.policy.config.overload import Events
from vllm_semantic_sched.policy.config.private_files import TOKEN_HEADER, admin_token, own_folder

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("unhooked")]


class Core:
    """Two engines."""

    def __init__(self, *reports) -> None:
        self.reports = reports
        self.calls: list[str] = []
        self.paused = self.refuses = False

    async def call_utility_all_async(self, utility, command):
        assert utility == UTILITY
        self.calls.append(command)
        if not self.reports:
            raise AttributeError("no such method")
        if command == "report":
            return [(0, None)]
        return list(self.reports)

    async def pause_scheduler_async(self, mode, clear_cache) -> None:
        assert not clear_cache
        self.paused = True


async def healthy() -> None:
    pass


async def dead() -> None:
    raise RuntimeError("the engine died")


class Engine:
    """An engine client that counts how often it was paused and resumed."""

    def __init__(self, *reports) -> None:
        self.engine_core = Core(*reports)
        self.check_health = healthy
        self.resumed = 0

    async def is_paused(self) -> bool:
        return self.engine_core.paused

    async def pause_generation(self, mode, clear_cache) -> None:
        """As vLLM 0.33 does it."""
        await self.engine_core.pause_scheduler_async(mode, clear_cache)
        self.engine_core.refuses = mode != "keep"

    async def resume_generation(self) -> None:
        self.engine_core.paused = self.engine_core.refuses = False
        self.resumed += 1


PORT = 49_999
TOKEN = admin_token(PORT)


def client(host="127.0.0.1", *reports, token=TOKEN) -> TestClient:
    app = FastAPI()
    app.include_router(router)
    app.include_router(probes)
    app.state.engine_client = Engine(*reports)
    headers = {} if token is None else {TOKEN_HEADER: token}
    return TestClient(app, f"http://127.0.0.1:{PORT}", client=(host, 50000), headers=headers)


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
        ("127.0.0.1", {"Host": "evil.example"}, 403),  # a name that was rebound to this machine
        ("127.0.0.1", {"Host": "localhost:8000"}, 200),
        ("127.0.0.1", {"Host": "[::1]:8000"}, 200),
        ("127.0.0.1", {TOKEN_HEADER: "guessed"}, 403),  # a proxy without forwarding headers
    ],
)
def test_only_local_requests_are_answered(host, headers, status) -> None:
    reply = client(host, {"running": 0}).get("/v1/semsched/status", headers=headers)
    assert reply.status_code == status


READING = {"probabilities": [0.1, 0.2, 0.7], "level": 2}


def test_correction_is_recorded_without_id_or_text(tmp_path) -> None:
    server = client("127.0.0.1", None, READING)  # the second engine had the request
    body = {"id": "cmpl-7", "level": 0}
    path = "/v1/semsched/correct"
    assert server.post(path, json=body).status_code == 409  # no event log
    events = Events(path=str(tmp_path / "events.jsonl"))
    policy = SimpleNamespace(events=events)
    state_of(server.app).rules = SimpleNamespace(policy=policy)
    assert server.get("/v1/semsched/corrections").json() == {"corrections": []}
    assert server.post(path, json=body).json() == {"level": 2, "corrected": 0}
    assert server.app.state.engine_client.engine_core.calls[-1] == "reading cmpl-7"
    assert server.post(path, json=body | {"sampled": True}).status_code == 200
    assert server.post(path, json=body | {"level": 3}).status_code == 422
    assert server.post(path, json=body | {"level": -1}).status_code == 422
    assert server.post(path, json=body | {"id": "x" * 513}).status_code == 422
    found = server.get("/v1/semsched/corrections").json()["corrections"]
    assert [one["sampled"] for one in found] == [False, True]
    wanted = {"time", "probabilities", "level", "corrected", "sampled"}
    assert set(found[0]) == wanted and found[0]["probabilities"] == READING["probabilities"]
    assert "cmpl-7" not in (tmp_path / "corrections.jsonl").read_text()

    unknown = client("127.0.0.1", None)
    state_of(unknown.app).rules = SimpleNamespace(policy=policy)
    assert unknown.post(path, json=body).status_code == 404
    assert client("10.0.0.7", READING).post(path, json=body).status_code == 403
    assert client("127.0.0.1", READING, token=None).post(path, json=body).status_code == 403


STANDING = {"request": "cmpl-7-0-0a1b2c3d", "state": "queued", "level": 3, "ahead": 2}


def test_level_is_set_and_asked_for_on_all_engines() -> None:
    path, known = "/v1/semsched/level", {"requests": [STANDING]}
    server = client("127.0.0.1", {"requests": []}, known)  # the second engine has the request
    assert server.get(path, params={"id": "a/b c"}).json() == known
    body = {"id": "cmpl-7", "level": 0, "by": "ann", "why": "chest pain\nINFO: all is well"}
    assert server.post(path, json=body).json() == known
    asked, changed = server.app.state.engine_client.engine_core.calls
    given = {"id": "a/b c", "level": None, "by": "", "why": ""}
    assert asked == f"level {json.dumps(given)}"
    # One line, whatever the text.
    given = body | {"why": "chest pain INFO: all is well"}
    assert changed == f"level {json.dumps(given)}"
    for wrong in ({"level": 0}, {"id": "cmpl-7", "level": None}, body | {"why": "x" * 513}):
        assert server.post(path, json=wrong).status_code == 422
    assert client("10.0.0.7", known).post(path, json=body).status_code == 403
    assert client("127.0.0.1", known, token=None).get(path, params=body).status_code == 403


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        ({"requests": []}, 404, "no request 'cmpl-7' waits or runs: it has ended, or never came"),
        ({"invalid": "level 7 does not exist; valid: 0, 1"}, 400, "valid: 0, 1"),
        ({"refused": "the policy only observes"}, 409, "observes"),
    ],
)
def test_level_that_cannot_be_set_is_refused_with_the_reason(answer, status, reason) -> None:
    server = client("127.0.0.1", answer, answer)
    reply = server.post("/v1/semsched/level", json={"id": "cmpl-7", "level": 7})
    assert reply.status_code == status and reason in reply.json()["detail"]


def test_token_is_readable_by_its_user_only() -> None:
    assert TOKEN is not None and len(TOKEN) == 64 and admin_token(PORT) == TOKEN
    folder = own_folder()
    assert folder is not None
    assert (folder / f"{PORT}.token").stat().st_mode & 0o777 == 0o600
    assert client(token=None).get("/v1/semsched/status").status_code == 403


def test_pause_ends_by_itself_and_shows_in_readiness() -> None:
    with client("127.0.0.1", {"ready": True}) as server:
        engine = server.app.state.engine_client
        assert ready(server) == 200
        assert server.post("/v1/semsched/pause", json={"seconds": 0.05}).json() == {"paused": True}
        wait_until(lambda: engine.resumed == 1)
        assert server.post("/v1/semsched/pause", json={}).status_code == 200
        assert ready(server) == 503
        assert server.post("/v1/semsched/resume").status_code == 200
        assert ready(server) == 200
        assert state_of(server.app).lease is None
        refused = server.post("/v1/semsched/pause", json={"seconds": 1e9})
        assert refused.status_code == 422


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_paused_server_takes_new_requests(mode) -> None:
    with client("127.0.0.1", {"ready": True}) as server:
        core = server.app.state.engine_client.engine_core
        assert server.post("/v1/semsched/pause", json={"mode": mode}).status_code == 200
        assert core.paused and not core.refuses


class Sleeper(Engine):
    """An engine client that notes how it is woken."""

    def __init__(self) -> None:
        super().__init__({"ready": True})
        self.steps: list[str] = []

    async def sleep(self, level, mode) -> None:
        assert mode == "keep"

    async def wake_up(self, tags=None) -> bool:
        self.steps.append(f"wake {tags}")
        return tags != ["weights"]

    async def collective_rpc(self, method) -> None:
        self.steps.append(method)


@pytest.mark.parametrize(
    ("level", "frees_memory", "steps"),
    [
        (1, True, ["wake None"]),
        (2, True, ["wake ['weights']", "reload_weights", "wake ['kv_cache']"]),
        (2, False, ["wake None"]),  # nothing was dropped
    ],
)
def test_weights_that_sleep_dropped_are_loaded_before_the_server_resumes(
    level, frees_memory, steps, monkeypatch
) -> None:
    monkeypatch.setattr(vllm_api, "has_sleep_mode", lambda: frees_memory)
    with client("127.0.0.1") as server:
        engine = server.app.state.engine_client = Sleeper()
        answer = server.post("/v1/semsched/sleep", json={"level": level}).json()
        assert answer == {"asleep": level * frees_memory}
        assert server.post("/v1/semsched/wake").json() == {"awake": True}
        assert engine.steps == steps
        assert server.post("/v1/semsched/wake").status_code == 200
        assert engine.steps == [*steps, "wake None"]


def test_reload_is_rejected_if_any_engine_rejects_it() -> None:
    fine = {"result": "adopted", "version": 2}
    refused = {"result": "refused", "reason": "levels: 5 -> 4 needs a restart", "version": 1}
    good = client("::1", fine, fine)
    assert good.post("/v1/semsched/policy/reload").json() == {"engines": [fine, fine]}
    calls = good.app.state.engine_client.engine_core.calls
    assert calls[:2] == ["load_policy", "adopt_policy"]
    assert "report" in calls[2:]  # an idle engine has nothing else to report with
    bad = client("::1", fine, refused).post("/v1/semsched/policy/reload")
    assert bad.status_code == 422 and "levels: 5 -> 4" in bad.text


def test_error_names_another_scheduler() -> None:
    reply = client().get("/v1/semsched/status")
    assert reply.status_code == 501 and "status" in reply.text


def ready(probe: TestClient) -> int:
    return probe.get("/semsched/ready").status_code


def test_server_is_ready_once_all_predictors_have_been_up() -> None:
    one, other = {"ready": True}, {"ready": False}
    probe = client("10.0.0.7", one, other)
    assert ready(probe) == 503
    other["ready"] = True
    assert ready(probe) == 200
    other["ready"] = False  # it restarts: better this server than none
    assert ready(probe) == 200
    probe.app.state.engine_client.check_health = dead
    assert ready(probe) == 503


def test_server_whose_engine_does_not_answer_is_not_ready() -> None:
    assert ready(client("10.0.0.7")) == 503


def test_scheduler_substituted_by_a_platform_is_named() -> None:
    server = client("127.0.0.1")
    config = SimpleNamespace(get_scheduler_cls=lambda: Core)
    server.app.state.vllm_config = SimpleNamespace(scheduler_config=config)
    for path, status in (("/semsched/ready", 503), ("/v1/semsched/status", 501)):
        answer = server.get(path)
        assert answer.status_code == status and f"{__name__}.Core" in answer.text


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A folder with `data/policy.yaml`, and how often it was reloaded."""
    reloads = []

    async def reload(app) -> None:
        reloads.append(app)

    monkeypatch.setattr(admin, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(admin, "_reload", reload)
    return tmp_path, reloads


def swap(folder: Path, name: str) -> None:
    """Change the files as the kubelet changes those of a ConfigMap: a link to a folder with the new
    ones replaces the old link."""
    (folder / name).mkdir()
    (folder / name / "policy.yaml").write_text(f"# {name}")
    (folder / "new").symlink_to(name)
    os.replace(folder / "new", folder / "data")


def test_policy_is_reloaded_when_the_link_to_its_file_changes(watched) -> None:
    folder, reloads = watched
    swap(folder, "one")
    file = PolicyFile(folder / "data" / "policy.yaml")

    async def count(expected: int) -> None:
        while len(reloads) < expected:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # and no more
        assert reloads == ["app"] * expected

    async def run() -> None:
        task = asyncio.create_task(admin.watch_policy("app", file))
        await count(1)  # it may have changed since the engines read it
        swap(folder, "two")
        await count(2)
        (folder / "data").unlink()  # gone for a moment, or for good
        await count(2)
        swap(folder, "three")
        await count(3)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 120))


def test_file_is_not_read_while_it_is_being_written(tmp_path, monkeypatch) -> None:
    stamps = [(1,), (2,), (3,), (3,), (3,), None, (3,), (4,), (4,)]
    (tmp_path / "policy.yaml").touch()
    file = PolicyFile(tmp_path / "policy.yaml")
    monkeypatch.setattr(startup, "_signature", lambda path: stamps.pop(0))
    seen = [file.has_changed() for _ in list(stamps)]
    assert [place for place, changed in enumerate(seen) if changed] == [3, 8]


@pytest.mark.parametrize(
    ("settings", "watches"),
    [
        ({"policy": "tiers", "watch": True}, True),
        ({"policy": "tiers"}, False),
        ({"polcy": "tiers", "watch": True}, False),
        (None, False),
    ],
)
def test_policy_is_watched_on_demand(settings, watches) -> None:
    async def run() -> None:
        app = FastAPI()
        if settings is not None:
            config = {"semantic_sched": settings}
            app.state.vllm_config = SimpleNamespace(additional_config=config)
        admin.add_routes(app)
        assert ("watch" in app.state.semsched.tasks) == watches

    asyncio.run(run())
