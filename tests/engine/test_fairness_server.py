"""Tenants and a policy that changes in a real `vllm serve`; test_fairness.py has the rest."""

import json
import os
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from metrics_page import wait_until

from vllm_semantic_sched.operate.client import AdminClient

pytestmark = pytest.mark.engine

POLICY = """
base: priority
levels: 3
default_level: 2
predictor: {enabled: false}
tiers:
  - {name: premium, reserve: {seats: 1}}
  - {name: standard}
  - {name: background}
aging: {enabled: true, interval: 0.4}
tenants: {fair: true}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the policy is, as Kubernetes mounts a ConfigMap."""
    folder = tmp_path_factory.mktemp("policy")
    (folder / "policy.yaml").symlink_to("..data/policy.yaml")
    return folder


def write_policy(folder, version: str, text: str) -> None:
    """Change all files at once, as the kubelet does it."""
    (folder / version).mkdir()
    (folder / version / "policy.yaml").write_text(text)
    (folder / "..data_tmp").symlink_to(version)
    os.replace(folder / "..data_tmp", folder / "..data")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("log") / "events.jsonl"


@pytest.fixture(scope="module")
def server(serve, folder, log, slim_model):
    write_policy(folder, "..1", POLICY)
    settings = {"policy": str(folder / "policy.yaml"), "watch": True, "events": str(log)}
    return serve(
        "--scheduler-cls",
        "vllm_semantic_sched.SemanticScheduler",
        "--middleware",
        "vllm_semantic_sched.Middleware",
        "--additional-config",
        json.dumps({"semantic_sched": settings}),
        seats=3,
        model=slim_model,
    )


def complete(server, urgency=2, headers=None, **body) -> None:
    body = {
        "model": "bench", "prompt": "hello", "max_tokens": 20, "ignore_eos": True,
        "vllm_xargs": {"urgency": urgency},
    } | body  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"} | (headers or {}),
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == body["max_tokens"]


def seated(log) -> list[str]:
    """Tenants of the requests in the order in which these got their first seats."""
    tenants: dict[str, str] = {}
    for event in map(json.loads, log.read_text().splitlines()):
        if event.get("state") == "running":
            tenants.setdefault(event["request"], event["tenant"])
    return list(tenants.values())


def test_flood_of_one_tenant_does_not_delay_another(server, log) -> None:
    """A header names the one, the field `user` the other. All wait before the first is served."""
    admin = AdminClient(server.url)

    def wait_for(requests: int) -> None:
        wait_until(lambda: admin.status()[0]["waiting"] == requests)

    admin.post("/pause")
    with ThreadPoolExecutor(32) as pool:
        try:
            header = {"X-Semsched-Tenant": "flood"}
            answers = [pool.submit(complete, server, headers=header) for _ in range(30)]
            wait_for(30)
            answers += [pool.submit(complete, server, user="quiet") for _ in range(2)]
            wait_for(32)
        finally:
            admin.post("/resume")
        for answer in answers:
            answer.result()
    wait_until(lambda: len(seated(log)) == 32)  # the log is written behind
    # In order of arrival: the last two.
    assert seated(log).index("quiet") < 5 and "quiet" not in seated(log)[15:]


def test_changed_policy_is_reloaded_without_a_command(server, folder) -> None:
    def policy() -> dict:
        return AdminClient(server.url).status()[0]["policy"]

    assert policy()["version"] == 1
    write_policy(folder, "..2", POLICY.replace("interval: 0.4", "interval: 0.5"))
    wait_until(lambda: policy()["version"] == 2)
    assert policy()["changed"] == ["aging.interval"]
    write_policy(folder, "..3", POLICY + "base: sjf\n")
    wait_until(lambda: policy()["result"] == "refused")
    assert policy()["version"] == 2


def test_server_is_ready(server) -> None:
    assert json.loads(server.get_text("/semsched/ready")) == {"ready": True}
