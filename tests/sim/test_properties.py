"""Properties of every simulation, for any load, engine and policy."""

from collections import Counter
from typing import Any

import pytest
from drive import seats_of
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.order.inversions import InversionCause, Inversions
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.metrics import Recorder
from vllm_semantic_sched.sim.scenario import Scenario, parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate
from vllm_semantic_sched.sim.snapshot import EngineSnapshot
from vllm_semantic_sched.sim.workload import WorkloadError

POLICIES = ["fcfs", "sjf", "priority", "ems", "latency", "throughput", "fairness"]


@st.composite
def limits(draw: st.DrawFn) -> dict[str, Any]:
    """Keys of a policy that refuses some requests, or none."""
    if draw(st.booleans()):
        return {}
    return {
        "admission": {
            "queue": {
                "requests": draw(st.integers(1, 10)),
                "timeout": draw(st.sampled_from([0.5, 5.0])),
            },
        }
    }


@st.composite
def scenarios(draw: st.DrawFn, **fixed: Any) -> Scenario:
    kind = draw(st.sampled_from(["paper", "vllm"]))
    data = {
        "seed": draw(st.integers(0, 999)),
        "workload": {
            "arrivals": draw(st.sampled_from(["bursts", "poisson", "gamma"])),
            "requests": draw(st.integers(1, 40)),
            "rate": draw(st.sampled_from([0.5, 5.0, 50.0])),
            "max_burst": draw(st.integers(1, 20)),
            "prompt": {"kind": "uniform", "low": 1, "high": draw(st.integers(1, 300))},
            "output": {"kind": "uniform", "low": 1, "high": draw(st.integers(1, 60))},
            "hints": draw(st.booleans()),
        },
        "predictor": {
            "latency": draw(st.sampled_from([0.0, 0.01, 1.0])),
            "urgency_error": draw(st.sampled_from([0.0, 0.4])),
            "hold": draw(st.booleans()),
            "mode": draw(st.sampled_from(["immediate", "full_batching"])),
            "max_batch": draw(st.integers(1, 8)),
        },
        "engine": {
            "kind": kind,
            "seats": draw(st.integers(1, 6)),
            "token_budget": draw(st.sampled_from([8, 64, 2048])),
            "block_size": draw(st.sampled_from([1, 16])),
            "kv_blocks": draw(st.sampled_from([None, 400])),
            "swap": draw(st.booleans()),
        },
        "schedulers": {"it": {"policy": draw(st.sampled_from(POLICIES)), **draw(limits())}},
    }
    return parse_scenarios(data, "property", fixed)[0]


def check_capacity(engine: Engine) -> None:
    held = sum(EngineSnapshot(engine).freeable_blocks(job) for job in engine.running)
    assert len(engine.running) <= engine.seats
    assert held + engine.pool.free == engine.pool.total
    assert engine.pool.free >= 0
    for job in engine.running:
        assert not engine.pool.limited or EngineSnapshot(engine).freeable_blocks(
            job
        ) >= engine.pool.needed(job.computed)
    orders = [engine.core.running.order(job) for job in engine.running]
    assert orders == sorted(orders)


@settings(max_examples=40)
@given(scenarios())
def test_every_request_ends_once_and_capacity_is_kept(scenario: Scenario) -> None:
    result = simulate(scenario, "it", keep_seats=True, before_step=check_capacity)
    assert [run.request.index for run in result.runs] == list(
        range(scenario.settings.workload.requests or 0)
    )
    bounded = "admission" in scenario.settings.schedulers["it"]
    for run in result.runs:
        request = run.request
        if run.refused:
            assert bounded and run.finish is None and run.blocks == 0
            assert "finish" not in [seat.end_kind for seat in run.spans]
            continue
        assert run.started is not None and run.first_token is not None and run.finish is not None
        assert request.arrival <= run.started < run.first_token <= run.finish
        assert run.job.generated == request.output_tokens
        assert run.blocks == 0 and run.offset is None
        kinds = [seat.end_kind for seat in seats_of(run)]
        assert kinds.count("finish") == 1 and kinds[-1] == "finish"
        assert kinds.count("recompute") == run.recomputes and kinds.count("swap") == run.swaps
        assert run.swaps == 0 or scenario.settings.engine.swap


@settings(max_examples=25)
@given(
    scenarios(
        **{
            "schedulers": {"it": {"policy": "ems"}},
            "overrides": {
                "preemption": {"max_per_request": 99},
            },
            "workload.hints": True,
            "engine.token_budget": 100_000,
        }
    )
)
def test_no_urgent_request_waits_for_a_less_urgent_seat(scenario: Scenario) -> None:
    def check(engine: Engine) -> None:
        waiting = engine.core.waiting.peek()
        if waiting is None or waiting.level > 0:
            return
        lesser = [job for job in engine.running if job.level > waiting.level]
        blocks = engine.pool.free + sum(
            EngineSnapshot(engine).freeable_blocks(job) for job in lesser
        )
        assert not lesser or blocks < engine.pool.needed(waiting.tokens)

    simulate(scenario, "it", before_step=check)


@settings(max_examples=60)
@given(scenarios())
def test_inversions_break_the_orders(scenario: Scenario) -> None:
    seated: dict[str, int] = {}

    def seat(self: Inversions, job: Job) -> None:
        seated[job.request_id] = len(seated)
        record(self, job)

    recorder = Recorder(scenario.slos("it"))
    with pytest.MonkeyPatch.context() as patch:
        record = Inversions._seated
        patch.setattr(Inversions, "_seated", seat)
        runs = simulate(scenario, "it").runs
    served = [run for run in runs if run.started is not None]
    for run in served:
        later = [
            other
            for other in served
            if other.request.index > run.request.index and other.request.level > run.request.level
        ]
        inverted = any(seated[o.job.request_id] < seated[run.job.request_id] for o in later)
        assert (run.seat_inversion is not None) == inverted
        if scenario.settings.workload.hints:
            assert run.seat_inversion not in (InversionCause.UNREAD, InversionCause.MISREAD)
    finished = [run for run in served if run.finish is not None]
    for run in finished:
        inverted = any(  # eq. 2 as printed, negated
            other.finish < run.finish
            and not (other.finish < run.job.arrival or other.request.level <= run.request.level)
            for other in finished
        )
        assert run.finish_inversion == inverted
    for run in finished:
        recorder.add(run)
    if finished:
        row = recorder.levels()["all"]
        counts = Counter(run.seat_inversion for run in finished)
        assert row["seat_order_violations"] == pytest.approx(1 - counts[None] / len(finished))
        violations = sum(run.finish_inversion for run in finished) / len(finished)
        assert row["finish_order_violations"] == pytest.approx(violations)
        for cause in InversionCause:
            share = row[f"seat_order_{cause.value}"]
            assert share == pytest.approx(counts[cause] / len(finished))


def test_request_that_never_fits_is_rejected(scenario) -> None:
    with pytest.raises(WorkloadError, match="request 0 needs"):
        simulate(scenario(engine__kv_blocks=2, workload__prompt={"value": 500}), "semantic")


@given(scenarios())
@settings(max_examples=60)
def test_skipping_steps_gives_the_same_result(scenario: Scenario) -> None:
    one_by_one = simulate(scenario, "it", before_step=lambda engine: None)
    at_once = simulate(scenario, "it")
    assert at_once.steps == one_by_one.steps
    for mine, theirs in zip(at_once.runs, one_by_one.runs, strict=True):
        assert (mine.finish is None) == (theirs.finish is None)
        assert mine.finish is None or abs(mine.finish - theirs.finish) < 1e-6
        assert (mine.swaps, mine.recomputes) == (theirs.swaps, theirs.recomputes)
