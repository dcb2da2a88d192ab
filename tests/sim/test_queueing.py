"""The engine model against queueing theory."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import make_job

from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.decoding import Decoding
from vllm_semantic_sched.sim.request import Run, SimRequest
from vllm_semantic_sched.sim.scenario import parse_scenarios
from vllm_semantic_sched.sim.simulation import simulate


def test_fcfs_on_one_seat_is_an_m_d_1_queue() -> None:
    load = 0.3
    scenario = parse_scenarios(
        {
            "workload": {
                "arrivals": "poisson",
                "requests": 20_000,
                "rate": 1.0,  # set below
                "prompt": {"value": 100},
                "output": {"value": 1},
            },
            "engine": {"kind": "paper", "seats": 1},
            "schedulers": {"fcfs": {"policy": "fcfs"}},
        },
        "M/D/1",
    )[0]
    profile = scenario.profile
    service = profile.prefill(0, 100)
    workload = scenario.settings.workload.model_copy(update={"rate": load / service})
    settings = scenario.settings.model_copy(update={"workload": workload})
    scenario = replace(scenario, settings=settings)
    runs = simulate(scenario, "fcfs").runs
    waits = np.array([run.started - run.request.arrival for run in runs])

    # Lindley: each waits for the unfinished work of the one before it.
    expected, previous = [0.0], runs[0].request.arrival
    for run in runs[1:]:
        gap = run.request.arrival - previous
        expected.append(max(0.0, expected[-1] + service - gap))
        previous = run.request.arrival
    assert waits == pytest.approx(np.array(expected), abs=1e-6)
    # Pollaczek and Khinchine: load * service / (2 (1 - load)).
    assert waits.mean() == pytest.approx(load * service / (2 * (1 - load)), rel=0.02)
    assert waits.mean() == pytest.approx(np.mean(expected), rel=1e-6)


def test_single_request_takes_the_time_of_the_profile(scenario) -> None:
    alone = {
        "workload__requests": 1,
        "workload__prompt": {"value": 50},
        "workload__output": {"value": 11},
    }
    paper = scenario(engine={"kind": "paper", "seats": 4}, **alone)
    run = simulate(paper, "semantic").runs[0]
    profile = paper.profile
    assert run.first_token - run.started == pytest.approx(profile.prefill(0, 50))
    assert run.finish - run.first_token == pytest.approx(profile.decode(51, 10), rel=1e-6)

    batch = {"step": 0.01, "per_sequence": 0.001, "per_context_token": 1e-5}
    engine = {"kind": "vllm", "seats": 4, "token_budget": 20, "batch": batch}
    vllm = scenario(engine=engine, **alone)
    run = simulate(vllm, "semantic").runs[0]
    prefill = 3 * 0.011 + profile.prefill(0, 50)  # 20 + 20 + 10
    assert run.first_token - run.started == pytest.approx(prefill)
    context = sum(range(51, 61))
    assert run.finish - run.first_token == pytest.approx(10 * 0.011 + 1e-5 * context)


def test_step_cost_counts_all_contexts_of_the_batch(scenario) -> None:
    engine = {"kind": "vllm", "seats": 8, "batch": {"step": 0.01, "per_context_token": 1e-5}}
    burst = {"arrivals": "bursts", "max_burst": 30, "requests": 8}
    lengths = {"prompt": {"value": 50}, "output": {"value": 11}}
    runs = simulate(scenario(engine=engine, workload=burst | lengths), "semantic").runs
    together = [run for run in runs if run.first_token == runs[0].first_token]
    assert len(together) > 1
    context = len(together) * sum(range(51, 61))
    assert runs[0].finish - runs[0].first_token == pytest.approx(10 * 0.01 + 1e-5 * context)


@given(st.lists(st.tuples(st.integers(1, 90), st.integers(2, 9), st.booleans()), max_size=40))
def test_context_is_the_sum_over_the_decoding_sequences(arrivals) -> None:
    decoding = Decoding(BlockPool(None, 16), find_longest=False)
    runs = []
    for prompt, output, leaves in arrivals:
        job = make_job(prompt_tokens=prompt)
        job.generated = 1
        runs.append(Run(SimRequest(len(runs), 0.0, 0, prompt, output), job, None))
        decoding.add(runs[-1])
        if leaves:
            decoding.discard(runs[len(runs) // 2])
        decoding.advance()
        alive = [run for run in runs if run in decoding]
        for run in alive:
            decoding.observe(run)
        assert decoding.context == sum(run.job.tokens for run in alive)
