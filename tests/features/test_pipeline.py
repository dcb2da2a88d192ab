"""Steps of a pipeline with two stages: the second is scheduled before the first has its tokens. The
emulated device computes them one after the other, as one stage."""

from dataclasses import replace

import pytest
from virtual_runs import run
from vllm.config import VllmConfig

from vllm_semantic_sched.engine import vllm_api
from vllm_semantic_sched.lab.device.load import Lengths, LoadConfig, draw_load
from vllm_semantic_sched.lab.device.virtual import EngineConfig, VirtualEngine

pytestmark = pytest.mark.engine

LOAD = draw_load(
    LoadConfig(
        requests=24, rate=60.0, prompts=Lengths(5.2, 0.5, 20, 400), answers=Lengths(4, 0.5, 2, 150)
    )
)
FEW = {"seats": 8, "blocks": 64, "budget": 128, "max_model_len": 1000, "asynchronous": False}
STAGES = 2


@pytest.fixture
def two_stages(monkeypatch) -> None:
    """In vLLM's core and to our scheduler; there is one worker."""
    monkeypatch.setattr(VllmConfig, "max_concurrent_batches", STAGES)
    why_no_holds = vllm_api.why_no_holds

    def of_a_pipeline(config: VllmConfig) -> str | None:
        monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", STAGES)
        reason = why_no_holds(config)
        monkeypatch.setattr(config.parallel_config, "pipeline_parallel_size", 1)
        return reason

    monkeypatch.setattr(vllm_api, "why_no_holds", of_a_pipeline)


def test_preempted_requests_get_the_same_answers(two_stages) -> None:
    plain, preempted = run(LOAD, scheduler="fcfs", seats=24, max_model_len=1000)
    assert not preempted
    for scheduler in ("fcfs", "semantic"):
        got, preempted = run(LOAD, scheduler=scheduler, **FEW)
        assert got == plain
        assert preempted


def test_urgent_request_takes_a_seat(two_stages) -> None:
    """While steps of both stages are in flight."""
    low = [replace(one, arrival=0.0, level=4, answer=150) for one in LOAD[:8]]
    urgent = replace(LOAD[8], arrival=2.0, level=0, answer=5)
    with VirtualEngine(EngineConfig(**{**FEW, "blocks": None})) as engine:
        engine.send([*low, urgent])
        engine.run()
        assert engine.scheduler.core.protection.unsafe
        first, *others = sorted(engine.records.values(), key=lambda record: record.ended)
        assert first.name == urgent.name
        assert len(others) == len(low)
        assert first.ttft < 0.5 < others[0].ended - urgent.arrival
