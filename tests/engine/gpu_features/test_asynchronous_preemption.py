"""A level 0 takes a seat at once under asynchronous scheduling, also where a step in flight may
write to the blocks of its victim for a while."""

from typing import Any

import pytest
import torch
from engine_steps import EngineSteps
from fake_device import FakeDevice, expected, swap_config
from remote_kv import remote_config
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

from vllm_semantic_sched.engine.kv import connector
from vllm_semantic_sched.lab.bench.standalone import BLOCK_SIZE, KV_SHAPE

pytestmark = pytest.mark.engine

AT_ONCE = 3
WINDOW = 40


def inside_multi_connector() -> KVTransferConfig:
    ours = {
        "kv_connector": "SemanticSwapConnector",
        "kv_connector_module_path": "vllm_semantic_sched.engine.kv_swap",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {},
    }
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [ours]},
    )


CONNECTORS = {
    "none": lambda: None,
    "ours": swap_config,
    "ours, no swaps": swap_config,
    "MultiConnector": inside_multi_connector,
    "kv_both": lambda: remote_config({}),
    "kv_consumer": lambda: remote_config({}, "kv_consumer"),
    "kv_producer": lambda: remote_config({}, "kv_producer"),
}


@pytest.fixture
def build_full(build, monkeypatch):
    """Builds an asynchronous engine of two seats with a connector."""

    def build_full(name: str, **options: Any):
        if name == "ours, no swaps":  # `semsched serve` adds the connector all the same
            reason = "speculative decoding is on"
            monkeypatch.setattr(connector, "why_unsupported", lambda *args: reason)
        options = {"num_blocks": 40, "max_num_seqs": 2, "max_num_batched_tokens": 100} | options
        return build(
            kv_transfer_config=CONNECTORS[name](), async_scheduling=True, host_blocks=100, **options
        )

    return build_full


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("name", CONNECTORS)
def test_level_0_takes_a_seat_and_answers_stay_right(build_full, name, window) -> None:
    layers = KVCacheGroupSpec(["window"], SlidingWindowSpec(**KV_SHAPE, sliding_window=WINDOW))
    scheduler = build_full(name, more_layers=[layers] if window else [])
    steps = EngineSteps(scheduler, FakeDevice(scheduler, window))
    steps.add("x", "y", urgency=4, output_tokens=60)
    steps.run(4)
    steps.add("urgent", urgency=0, output_tokens=3)
    assert steps.until_scheduled("urgent", 30) in range(AT_ONCE + 1)
    assert scheduler.counters.total("admission_preemptions") == 1
    steps.finish()
    for request in steps.requests.values():
        assert list(request.output_token_ids) == expected(request, window), request.request_id


@pytest.mark.parametrize("name", CONNECTORS)
def test_level_0_takes_blocks_and_answers_stay_right(build_full, name) -> None:
    """Seats are free, but the pool is full."""
    scheduler = build_full(name, max_num_seqs=8)
    steps = EngineSteps(scheduler, FakeDevice(scheduler))
    steps.add(*"wxyz", urgency=4, prompt_tokens=130, output_tokens=40)
    steps.run(8)
    steps.add("urgent", urgency=0, prompt_tokens=90, output_tokens=3)
    assert steps.until_scheduled("urgent", 10) in range(AT_ONCE + 1)
    assert scheduler.counters.total("admission_preemptions") >= 1
    steps.finish()
    for request in steps.requests.values():
        assert list(request.output_token_ids) == expected(request), request.request_id


def test_level_0_takes_a_seat_of_a_hybrid_model(build_full) -> None:
    state = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 1),), dtypes=(torch.float32,))
    scheduler = build_full("ours", num_blocks=200, more_layers=[KVCacheGroupSpec(["state"], state)])
    steps = EngineSteps(scheduler)
    steps.add("x", "y", urgency=4, output_tokens=60)
    steps.run(4)
    steps.add("urgent", urgency=0, output_tokens=3)
    assert steps.until_scheduled("urgent", 30) in range(AT_ONCE + 1)
    steps.finish()


def test_several_in_flight_give_way_in_one_step(build_full) -> None:
    scheduler = build_full("kv_both", max_num_seqs=6)
    steps = EngineSteps(scheduler, FakeDevice(scheduler))
    steps.add(*(f"low{number}" for number in range(6)), urgency=4, output_tokens=40)
    steps.run(4)
    names = [f"urgent{number}" for number in range(3)]
    steps.add(*names, urgency=0, output_tokens=3)
    steps.run(5)
    assert max(steps.first.get(name, 1000) for name in names) <= 4 + AT_ONCE
    steps.finish()
    for request in steps.requests.values():
        assert list(request.output_token_ids) == expected(request), request.request_id
