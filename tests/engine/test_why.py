"""On vLLM's own scheduler the causes in the event log add up to the wait, whatever happens."""

import json
import random
import time
from collections import defaultdict
from pathlib import Path

import pytest

from vllm_semantic_sched.engine.scheduler import SemanticScheduler
from vllm_semantic_sched.engine.vllm_api import PauseState, RequestStatus
from vllm_semantic_sched.lab.bench.standalone import build_scheduler, make_request, run_step
from vllm_semantic_sched.operate.audit import Audit
from vllm_semantic_sched.operate.why import Delay, Waits, events_of

pytestmark = pytest.mark.engine

OBSERVED = {"overtaken", "seat", "kv", "paused"}
ORDERED = {"overtaken", "seat", "tenant", "preempted", "paused", "restoring"}
POLICY = """
observe: {observe}
predictor: {{enabled: false}}
events: {{path: {path}}}
tenants: {{fair: true, seats: 0.6}}
admission: {{queue: {{requests: 30, timeout: 0.3}}}}
protect: {{level: 0, price: 0.5, worth: 1000}}
dedup: waiting
"""


def delays_of(path: Path) -> tuple[dict[str, list[Delay]], dict[str, float]]:
    """Delays of each request, and seconds without a seat or held as its lines tell."""
    waits: defaultdict[str, Waits] = defaultdict(Waits)
    delays: defaultdict[str, list[Delay]] = defaultdict(list)
    measured: defaultdict[str, float] = defaultdict(float)
    since: dict[str, float] = {}
    for event in events_of(path):
        name = event["request"]
        found, _ = waits[name].follow(event)
        delays[name] += found
        measured[name] += event.get("held", 0.0) + event.get("restored", 0.0)
        if event["from"] == event["state"]:
            continue
        if name in since:
            measured[name] += event["time"] - since.pop(name)
        if event["state"] in ("queued", "swapped"):
            since[name] = event["time"]
    return delays, measured


@pytest.mark.parametrize(("observe", "causes"), [("false", ORDERED), ("true", OBSERVED)])
def test_causes_add_up_on_vllms_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observe: str, causes: set[str]
) -> None:
    now = [1_800_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    path, policy, chance = tmp_path / "events.jsonl", tmp_path / "policy.yaml", random.Random(3)
    policy.write_text(POLICY.format(path=path, observe=observe))
    scheduler = build_scheduler(
        SemanticScheduler, max_num_seqs=5, num_blocks=60, semantic_sched={"policy": str(policy)}
    )
    scheduler.clock.seconds = time.monotonic
    for step in range(400):
        now[0] += 0.01
        for number in range(chance.choice([0, 0, 1, 3])):
            request = make_request(
                f"r{step}-{number}",
                prompt_tokens=chance.randint(1, 200),
                output_tokens=chance.randint(1, 40),
                urgency=chance.choice([0, 2, 4, 4]),
                tenant=chance.choice(["a", "a", "b"]),
            )
            scheduler.add_request(request)
        if chance.random() < 0.05 and scheduler.requests:
            gone = chance.choice(list(scheduler.requests))
            scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        if step in (100, 200):
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            now[0] += 0.5
            scheduler.set_pause_state(PauseState.UNPAUSED)
        run_step(scheduler)
    while scheduler.get_num_unfinished_requests():
        now[0] += 0.01
        run_step(scheduler)
    scheduler.shutdown()
    assert scheduler.counters.total("policy_errors") == 0
    delays, measured = delays_of(path)
    seen = {delay.cause for found in delays.values() for delay in found}
    assert causes <= seen, seen
    assert "unknown" not in seen
    for name, found in delays.items():
        assert sum(delay.seconds for delay in found) == pytest.approx(measured[name], abs=1e-4)
    assert Audit(path).whole
    states = {event["state"] for event in events_of(path)}
    assert {"cancelled", "completed"} <= states and ("refused" in states) == (observe == "false")
    for text in path.read_text().splitlines():
        event = json.loads(text)
        if event.get("reason") == "urgent":
            assert event["for_level"] < event["level"] and event["for"].startswith("r")
