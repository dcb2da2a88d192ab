"""Aging, tenants, reservations and a policy that changes in a real `vllm serve`."""

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from metrics_page import page_value, wait_until

from vllm_semantic_sched.operate.client import AdminClient
from vllm_semantic_sched.policy.facts.files import read_config

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
aging: {enabled: true, interval: 0.4, share: 0.25}
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
def server(serve, folder, slim_model):
    write_policy(folder, "..1", POLICY)
    return serve(
        "--scheduler-cls",
        "vllm_semantic_sched.SemanticScheduler",
        "--middleware",
        "vllm_semantic_sched.Middleware",
        "--additional-config",
        json.dumps({"semantic_sched": {"policy": str(folder / "policy.yaml"), "watch": True}}),
        seats=3,
        model=slim_model,
    )


def complete(server, urgency=2, headers=None, **body) -> tuple[float, float]:
    """Send a request; returns its start and end times."""
    body = {
        "model": "bench", "prompt": "hello", "max_tokens": 60, "ignore_eos": True,
        "vllm_xargs": {"urgency": urgency},
    } | body  # fmt: skip
    request = urllib.request.Request(
        server.url + "/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"} | (headers or {}),
    )
    begin = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as reply:
        assert json.load(reply)["usage"]["completion_tokens"] == body["max_tokens"]
    return begin, time.monotonic()


def metric(server, name: str, **labels: str) -> float:
    complete(server, max_tokens=2)
    time.sleep(0.3)
    complete(server, max_tokens=2)
    return page_value(server, name, **labels)


@pytest.mark.parametrize("by", ["user", "header"])
def test_flood_of_one_tenant_does_not_delay_another(server, by) -> None:
    def as_tenant(name):
        return {"user": name} if by == "user" else {"headers": {"X-Semsched-Tenant": name}}

    with ThreadPoolExecutor(32) as pool:
        flood = [pool.submit(complete, server, **as_tenant(f"flood {by}")) for _ in range(30)]
        time.sleep(0.3)
        quiet = [pool.submit(complete, server, **as_tenant(f"quiet {by}")) for _ in range(2)]
        ends = sorted(future.result()[1] for future in flood)
        last = max(future.result()[1] for future in quiet)
    assert sum(end > last for end in ends) > 15


def test_premium_finds_its_reserved_seat_free_under_full_load(server) -> None:
    before = metric(server, "semsched:preemptions_total")
    with ThreadPoolExecutor(21) as pool:
        flood = [pool.submit(complete, server, max_tokens=100) for _ in range(20)]
        time.sleep(0.3)
        busy = server.get_text("/metrics")
        _, end = complete(server, urgency=0)
        ends = [future.result()[1] for future in flood]
    running = [line for line in busy.splitlines() if line.startswith("vllm:num_requests_running")]
    assert float(running[0].rsplit(" ", 1)[1]) <= 2
    assert sum(other > end for other in ends) > 10
    assert metric(server, "semsched:preemptions_total") == before
    assert metric(server, "semsched:reservation_free_seats", tier="premium") == 2


def test_background_is_served_under_permanent_premium_load(server) -> None:
    stop = threading.Event()

    def premium() -> None:
        while not stop.is_set():
            complete(server, urgency=0)

    before = metric(server, "semsched:overtakings_total")
    with ThreadPoolExecutor(14) as pool:
        load = [pool.submit(premium) for _ in range(12)]
        time.sleep(0.5)
        complete(server, urgency=2)
        under_load = sum(not future.done() for future in load)
        stop.set()
        for future in load:
            future.result()
    assert under_load == 12
    # Overdue after three promotions; then the next of four admissions, or so, is its own.
    assert metric(server, "semsched:overtakings_total") > before
    assert metric(server, "semsched:policy_errors_total") == 0


def test_changed_policy_is_reloaded_without_a_command(server, folder) -> None:
    def policy() -> dict:
        return AdminClient(server.url).status()[0]["policy"]

    assert policy()["version"] == 1
    write_policy(folder, "..2", POLICY.replace("share: 0.25", "share: 0.5"))
    wait_until(lambda: policy()["version"] == 2, seconds=60)
    assert policy()["changed"] == ["aging.share"]
    write_policy(folder, "..3", POLICY + "base: sjf\n")
    wait_until(lambda: policy()["result"] == "refused", seconds=60)
    assert policy()["version"] == 2


def attempt(server, urgency: int) -> str:
    """Send a request; returns the code of its refusal, empty if it was answered."""
    try:
        complete(server, urgency=urgency, max_tokens=10)
    except urllib.error.HTTPError as error:
        assert error.code == 429 and int(error.headers["retry-after"]) >= 1
        return json.load(error)["error"]["code"]
    return ""


def served_and_refused(server, clients: tuple[int, ...], enough):
    """Let each tier's clients send one request after another until `enough(served)`; returns the
    tiers of the answered requests, in order, and the refusals by tier and code."""
    stop, served, refused = threading.Event(), [], Counter()

    def send(tier: int) -> None:
        while not stop.is_set():
            if code := attempt(server, tier):
                refused[tier, code] += 1
                time.sleep(0.1)
            else:
                served.append(tier)

    tiers = [tier for tier, count in enumerate(clients) for _ in range(count)]
    with ThreadPoolExecutor(len(tiers)) as pool:
        futures = [pool.submit(send, tier) for tier in tiers]
        try:
            wait_until(lambda: enough(served), seconds=120)
        finally:
            stop.set()
        for future in futures:
            future.result()
    return served, refused


def as_shared(served: list[int]) -> bool:
    """Whether each tier has about its share of the answered requests."""
    shares = [served.count(tier) / len(served) for tier in range(3)]
    return shares == pytest.approx([0.5, 0.35, 0.15], abs=0.1)


def test_shares_converge_and_only_pressure_refuses(server, folder) -> None:
    keys = read_config("shares", kind="policy")[0]
    keys["tenants"] = {"fair": True}  # as the server was started
    keys["fair_share"]["window"] = 3
    write_policy(folder, "..4", yaml.safe_dump(keys))
    AdminClient(server.url).post("/policy/reload")  # sooner than the server looks at the file
    # One request after the other: no pressure, though background has all of the work.
    wait_until(lambda: not metric(server, "semsched:pressure"))
    assert [attempt(server, 2) for _ in range(10)] == [""] * 10
    # Every tier has as much work as its share allows.
    served_and_refused(
        server, (10, 7, 3), lambda served: len(served) > 120 and as_shared(served[-120:])
    )
    served, _ = served_and_refused(server, (10, 7, 3), lambda served: len(served) >= 160)
    assert as_shared(served), Counter(served)
    # Background has far more than its share.
    _, refused = served_and_refused(server, (2, 2, 14), lambda served: len(served) > 60)
    assert metric(server, "semsched:refused_total", code="tier_over_share") > 0
    assert refused[2, "tier_over_share"] > 0 and not refused[0, "tier_over_share"]
    assert {code for _, code in refused} == {"tier_over_share"}
    wait_until(lambda: not metric(server, "semsched:pressure"))
    assert attempt(server, 2) == ""
    assert metric(server, "semsched:policy_errors_total") == 0


def test_server_is_ready(server) -> None:
    assert json.loads(server.get_text("/semsched/ready")) == {"ready": True}
