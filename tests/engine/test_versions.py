"""Differences between vLLM's releases: capabilities, and what they are used for."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from vllm_semantic_sched import Refusal, SemanticScheduler, refusal_of
from vllm_semantic_sched.engine.vllm_api import call_engines
from vllm_semantic_sched.engine.vllm_api.capabilities import find_carrier
from vllm_semantic_sched.lab.bench.standalone import (
    build_scheduler,
    make_request,
    model_output,
    run_step,
)
from vllm_semantic_sched.policy.overload.refusal import Code

pytestmark = pytest.mark.engine

POLICY = "predictor: {enabled: false}\nprotect: {level: 0}\n"


@pytest.fixture
def scheduler(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(POLICY)
    settings = {"policy": str(path), "profile": "cpu-2core-tiny"}
    return build_scheduler(SemanticScheduler, semantic_sched=settings)


def stepped(scheduler, **arguments) -> set[str]:
    output = scheduler.schedule(**arguments)
    scheduler.update_from_output(output, model_output(scheduler, output))
    return set(output.num_scheduled_tokens)


@pytest.mark.parametrize(
    ("fields", "carrier"),
    [
        (["waiting_lora_adapters", "num_kv_fetch_reqs_by_stage"], "num_kv_fetch_reqs_by_stage"),
        (["waiting_lora_adapters"], "waiting_lora_adapters"),
        (["num_running_reqs"], None),
    ],
)
def test_carrier_of_statistics_is_a_field_that_exists(fields, carrier) -> None:
    statistics = dataclasses.make_dataclass("Statistics", [(name, dict) for name in fields])
    assert find_carrier(statistics) == carrier


def test_refusal_reaches_the_client_of_an_api_server(scheduler) -> None:
    """Through vLLM's own output processor, which returns an output or raises an error."""
    full = Refusal(Code.OVER_CAPACITY, "The queue is full.", 3.0)
    params = SamplingParams(max_tokens=5, detokenize=False, output_kind=RequestOutputKind.DELTA)
    new = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    new.external_req_id = "r"
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    queue = RequestOutputCollector(params.output_kind, "r")
    processor.add_request(new, None, queue=queue)
    scheduler.add_request(make_request("r"))
    assert scheduler._endings.refuse("r", full)
    output = scheduler.schedule()
    (outputs,) = scheduler.update_from_output(output, model_output(scheduler, output)).values()
    processor.process_outputs(outputs.outputs)
    try:
        received = queue.get_nowait()
    except Exception as error:
        received = error
    assert refusal_of(received) == full
    assert not processor.has_unfinished_requests()


def test_protected_prefill_is_not_put_off(scheduler) -> None:
    """Neither by ranks that prefill together nor by `prefill_schedule_interval`."""
    scheduler.add_request(make_request("background", urgency=4, output_tokens=50))
    run_step(scheduler)
    if hasattr(scheduler, "local_prefill_interval"):
        scheduler.local_prefill_interval = 1000
        throttled = {}
    else:
        throttled = {"throttle_prefills": True}
    scheduler.add_request(make_request("other", urgency=4))
    for _ in range(3):
        assert stepped(scheduler, **throttled) == {"background"}
    scheduler.add_request(make_request("urgent", urgency=0))
    assert "urgent" in stepped(scheduler, **throttled)


def test_utility_calls_reach_all_engines(unhooked) -> None:
    calls = []

    async def one(method, *args, engine):
        calls.append((engine, method, *args))
        return engine

    older = SimpleNamespace(core_engines=["a", "b"], _call_utility_async=one)
    client = SimpleNamespace(engine_core=older)
    assert asyncio.run(call_engines(client, "semsched", "status")) == ["a", "b"]
    assert calls == [("a", "semsched", "status"), ("b", "semsched", "status")]

    async def every(method, *args):
        return [(method, *args)]

    client = SimpleNamespace(engine_core=SimpleNamespace(call_utility_all_async=every))
    assert asyncio.run(call_engines(client, "semsched", "status")) == [("semsched", "status")]
