"""Runs the real engine on the emulated device, and records what its scheduler knew and decided."""

import random
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.requests import prediction
from vllm_semantic_sched.lab.device.load import LoadRequest
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

from .recording import Recording, ScriptedInstant, ScriptedPredictor, record

REQUESTS = 80
TENANTS = ("", "a", "b")
HOST_GIB = 0.6  # 150 blocks


@dataclass(frozen=True)
class EngineCase:
    """A policy, by its path or shipped name, and the engine that follows it. `profile`: what the
    scheduler is told. `gated_level`: see `SchedulingCore`."""

    policy: str
    profile: str = "default"
    asynchronous: bool = False
    swap: bool = False
    gated_level: int | None = None


def run(case: EngineCase, model: Path) -> Recording:
    """Serve requests that are the same in each case. `model`: folder for the shape, with a
    tokenizer."""
    config = EngineConfig(
        policy=case.policy,
        predictor=True,
        given_profile=case.profile,
        asynchronous=case.asynchronous,
        swap_gib=HOST_GIB if case.swap else None,
        seats=6,
        blocks=22,
        block_size=32,
        budget=512,
        max_model_len=512,
        model=model,
    )
    with (
        patch.object(prediction, "PredictionService", ScriptedPredictor),
        patch.object(prediction, "InstantReader", ScriptedInstant),
        VirtualEngine(config) as engine,
    ):
        if case.gated_level is not None:
            engine.scheduler.core.gated_level = case.gated_level
        return _serve(engine, case.policy)


def _serve(engine: VirtualEngine, policy: str) -> Recording:
    scheduler = engine.scheduler
    ours = isinstance(scheduler, SemanticScheduler)  # the policy `fcfs` gives vLLM's own
    recording = record(scheduler, policy) if ours else Recording(policy)
    rng = random.Random(3)
    sent = 0
    while sent < REQUESTS or scheduler.has_requests():
        for _ in range(rng.choice([0, 0, 0, 1, 1])):
            if sent < REQUESTS:
                engine.add(make_request(str(sent), engine.clock.now(), random.Random(sent)))
                sent += 1
        engine.step()
        engine.clock.wait_until(engine.clock.now() + rng.choice([0.02, 0.05, 0.3, 1.0, 2.0]))
    recording.answers = {
        name: tuple(one.tokens) for name, one in engine.records.items() if one.reason == "stop"
    }
    if ours:
        assert scheduler.counters.total("policy_errors") == 0
        scheduler.gauges()  # brings the counters up to date
        recording.counters = {
            "_".join((name, *labels)): total
            for (name, labels), total in scheduler.counters.totals.items()
        }
    return recording


def make_request(name: str, now: float, rng: random.Random) -> LoadRequest:
    """A request that half the time states its level."""
    extra = {"tenant": rng.choice(TENANTS)}
    level = rng.randint(0, 4) if rng.random() < 0.5 else None
    if rng.random() < 0.45:
        extra["dedup_key"] = rng.choice("xy")
    prompt = tuple(rng.randint(20, 500) for _ in range(rng.choice([10, 40, 100, 300])))
    return LoadRequest(name, now, level, prompt, rng.randint(2, 40), extra)
