"""Causes of a wait add up to it, whatever happens to the request."""

import json
import random
from collections import defaultdict
from typing import Any

import pytest
from drive import end, seats_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.operate.why import Delay, Waits
from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.record.event_format import Event
from vllm_semantic_sched.policy.record.lifecycle import Transition
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.scenario import Scenario, parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate

TIERS = [{"name": str(level), "drop": level == 4} for level in range(5)]


class Log:
    """The lines of the event log of a simulation; a listener and journal of its core."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def watch(self, core: SchedulingCore) -> None:
        self._core = core
        core.lifecycle.listeners.append(self)
        core.record_why(self)

    def _add(self, event: Event) -> None:
        self.lines.append(json.loads(json.dumps(event.line(0, str(event.level)))))

    def moved(self, transition: Transition) -> None:
        self._add(Event.of(transition, transition.time))

    def first_token(self, job: Job) -> None:
        pass

    def held(self, job: Job, seconds: float) -> None:
        self._add(Event.of_hold(job, seconds, self._core.lifecycle.clock()))

    def noted(self, job: Job, what: str, details: Any) -> None:
        self._add(Event.of_note(job, what, details, self._core.lifecycle.clock()))


def delays_by_request(lines: list[dict[str, Any]]) -> dict[str, list[Delay]]:
    waits: defaultdict[str, Waits] = defaultdict(Waits)
    delays: defaultdict[str, list[Delay]] = defaultdict(list)
    for line in lines:
        found, _ = waits[line["request"]].follow(line)
        delays[line["request"]] += found
    return delays


class Chaos:
    """Ends some waiting requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, engine: Engine) -> None:
        if self.random.random() < 0.02 and len(engine.core.waiting) > 1:
            end(engine, self.random.choice(list(engine.core.waiting)))


@st.composite
def crowded(draw: st.DrawFn) -> Scenario:
    """Scenarios with preemptions, holds, swaps, limits and refusals."""
    seats = draw(st.integers(1, 8))
    data = {
        "seed": draw(st.integers(0, 9999)),
        "workload": {
            "arrivals": draw(st.sampled_from(["bursts", "poisson"])),
            "requests": draw(st.integers(15, 40)),
            "rate": draw(st.sampled_from([5.0, 50.0])),
            "prompt": {"kind": "uniform", "low": 1, "high": 300},
            "output": {"kind": "uniform", "low": 1, "high": 80},
            "hints": draw(st.booleans()),
            "tenants": [3.0, 1.0],
        },
        "predictor": {
            "latency": draw(st.sampled_from([0.0, 0.05, 0.5])),
            "urgency_error": 0.2,
            "hold": draw(st.booleans()),
        },
        "engine": {
            "kind": "vllm",
            "seats": seats,
            "token_budget": draw(st.sampled_from([32, 256])),
            "kv_blocks": draw(st.sampled_from([None, 40])),
            "host_blocks": 100,
            "swap": draw(st.booleans()),
            "profile": draw(st.sampled_from(["a100-qwen1.5-4b", "cpu-2core-small"])),
        },
        "schedulers": {"it": {"policy": draw(st.sampled_from(["ems", "latency", "priority"]))}},
        "overrides": {
            "tiers": [
                {**tier, "reserve": {"seats": int(level == 0 and seats > 2), "mode": "hard"}}
                for level, tier in enumerate(TIERS)
            ],
            "tenants": {"fair": True, "seats": draw(st.sampled_from([0.6, 1.0])), "kv": 0.8},
            "kv_peak": {"enabled": draw(st.booleans())},
            "protect": {"level": 1, "price": 0.5, "worth": 1000},
            "admission": {"queue": {"requests": draw(st.sampled_from([5, 100])), "timeout": 5.0}},
        },
    }
    return parse_scenarios(data, "why")[0]


@settings(max_examples=60, deadline=None)
@given(crowded())
def test_causes_add_up_to_the_measured_wait(scenario: Scenario) -> None:
    log, chaos = Log(), Chaos(scenario.settings.seed)
    runs = simulate(scenario, "it", keep_seats=True, before_step=chaos, watch=log.watch).runs
    delays, begins, ends, unread = delays_by_request(log.lines), {}, {}, {}
    for line in log.lines:
        begins.setdefault(line["request"], line["time"])
        ends[line["request"]] = line["time"]
        if line.get("reason") == "read" and line["state"] == "queued":
            raised = line["level"] < line["level_before"]
            unread[line["request"]] = line["time"] if raised else None
        if line.get("reason") in ("urgent", "held"):
            assert line["for"] != line["request"] and line["for_level"] <= line["level"]
        if line["from"] is None or line.get("reason") == "read":
            assert line["rule"] in ("hint", "default", "prediction", "tenant_top")
    for run in runs:
        name = run.job.request_id
        found = [delay for delay in delays[name] if delay.cause != "restoring"]
        assert not any(delay.cause == "unknown" for delay in found)
        assert all(delay.seconds >= 0 for delay in found)
        seated = sum(seat.end - seat.start for seat in seats_of(run))
        held = sum(seat.held for seat in seats_of(run))
        # The engine takes it in after the step under way, as vLLM does.
        assert begins[name] >= run.request.arrival - 1e-6
        measured = ends[name] - begins[name] - seated + held
        assert sum(delay.seconds for delay in found) == pytest.approx(measured, abs=1e-4)
        until = unread.get(name)
        if until is not None and not scenario.settings.predictor.hold:
            unread_seconds = sum(delay.seconds for delay in found if delay.cause == "unread")
            assert unread_seconds == pytest.approx(until - begins[name], abs=1e-4)
