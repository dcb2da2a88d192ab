"""Refusal of requests inside the scheduler, without a model."""

import pytest
from vllm.pooling_params import PoolingParams
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.vllm_api import OUTPUTS_CARRY_ERRORS
from vllm_semantic_sched.lab.bench.standalone import (
    build_scheduler,
    make_request,
    model_output,
)
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine

FULL = Refusal(Code.OVER_CAPACITY, "the queue is full", 3.0)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def scheduler(request, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("predictor: {enabled: false}\n")
    settings = {"policy": str(path)}
    return build_scheduler(
        SemanticScheduler, semantic_sched=settings, async_scheduling=request.param
    )


def step(scheduler):
    """One engine step; the outputs by request."""
    arranged = scheduler.schedule()
    outputs = scheduler.update_from_output(arranged, model_output(scheduler, arranged))
    return {output.request_id: output for each in outputs.values() for output in each.outputs}


def assert_refused(output) -> None:
    assert output.finish_reason == FinishReason.ERROR
    assert Refusal.from_text(output.stop_reason) == FULL


def test_waiting_request_on_an_idle_engine_is_refused_at_once(scheduler) -> None:
    scheduler.add_request(make_request("r"))
    assert scheduler._endings.refuse("r", FULL)
    assert scheduler.has_requests()  # else the engine would not step
    assert_refused(step(scheduler)["r"])
    assert not scheduler.requests and not scheduler.jobs
    step(scheduler)
    assert not scheduler.has_requests()


def add_pooling(scheduler) -> None:
    params = PoolingParams(task="embed", extra_kwargs={"tenant": "x"})
    scheduler.add_request(Request("p", [1, 2, 3], None, params))


def test_pooling_request_is_refused_where_its_output_can_say_so(scheduler) -> None:
    add_pooling(scheduler)
    assert scheduler.jobs["p"].tenant == "x"
    assert scheduler._endings.refuse("p", FULL) == OUTPUTS_CARRY_ERRORS
    if OUTPUTS_CARRY_ERRORS:
        output = step(scheduler)["p"]
        assert_refused(output)
        assert output.error is not None and output.pooling_output.numel() == 0
    else:
        assert "p" in scheduler.requests


def test_refused_running_request_frees_its_kv(scheduler) -> None:
    scheduler.add_request(make_request("r", output_tokens=50))
    scheduler.add_request(make_request("other", output_tokens=50))
    for _ in range(3):
        step(scheduler)
    assert scheduler._endings.refuse("r", FULL)
    assert "r" not in [request.request_id for request in scheduler.running]
    outputs = step(scheduler)
    assert_refused(outputs["r"])
    while scheduler.get_num_unfinished_requests():
        outputs = step(scheduler)
        assert "r" not in outputs
    step(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_request_refused_during_schedule_ends_right_after_it(scheduler) -> None:
    scheduler.add_request(make_request("r", output_tokens=50))
    step(scheduler)

    def refuse(request, keep_kv):
        assert scheduler._endings.refuse(request.request_id, FULL)
        assert request.request_id in scheduler.requests

    scheduler.before_preemption = refuse
    # No room for another token: vLLM preempts, in the midst of its queues.
    scheduler.kv_cache_manager.allocate_slots = lambda *args, **kwargs: None
    arranged = scheduler.schedule()
    assert "r" not in scheduler.requests
    outputs = scheduler.update_from_output(arranged, model_output(scheduler, arranged))
    assert_refused(outputs[0].outputs[0])


def test_each_client_gets_its_own_refusals(scheduler) -> None:
    for client in (0, 1, 2):
        request = make_request(f"r{client}")
        request.client_index = client
        scheduler.add_request(request)
        scheduler._endings.refuse(f"r{client}", FULL)
    arranged = scheduler.schedule()
    outputs = scheduler.update_from_output(arranged, model_output(scheduler, arranged))
    for client in (0, 1, 2):
        assert [output.request_id for output in outputs[client].outputs] == [f"r{client}"]


def test_refusal_is_counted_once_by_code_and_tier(scheduler) -> None:
    scheduler.add_request(make_request("r", urgency=4))
    assert scheduler._endings.refuse("r", FULL)
    assert not scheduler._endings.refuse("r", FULL)
    assert not scheduler._endings.refuse("stranger", FULL)
    assert scheduler.counters.total("refused_requests", ("over_capacity", "4")) == 1
    assert scheduler.counters.total("ended_requests", ("4", "refused")) == 1
    assert len(step(scheduler)) == 1


def test_request_aborted_by_its_client_gets_no_answer(scheduler) -> None:
    scheduler.add_request(make_request("r"))
    scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    assert not scheduler._endings.refuse("r", FULL)
    assert step(scheduler) == {}


def test_session_with_streamed_input_is_not_refused(scheduler) -> None:
    request = make_request("r")
    request.resumable = True
    scheduler.add_request(request)
    assert not scheduler._endings.refuse("r", FULL)
