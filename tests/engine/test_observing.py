"""Observing leaves vLLM's own scheduler alone: the same outputs, step by step, without a model."""

import json
import random
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.http import commands
from vllm_semantic_sched.engine.http.preparation import PreviewRules
from vllm_semantic_sched.lab.bench.standalone import (
    BLOCK_SIZE,
    build_scheduler,
    make_request,
    model_output,
    read_texts,
    run_step,
)

pytestmark = pytest.mark.engine

HINTS_ONLY = "predictor: {enabled: false}\n"


@pytest.fixture
def file(tmp_path):
    """A policy that observes and writes an event log."""
    path = tmp_path / "policy.yaml"
    path.write_text(f"observe: true\nevents: {{path: {tmp_path / 'events.jsonl'}}}\n")
    return path


def build(file, **options):
    return build_scheduler(SemanticScheduler, semantic_sched={"policy": str(file)}, **options)


def lines(file) -> list[dict]:
    return [json.loads(line) for line in file.with_name("events.jsonl").read_text().splitlines()]


def outcome(scheduler, step) -> tuple:
    """All that a step decided, and the order that it left behind."""
    return (
        list(step.num_scheduled_tokens.items()),
        [(one.req_id, one.num_computed_tokens, one.block_ids) for one in step.scheduled_new_reqs],
        list(step.scheduled_cached_reqs.req_ids),
        sorted(step.scheduled_cached_reqs.resumed_req_ids),
        sorted(step.preempted_req_ids or ()),
        sorted(step.finished_req_ids),
        [request.request_id for request in scheduler.running],
        [request.request_id for request in scheduler.waiting],
    )


def serve(scheduler, seed: int, in_flight: int) -> list[tuple]:
    """Random traffic of all levels that fills seats and KV cache, with clients that leave."""
    rng = random.Random(seed)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    outcomes, steps, sent = [], [], 0
    while sent < 80 or scheduler.get_num_unfinished_requests():
        for _ in range(rng.choice([0, 0, 1, 2])):
            if sent < 80:
                hint = rng.choice([None, 0, 2, 4])
                priority = rng.choice([0, 0, 1])
                request = make_request(
                    f"r{sent}",
                    prompt_tokens=rng.randint(5, 90),
                    output_tokens=rng.randint(1, 60),
                    urgency=hint,
                    priority=priority,
                    arrival_time=sent,  # vLLM's own priority policy looks at it
                    block_hasher=hasher,
                )
                getattr(scheduler, "preprocess_request", lambda request: None)(request)
                scheduler.add_request(request)
                sent += 1
        if rng.random() < 0.05 and scheduler.requests:
            leaver = rng.choice(sorted(scheduler.requests))
            scheduler.finish_requests(leaver, RequestStatus.FINISHED_ABORTED)
        step = scheduler.schedule()
        outcomes.append(outcome(scheduler, step))
        steps.append((step, model_output(scheduler, step)))
        while len(steps) > in_flight:
            scheduler.update_from_output(*steps.pop(0))
    return outcomes


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("own_policy", ["fcfs", "priority"])
def test_outputs_equal_those_of_vllms_own_scheduler(file, asynchronous, own_policy) -> None:
    seed = 2 * asynchronous + (own_policy == "fcfs")
    options = {
        "max_num_seqs": 6, "num_blocks": 24, "max_num_batched_tokens": 128,
        "async_scheduling": asynchronous, "policy": own_policy,
        "prefix_caching": own_policy == "fcfs",
    }  # fmt: skip
    stock = build_scheduler(SemanticScheduler, semantic_sched={"policy": "fcfs"}, **options)
    observing = build(file, **options)
    read_texts(observing)
    assert not isinstance(stock, SemanticScheduler) and isinstance(stock, Scheduler)
    assert isinstance(observing, SemanticScheduler) and type(observing.waiting) is type(
        stock.waiting
    )
    expected = serve(stock, seed, in_flight=int(asynchronous))
    assert serve(observing, seed, in_flight=int(asynchronous)) == expected
    assert sum(len(step[4]) for step in expected) > 5  # preempted, else equality would say little
    observing.gauges()
    totals = observing.counters
    assert totals.total("policy_errors") == 0
    assert totals.total("requests") == 80 and totals.total("predictions") > 10
    assert totals.total("preemptions") == sum(len(step[4]) for step in expected)
    observing.shutdown()
    assert not observing.jobs and not len(observing.core.running)
    assert not observing.applier.gate._stale  # what vLLM preempted is not kept
    states = Counter(line["state"] for line in lines(file) if "state" in line)
    ended = ("completed", "cancelled")
    assert sum(states[state] for state in ended) == 80 and states["running"] >= 60


def test_observed_decode_step_calls_little_of_ours(file) -> None:
    """Calls of Python functions of this package in a step of 16 decodes with 100 waiting."""
    scheduler = build(file, max_num_seqs=16, num_blocks=1000)
    read_texts(scheduler)
    for number in range(116):
        scheduler.add_request(make_request(f"r{number}", output_tokens=2000))
    for _ in range(30):
        run_step(scheduler)
    calls: Counter[str] = Counter()

    def count(frame, event, argument) -> None:
        if event == "call" and "vllm_semantic_sched" in frame.f_code.co_filename:
            calls[frame.f_code.co_name] += 1

    for _ in range(50):
        step = scheduler.schedule  # counts our part of both halves of a step
        sys.setprofile(count)
        output = step()
        sys.setprofile(None)
        answer = model_output(scheduler, output)
        sys.setprofile(count)
        scheduler.update_from_output(output, answer)
        sys.setprofile(None)
    scheduler.shutdown()
    assert sum(calls.values()) / 50 < 50, calls.most_common(12)


def test_order_changes_hands_without_a_restart(tmp_path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(HINTS_ONLY + "observe: true\n")
    scheduler = build(file, max_num_seqs=2)

    def reload(text: str) -> None:
        file.write_text(HINTS_ONLY + text)
        commands.run(scheduler, "load_policy").result(timeout=120)
        assert commands.run(scheduler, "adopt_policy")["result"] == "adopted"

    def running() -> set[str]:
        return {request.request_id for request in scheduler.running}

    for name, level in (("a", 4), ("b", 4), ("c", 3), ("d", 0)):
        scheduler.add_request(make_request(name, urgency=level, output_tokens=60))
    run_step(scheduler)
    assert running() == {"a", "b"}
    reload("")
    run_step(scheduler)
    assert running() == {"c", "d"}
    assert scheduler.running[0].request_id == "d"
    reload("observe: true\n")
    scheduler.add_request(make_request("e", urgency=0, output_tokens=60))
    run_step(scheduler)
    assert running() == {"c", "d"}  # nobody is preempted
    assert [request.request_id for request in scheduler.waiting] == ["a", "b", "e"]
    while scheduler.get_num_unfinished_requests():
        run_step(scheduler)
    assert scheduler.counters.total("policy_errors") == 0
    assert not scheduler.jobs and not len(scheduler.core.waiting)
    scheduler.shutdown()


def test_http_server_keeps_the_order_of_arrival(file) -> None:
    server = SimpleNamespace(get_scheduler_cls=lambda: SemanticScheduler)
    settings = {"semantic_sched": {"policy": str(file)}}
    config = SimpleNamespace(scheduler_config=server, additional_config=settings)
    assert PreviewRules.load(config) is None
    file.write_text(HINTS_ONLY)
    assert PreviewRules.load(config) is not None
