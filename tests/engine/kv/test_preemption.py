"""The swap connector under vLLM's real scheduler, with a device of plain lists: next tokens are a
function of the KV that a request's blocks hold, so wrong KV gives wrong answers."""

import logging
import random
import sys
from types import SimpleNamespace

import pytest
import torch
from failures import MAY_FAIL, method_of
from fake_device import FakeDevice, expected, swap_config
from orders import preempt
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request, RequestStatus

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.guard import guarded
from vllm_semantic_sched.engine.kv import connector
from vllm_semantic_sched.engine.kv.connector import FailedProof, SemanticSwapConnector
from vllm_semantic_sched.engine.kv.ledger import HostPool
from vllm_semantic_sched.engine.startup.settings import SWAP_CONNECTOR
from vllm_semantic_sched.engine.vllm_api import freeable_blocks
from vllm_semantic_sched.lab.bench.standalone import (
    BLOCK_SIZE,
    KV_SHAPE,
    build_scheduler,
    make_request,
    run_step,
)
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.facts.job import JobState
from vllm_semantic_sched.policy.profile import cost

pytestmark = pytest.mark.engine

BLOCKS = 40
init_none_hash(sha256)


def make_requests(
    chance: random.Random,
    count: int = 12,
    shared: int = 0,
    name: str = "r",
    longest: int = 120,
    urgent: int = 0,
) -> list[Request]:
    """Requests of which the last `urgent` are of level 0."""
    prefix = [chance.randint(1, 900) for _ in range(shared)]
    return [
        Request(
            request_id=f"{name}{index}",
            prompt_token_ids=prefix
            + [chance.randint(1, 900) for _ in range(chance.randint(5, longest))],
            sampling_params=SamplingParams(
                max_tokens=chance.randint(5, longest // 2),
                ignore_eos=True,
                extra_args={"urgency": 0} if index >= count - urgent else None,
            ),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        )
        for index in range(count)
    ]


@pytest.fixture
def build(tmp_path, monkeypatch):
    def make(mode: str = "swap", max_stall: float = 1e9, host_blocks: int = 100, **options):
        monkeypatch.setattr(cost, "MAX_STALL", max_stall)
        path = tmp_path / "policy.yaml"
        path.write_text(
            "predictor: {enabled: false}\n"
            f"retention: {{mode: {mode}}}\n"
            "preemption: {max_per_request: 1000}\n"
        )
        options = {"kv_transfer_config": swap_config()} | options
        scheduler = build_scheduler(
            SemanticScheduler,
            max_num_seqs=6,
            num_blocks=BLOCKS,
            semantic_sched={"policy": str(path)},
            max_num_batched_tokens=100,
            **options,
        )
        if scheduler.preemptions.connector is not None:
            scheduler.preemptions.connector.ledger.pool = HostPool(host_blocks)
        return scheduler

    return make


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("max_stall", [1e9, 0.0, 0.3])
@pytest.mark.parametrize("host_blocks", [100, 7])
def test_preemptions_do_not_change_answers(
    build, asynchronous, caching, max_stall, host_blocks
) -> None:
    scheduler = build(
        max_stall=max_stall,
        host_blocks=host_blocks,
        async_scheduling=asynchronous,
        prefix_caching=caching,
    )
    chance = random.Random(host_blocks)
    requests = make_requests(chance, shared=40 if caching else 0)
    forced = 0

    def preempt_some(step: int) -> None:
        nonlocal forced
        running = [r for r in scheduler.running if freeable_blocks(scheduler, r) is not None]
        # An answer has to get on between two preemptions.
        if step % (5 if asynchronous else 2) == 0 and running:
            preempt(scheduler, chance.choice(running))
            forced += 1

    device = FakeDevice(scheduler)
    answers = device.answer(requests, int(asynchronous), preempt_some)
    assert answers == {request.request_id: expected(request) for request in requests}
    assert forced > 15 and device.saves["before"] > 0 < device.saves["beside"]
    total = scheduler.counters.total
    back = sum(total(f"{what}_tokens") for what in ("loaded", "found", "recomputed", "abandoned"))
    assert total("loaded_tokens") > 0
    assert total("preempted_tokens") == back
    if host_blocks == 7:
        assert total("recomputed_tokens") > 0 < total("preemptions", ("partial", "urgent"))
    assert total("policy_errors") == 0
    assert scheduler.preemptions.connector.ledger.pool.used == 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    assert not scheduler.preemptions._away and not scheduler.preemptions.returning


_FAILING = (
    *MAY_FAIL,
    "connector.ledger.loadable",
    "connector.ledger.load_finished",
    "connector.ledger.release",
    "core.plan_preemption",
    "_endings.end_deferred",
)


def test_1000_requests_survive_failure_of_each_guarded_method(build, monkeypatch) -> None:
    scheduler = build()
    chance = random.Random(5)
    failed: set[str] = set()

    def failing(path: str, real):
        def call(*args, **kwargs):
            if chance.random() < 0.3:
                failed.add(path)
                raise RuntimeError("injected")
            return real(*args, **kwargs)

        return call

    def preempt_some(step: int) -> None:
        if step % 7 == 0 and scheduler.running:
            with scheduler.guard("preemption"):
                preempt(scheduler, chance.choice(scheduler.running))

    for number in range(40):
        requests = make_requests(chance, count=25, name=f"{number}-", longest=40, urgent=5)
        path = _FAILING[number % len(_FAILING)]
        owner, name = method_of(scheduler, path)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing(path, getattr(owner, name)))
            answers = FakeDevice(scheduler).answer(requests, 0, preempt_some, late=5)
        assert answers == {request.request_id: expected(request) for request in requests}, path
    assert failed == set(_FAILING)
    assert not scheduler.requests and not scheduler.jobs
    assert len(scheduler.core.waiting) == len(scheduler.core.running) == 0
    assert scheduler.preemptions.connector.ledger.pool.used == 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
    for name, urgency in [(f"filler {n}", 4) for n in range(8)] + [("urgent", 0)]:
        scheduler.add_request(make_request(name, urgency=urgency, output_tokens=2))
    run_step(scheduler)
    assert "urgent" in {request.request_id for request in scheduler.running}


COPYING = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "handle_preemptions"),
    *("start_load_kv", "get_finished", "build_connector_worker_meta"),
)
"""The connector's methods that vLLM calls in a step."""


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("max_stall", [1e9, 0.0])
def test_copies_that_fail_are_computed_again(
    build, monkeypatch, max_stall, asynchronous, caching
) -> None:
    """Each method fails always, and then now and then."""
    scheduler = build(
        max_stall=max_stall, async_scheduling=asynchronous, prefix_caching=caching, host_blocks=30
    )
    monkeypatch.setattr(connector.logger, "exception", lambda *args: None)
    device, chance = FakeDevice(scheduler), random.Random(7)

    def preempt_some(step: int) -> None:
        if step % 6 == 0 and scheduler.running:
            preempt(scheduler, chance.choice(scheduler.running))

    for name, share in [(name, share) for name in COPYING for share in (1.0, 0.3)]:
        method = getattr(SemanticSwapConnector, name)

        def failing(self, *args, method=method, share=share, **kwargs):
            if chance.random() < share:
                raise RuntimeError("injected")
            return method.__wrapped__(self, *args, **kwargs)

        failing.__name__ = failing.__qualname__ = name
        prefix = 40 if caching else 0
        requests = make_requests(chance, 8, prefix, name=f"{name}-{share}-", longest=80)
        with monkeypatch.context() as patch:
            broken = guarded(method.default)(failing)
            patch.setattr(SemanticSwapConnector, name, broken)
            answers = device.answer(requests, int(asynchronous), preempt_some)
        assert answers == {request.request_id: expected(request) for request in requests}, name
        halves = (scheduler.connector, device.worker)
        assert sum(half.failures[name] for half in halves), f"{name} was not called"
    last = make_requests(chance, count=1)
    assert device.answer(last, int(asynchronous), lambda step: None)
    assert scheduler.counters.total("policy_errors", "kv_load") > 0
    assert not scheduler.requests and not scheduler.jobs
    assert scheduler.preemptions.connector.ledger.pool.used == 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_copies_that_a_worker_finds_wrong_are_not_used(build, caplog) -> None:
    scheduler = build()
    # As the engine does at its start, with what each worker says.
    said = {(0, 0): None, (0, 1): FailedProof("blocks differ")}
    scheduler.connector.set_xfer_handshake_metadata_pp_aware(said)
    assert "KV swap is off" in caplog.text and "blocks differ" in caplog.text
    requests = make_requests(random.Random(2), count=8)

    def preempt_some(step: int) -> None:
        if step % 3 == 0 and scheduler.running:
            preempt(scheduler, scheduler.running[-1])

    answers = FakeDevice(scheduler).answer(requests, 0, preempt_some)
    assert answers == {request.request_id: expected(request) for request in requests}
    total = scheduler.counters.total
    assert total("loaded_tokens") == 0 < total("recomputed_tokens")
    assert scheduler.preemptions.connector is None and total("policy_errors") == 0


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("max_stall", [1e9, 0.0])
def test_smallest_host_pool_of_all_workers_counts(build, caplog, said, max_stall) -> None:
    """Also for saves that were ordered before it was known: here, all of them."""
    scheduler = build(max_stall=max_stall)
    device = FakeDevice(scheduler)
    device.worker.slots = 5
    device.worker.failed.slots = 5 if said else sys.maxsize

    def preempt_some(step: int) -> None:
        if step % 2 == 0 and scheduler.running:
            preempt(scheduler, scheduler.running[-1])

    requests = make_requests(random.Random(2), longest=80)
    answers = device.answer(requests, 0, preempt_some)
    assert answers == {request.request_id: expected(request) for request in requests}
    assert max(device.host) < 5
    pool = scheduler.preemptions.connector.ledger.pool
    assert (pool.slots, pool.used) == ((5, 0) if said else (100, 0))
    assert ("give the same host_gib" in caplog.text) == said
    assert scheduler.counters.total("loaded_tokens") > 0
    assert (scheduler.counters.total("policy_errors", "kv_load") == 0) == said
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_worker_without_room_turns_swap_off(build) -> None:
    scheduler = build()
    device = FakeDevice(scheduler)
    device.worker.slots = device.worker.failed.slots = 0
    requests = make_requests(random.Random(2), count=2)
    answers = device.answer(requests, 0, lambda step: None)
    assert answers == {request.request_id: expected(request) for request in requests}
    assert scheduler.preemptions.connector is None and scheduler.preemptions.gauges() == {}


def test_worker_says_only_that_copies_are_wrong(monkeypatch) -> None:
    worker = SimpleNamespace(slots=4, cache_config=SimpleNamespace(num_blocks=8), backend=None)
    worker._failed_proof = None
    worker.ledger = SimpleNamespace()
    worker.refuse_copies = lambda reason: SemanticSwapConnector.refuse_copies(worker, reason)
    caches = {"layer": torch.zeros(8, 2, 4, 6)}
    SemanticSwapConnector.register_kv_caches(worker, caches)
    assert worker.backend is not None
    assert SemanticSwapConnector.get_handshake_metadata(worker) is None
    worker.backend = None

    def fail(*args):
        raise RuntimeError("no copy engine")

    monkeypatch.setattr(connector, "why_wrong", fail)
    SemanticSwapConnector.register_kv_caches(worker, caches)
    assert worker.backend is None
    failure = SemanticSwapConnector.get_handshake_metadata(worker)
    assert failure == FailedProof("RuntimeError: no copy engine")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cancelling_swapped_or_loading_requests_frees_everything(build, asynchronous) -> None:
    scheduler = build(max_stall=0.0, async_scheduling=asynchronous)
    ledger = scheduler.preemptions.connector.ledger
    chance = random.Random(3)
    requests = make_requests(chance, count=16)
    cancelled = {"away": [], "loading": []}

    def disturb(step: int) -> None:
        if step % 4 == 0 and scheduler.running:
            preempt(scheduler, chance.choice(scheduler.running))
        for where, names in (("away", ledger.saved), ("loading", ledger.loading)):
            name = next((name for name in names if name not in cancelled[where]), None)
            if name is not None and len(cancelled[where]) < 4:
                scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                cancelled[where].append(name)

    answers = FakeDevice(scheduler).answer(requests, int(asynchronous), disturb)
    gone = {name for names in cancelled.values() for name in names}
    assert len(cancelled["away"]) == len(cancelled["loading"]) == 4, cancelled
    for request in requests:
        if request.request_id not in gone:
            assert answers[request.request_id] == expected(request)
    assert scheduler.counters.total("policy_errors") == 0
    assert ledger.pool.used == 0 and not ledger.loading and not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


@pytest.mark.parametrize("max_stall", [1e9, 0.0])
@pytest.mark.parametrize("caching", [False, True])
def test_sliding_window_layers_are_saved_whole_or_not_at_all(build, caching, max_stall) -> None:
    window = 40
    layers = KVCacheGroupSpec(["window"], SlidingWindowSpec(**KV_SHAPE, sliding_window=window))
    scheduler = build(
        max_stall=max_stall, host_blocks=24, prefix_caching=caching, more_layers=[layers]
    )
    chance = random.Random(5)
    requests = make_requests(chance, shared=40 if caching else 0)

    def preempt_some(step: int) -> None:
        if step % 3 == 0 and scheduler.running:
            preempt(scheduler, chance.choice(scheduler.running))

    answers = FakeDevice(scheduler, window).answer(requests, 0, preempt_some)
    assert answers == {request.request_id: expected(request, window) for request in requests}
    total = scheduler.counters.total
    assert total("preemptions", ("swap", "urgent")) > 5
    assert total("loaded_tokens") > 0 == total("preemptions", ("partial", "urgent"))
    assert total("policy_errors") == 0
    assert scheduler.preemptions.connector.ledger.pool.used == 0
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1


def test_blocks_in_the_prefix_cache_are_not_saved(build) -> None:
    """The device is nearly empty: of 120 tokens only those in the last block are worth saving."""
    scheduler = build(prefix_caching=True)
    requests = make_requests(random.Random(1), count=1, shared=100)

    def preempt_some(step: int) -> None:
        if step == 6:
            preempt(scheduler, scheduler.running[0])

    answers = FakeDevice(scheduler).answer(requests, 0, preempt_some)
    assert answers == {request.request_id: expected(request) for request in requests}
    total = scheduler.counters.total
    assert total("preempted_tokens") > 100
    assert 0 < total("saved_tokens") == total("loaded_tokens") < BLOCK_SIZE
    assert total("found_tokens") == total("preempted_tokens") - total("saved_tokens")


def warnings_at_start(make) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("vllm.semantic_sched")
    logger.addHandler(handler)
    try:
        make()
    finally:
        logger.removeHandler(handler)
    return [line for line in lines if "is recomputed" in line]


def test_reason_for_not_swapping_is_logged_once_at_start(build) -> None:
    assert warnings_at_start(build) == []
    (line,) = warnings_at_start(lambda: build(kv_transfer_config=None))
    assert "without the swap connector" in line
    assert warnings_at_start(lambda: build(mode="recompute", kv_transfer_config=None)) == []
    (line,) = warnings_at_start(lambda: build(kv_transfer_config=swap_config(host_gib=1e-10)))
    assert "host_gib" in line


def test_without_a_connector_every_plan_recomputes(build) -> None:
    scheduler = build(kv_transfer_config=None)
    add_and_preempt(scheduler, "a", times=2)
    assert scheduler.counters.total("preemptions", ("recompute", "urgent")) == 2
    assert scheduler.counters.total("saved_tokens") == 0


def add_and_preempt(scheduler, name: str, times: int, **fields) -> None:
    scheduler.add_request(make_request(name, output_tokens=50, **fields))
    for _ in range(times):
        for _ in range(3):
            run_step(scheduler)
        if name in scheduler.requests:
            preempt(scheduler, scheduler.requests[name])


def test_mistyped_pool_size_is_reported() -> None:
    with pytest.raises(PolicyError, match=r"kv_connector_extra_config.*host_gb.*'host_gib'"):
        build_scheduler(SemanticScheduler, kv_transfer_config=swap_config(host_gb=4))


def test_cache_reset_discards_all_copies(build) -> None:
    scheduler = build()
    add_and_preempt(scheduler, "a", times=1)
    job = scheduler.jobs["a"]
    assert (job.swapped, job.state) == (22, JobState.SWAPPED)
    before = scheduler.core.estimates.remaining(job)
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert (job.swapped, job.state) == (0, JobState.WAITING)
    assert scheduler.core.estimates.remaining(job) > before
    assert scheduler.counters.total("lost_copies") == 1
    assert scheduler.preemptions.connector.ledger.pool.used == 0


def test_losing_all_copies_skips_requests_that_have_ended(build, monkeypatch) -> None:
    scheduler = build()
    add_and_preempt(scheduler, "a", times=1)
    ledger = scheduler.preemptions.connector.ledger
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "release", lambda name: 1 / 0)
        scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    assert "a" in ledger.saved and "a" not in scheduler.jobs
    scheduler.preemptions.lose_copies(scheduler.jobs)
    assert ledger.pool.used == 0


def test_requests_for_prompt_logprobs_are_recomputed(build) -> None:
    """vLLM does not let them read a cache."""
    scheduler = build()
    request = make_request("a", output_tokens=50)
    request.skip_reading_prefix_cache = True
    scheduler.add_request(request)
    run_step(scheduler)
    preempt(scheduler, request)
    assert scheduler.counters.total("preemptions", ("recompute", "urgent")) == 1


def test_request_not_worth_another_preemption_is_ended(tmp_path) -> None:
    path = tmp_path / "drop.yaml"
    path.write_text(
        "predictor: {enabled: false}\nlevels: 2\ndefault_level: 1\nretention: {mode: recompute}\n"
        "hints: {most_urgent_level: 0}\n"
        "tiers: [{name: gold}, {name: bronze, drop: true}]\n"
    )
    scheduler = build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)})
    add_and_preempt(scheduler, "a", times=9, prompt_tokens=600)
    total = scheduler.counters.total
    assert total("refused_requests", ("dropped", "bronze")) == 1
    assert total("preemptions", ("drop", "urgent")) == 1
    assert 1 <= total("preemptions", ("recompute", "urgent")) < 8
    run_step(scheduler)
    assert not scheduler.requests and total("policy_errors") == 0


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("unsupported", [None, "speculative decoding is on"])
def test_urgent_request_preempts_at_once_beside_a_step_in_flight(
    build, monkeypatch, inside, unsupported
) -> None:
    """vLLM must not delay freeing blocks for our connector, alone or among several, in use or
    not."""
    if unsupported is not None:
        monkeypatch.setattr(connector, "why_unsupported", lambda *args: unsupported)
    swap = KVTransferConfig(**SWAP_CONNECTOR)
    if inside:
        swap = KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_producer",
            kv_connector_extra_config={"connectors": [SWAP_CONNECTOR]},
        )
    scheduler = build(async_scheduling=True, kv_transfer_config=swap)
    for index in range(6):
        scheduler.add_request(make_request(f"calm{index}", prompt_tokens=9, urgency=4))
    scheduler.schedule()
    scheduler.add_request(make_request("urgent", urgency=0, output_tokens=3))
    assert "urgent" in scheduler.schedule().num_scheduled_tokens
