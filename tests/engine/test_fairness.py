"""Aging, shares, tenants and reservations in vLLM's scheduler, without a model."""

import itertools
from collections import Counter, deque
from functools import partial

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.request import RequestStatus

from vllm_semantic_sched import SemanticScheduler
from vllm_semantic_sched.engine.clock import replace_clock
from vllm_semantic_sched.lab.bench.overhead import ALL_FEATURES
from vllm_semantic_sched.lab.bench.standalone import (
    BLOCK_SIZE,
    build_scheduler,
    make_request,
    model_output,
    run_step,
)
from vllm_semantic_sched.policy.config.section import PolicyError
from vllm_semantic_sched.policy.overload.refusal import Code, Refusal

pytestmark = pytest.mark.engine


@pytest.fixture
def build(tmp_path):
    """A scheduler under a policy, given as keys."""

    def make(policy, **options):
        path = tmp_path / "policy.yaml"
        path.write_text(yaml.safe_dump({"predictor": {"enabled": False}} | policy))
        return build_scheduler(SemanticScheduler, semantic_sched={"policy": str(path)}, **options)

    return make


def add(scheduler, *names: str, **fields) -> None:
    for name in names:
        scheduler.add_request(make_request(name, **fields))


def running(scheduler) -> set[str]:
    return {request.request_id for request in scheduler.running}


def finish_all(scheduler, limit: int = 5000) -> None:
    for _ in range(limit):
        if not scheduler.get_num_unfinished_requests():
            break
        run_step(scheduler)
    run_step(scheduler)
    assert not scheduler.requests and not scheduler.jobs
    assert scheduler.counters.total("policy_errors") == 0
    allocations = scheduler.core.allocations
    assert not len(scheduler.core.seating.meter) and not len(allocations)
    assert all(held.seats == held.blocks == 0 for held in allocations.levels)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def three_tiers(**reserve):
    tiers = [{"name": "a", "reserve": reserve}, {"name": "b"}, {"name": "c"}]
    return {"levels": 3, "default_level": 1, "tiers": tiers}


def test_reserved_seats_stay_free_until_needed(build) -> None:
    scheduler = build(three_tiers(seats=2), max_num_seqs=4)
    add(scheduler, *"pqrst", urgency=2, output_tokens=30)
    run_step(scheduler)
    assert running(scheduler) == {"p", "q"}
    assert len(scheduler.waiting) == 3 and not scheduler.waiting  # none may come in
    assert scheduler.get_request_counts() == (2, 3)
    add(scheduler, "urgent", "pressing", urgency=0, output_tokens=5)
    run_step(scheduler)
    assert running(scheduler) == {"p", "q", "urgent", "pressing"}
    assert scheduler.counters.total("preemptions") == 0
    finish_all(scheduler)


def test_middle_tier_preempts_the_last_tier_beside_a_reservation(build) -> None:
    scheduler = build(three_tiers(seats=2), max_num_seqs=4)
    add(scheduler, *"pq", urgency=2, output_tokens=30)
    run_step(scheduler)
    add(scheduler, "middle", urgency=1, output_tokens=5)
    run_step(scheduler)
    assert "middle" in running(scheduler) and len(scheduler.running) == 2
    finish_all(scheduler)


def test_growing_requests_never_hold_reserved_blocks(build) -> None:
    scheduler = build(three_tiers(kv=0.5), max_num_seqs=8, num_blocks=41)
    add(scheduler, *"pqrst", urgency=2, prompt_tokens=40, output_tokens=150)
    for _ in range(400):
        run_step(scheduler)
        blocks = [-(-request.num_computed_tokens // BLOCK_SIZE) for request in scheduler.running]
        assert sum(blocks) <= 20 or len(blocks) == 1
    finish_all(scheduler)


def test_soft_reservation_is_lent_and_reclaimed(build) -> None:
    policy = three_tiers(seats=2, mode="soft")
    policy["preemption"] = {"max_per_request": 0}
    scheduler = build(policy, max_num_seqs=4)
    add(scheduler, *"pqrst", urgency=2, output_tokens=50)
    run_step(scheduler)
    assert len(scheduler.running) == 4
    add(scheduler, "u1", "u2", "u3", urgency=0, output_tokens=5)
    run_step(scheduler)
    assert {"u1", "u2"} < running(scheduler) and "u3" not in running(scheduler)
    finish_all(scheduler)


def test_reservation_larger_than_the_engine_stops_the_start(build) -> None:
    with pytest.raises(PolicyError, match=r"tiers\.0\.reserve.*the engine has 4 seats"):
        build(three_tiers(seats=4), max_num_seqs=4)


def test_background_is_served_under_permanent_premium_load(build, request) -> None:
    now = 0.0
    replace_clock(lambda: now)
    request.addfinalizer(partial(replace_clock, None))
    policy = {"base": "priority", "aging": {"enabled": True, "interval": 0.02}}
    for enabled in (True, False):
        policy["aging"]["enabled"] = enabled
        scheduler = build(policy, max_num_seqs=2)
        add(scheduler, *(f"first {n}" for n in range(10)), urgency=0, output_tokens=3)
        add(scheduler, "background", urgency=4, output_tokens=3)
        for number in range(300):
            add(scheduler, f"premium {number}", urgency=0, output_tokens=3)
            now += 0.01
            run_step(scheduler)
        assert ("background" not in scheduler.requests) == enabled
        assert scheduler.counters.total("policy_errors") == 0


def test_flood_of_one_tenant_leaves_the_next_seat_to_another(build) -> None:
    for fair in (True, False):
        scheduler = build({"base": "priority", "tenants": {"fair": fair}}, max_num_seqs=2)
        add(scheduler, *(f"f{n}" for n in range(40)), urgency=2, tenant="flood", output_tokens=4)
        for _ in range(6):
            run_step(scheduler)
        add(scheduler, "other", urgency=2, tenant="quiet", output_tokens=4)
        for _ in range(12):
            run_step(scheduler)
        assert ("other" not in scheduler.requests) == fair
        finish_all(scheduler)


def test_tenants_are_capped_at_their_share_of_the_top_level(build) -> None:
    top = {"share": 0.1}
    scheduler = build({"tenants": {"top": top}}, max_num_seqs=8)
    add(scheduler, *"abcdefgh", urgency=0, tenant="greedy")
    add(scheduler, "modest", urgency=0, tenant="modest")
    levels = {name: job.level for name, job in scheduler.jobs.items()}
    assert levels == dict.fromkeys([*"abcde", "modest"], 0) | dict.fromkeys("fgh", 1)
    run_step(scheduler)
    assert scheduler.gauges()
    assert scheduler.counters.total("capped_requests") == 3
    finish_all(scheduler)


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.integers(1, 90), st.integers(1, 60)),
        st.tuples(st.just("abort"), st.integers(0, 50)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("later"), st.floats(0.1, 5.0)),
        st.tuples(st.just("adopt"), st.booleans()),
    ),
    max_size=40,
)


@settings(max_examples=40)
@given(events, st.booleans())
def test_random_traffic_with_all_features_frees_everything(tmp_path_factory, events, ahead) -> None:
    path = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy = yaml.safe_load(ALL_FEATURES.read_text())
    tiers = policy["tiers"]
    tiers[0]["reserve"], tiers[3]["reserve"] = {"seats": 1, "kv": 0.2}, {"seats": 1, "mode": "soft"}
    path.write_text(yaml.safe_dump(policy | {"predictor": {"enabled": False}}))
    scheduler = build_scheduler(
        SemanticScheduler,
        semantic_sched={"policy": str(path)},
        max_num_seqs=4,
        num_blocks=24,
        max_num_batched_tokens=128,
        async_scheduling=ahead,
    )
    core, skipped = scheduler.core, [0.0]
    clock = scheduler.clock.seconds
    scheduler.clock.seconds = lambda: clock() + skipped[0]
    policies = [core.policy, core.policy.model_copy(update={"aging": core.policy.aging.model_copy(
        update={"enabled": False})})]  # fmt: skip
    in_flight = deque()

    def step() -> None:
        output = scheduler.schedule()
        in_flight.append((output, model_output(scheduler, output)))
        while len(in_flight) > ahead:
            scheduler.update_from_output(*in_flight.popleft())
        others = [job for job in core.running if job.level > 0]
        assert len(others) <= 3

    for number, (kind, *values) in enumerate(events):
        if kind == "add":
            level, prompt, output = values
            add(scheduler, str(number), urgency=level, prompt_tokens=prompt,
                output_tokens=output, tenant="xyz"[number % 3])  # fmt: skip
        elif kind == "abort" and scheduler.requests:
            names = list(scheduler.requests)
            scheduler.finish_requests(names[values[0] % len(names)], RequestStatus.FINISHED_ABORTED)
        elif kind == "step":
            for _ in range(values[0]):
                step()
        elif kind == "later":
            skipped[0] += values[0]
        elif kind == "adopt":
            core.switch(policies[values[0]], core.profile)
    for _ in range(3000):
        if not scheduler.get_num_unfinished_requests():
            break
        step()
    while in_flight:
        scheduler.update_from_output(*in_flight.popleft())
    finish_all(scheduler)


def test_shares_converge_and_only_pressure_refuses(request) -> None:
    """The shipped policy `shares`: each tier keeps as many requests in flight as its share allows,
    then background far more."""
    now, number = 0.0, itertools.count()
    replace_clock(lambda: now)  # also for the steps' durations
    request.addfinalizer(partial(replace_clock, None))
    scheduler = build_scheduler(
        SemanticScheduler, semantic_sched={"policy": "shares"}, max_num_seqs=3
    )
    ended: Counter = Counter()

    def run(in_flight: tuple[int, int, int], steps: int) -> None:
        nonlocal now
        for _ in range(steps):
            now += 0.02
            waiting = Counter(job.level for job in scheduler.jobs.values())
            for tier, most in enumerate(in_flight):
                for _ in range(most - waiting[tier]):
                    name = f"{tier} {next(number)}"
                    scheduler.add_request(make_request(name, urgency=tier, output_tokens=20))
            arranged = scheduler.schedule()
            outputs = scheduler.update_from_output(arranged, model_output(scheduler, arranged))
            for output in (one for each in outputs.values() for one in each.outputs):
                if output.finish_reason is not None:
                    refusal = Refusal.from_text(output.stop_reason)
                    tier = int(output.request_id.split()[0])
                    ended[tier, refusal and refusal.code] += 1

    run((0, 0, 2), steps=200)  # background has all of the work, and the engine is not full
    assert set(ended) == {(2, None)} and not scheduler.gauges()["pressure"]
    run((10, 7, 3), steps=1500)  # longer than the 20 seconds whose use counts
    ended.clear()
    run((10, 7, 3), steps=1500)
    served = [ended[tier, None] for tier in range(3)]
    shares = [count / sum(served) for count in served]
    assert shares == pytest.approx([0.5, 0.35, 0.15], abs=0.04)
    ended.clear()
    run((2, 2, 14), steps=100)
    assert scheduler.gauges()["pressure"] == 2
    assert ended[2, Code.TIER_OVER_SHARE] > 0 and not ended[0, Code.TIER_OVER_SHARE]
    run((0, 0, 2), steps=400)
    ended.clear()
    run((0, 0, 2), steps=200)
    assert set(ended) == {(2, None)}
    assert scheduler.counters.total("policy_errors") == 0
