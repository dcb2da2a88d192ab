"""vLLM's engine core on the emulated device, in virtual time."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from virtual_runs import SHORT_LOAD as LOAD

from vllm_semantic_sched.lab.bench.prompts import SHORT
from vllm_semantic_sched.lab.device.load import LoadConfig, draw_load
from vllm_semantic_sched.lab.device.remote import REMOTE_CONNECTOR
from vllm_semantic_sched.lab.device.virtual import VirtualRun, run_virtual

pytestmark = pytest.mark.engine

# Few blocks, so that requests are preempted.
SMALL = {"seats": 16, "blocks": 110, "max_model_len": 1024}
SWAP = {"retention": {"mode": "swap"}}
"""Policy keys that save each victim's KV."""


def answers(run: VirtualRun) -> dict[str, list[int]]:
    return {one.name: one.tokens for one in run.records}


@pytest.fixture(scope="module")
def plain() -> VirtualRun:
    """With room for all."""
    return run_virtual(LOAD, scheduler="fcfs")


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("scheduler", ["fcfs", "priority", "semantic"])
def test_preempted_requests_get_the_same_answers(plain, scheduler, asynchronous) -> None:
    run = run_virtual(LOAD, scheduler=scheduler, asynchronous=asynchronous, **SMALL)
    assert answers(run) == answers(plain)
    computed = sum(step.batch.prefill_tokens for step in run.steps)
    assert computed > sum(step.batch.prefill_tokens for step in plain.steps)  # computed again


def test_answers_have_the_lengths_of_the_load(plain) -> None:
    assert [len(one.tokens) for one in plain.records] == [one.answer for one in LOAD]


def test_device_is_never_idle_with_work_ready(plain) -> None:
    """The batch queue keeps it busy: it waits only for arrivals."""
    load = [replace(one, arrival=one.arrival * 20) for one in LOAD[:20]]
    run = run_virtual(load, scheduler="fcfs")
    waits = [step for step in run.steps if step.idle]
    arrivals = {one.arrival for one in load}
    assert waits and all(step.begin in arrivals for step in waits)
    assert not any(step.idle for step in plain.steps[1:])


def test_same_load_twice_gives_identical_records() -> None:
    first, second = (run_virtual(LOAD, **SMALL).dump() for _ in range(2))
    assert first == second


@pytest.mark.study
def test_records_do_not_depend_on_the_seed_of_hashes() -> None:
    load = LoadConfig(requests=30, rate=30.0, prompts=SHORT)
    options = {"seats": 8, "blocks": 300, "max_model_len": 4096, "prefix_cache": True}
    program = (
        "import sys\nfrom vllm_semantic_sched.lab.device.load import *\n"
        "from vllm_semantic_sched.lab.device.virtual import run_virtual\n"
        f"load = draw_load({load})\n"
        f"sys.stdout.write('\\n' + run_virtual(load, swap_gib=1.0, **{options}).dump())"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout
    rows = [line + "\n" for line in output.split("\n") if line.startswith("{")]
    assert json.loads(rows[0])["name"] == "r0" and len(rows) > 30
    assert "".join(rows) == run_virtual(draw_load(load), swap_gib=1.0, **options).dump()


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("drafter", ["eagle", "ngram_gpu"])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_drafts_save_steps_and_change_no_answer(plain, asynchronous, drafter, runner) -> None:
    options = SMALL | {"asynchronous": asynchronous, "runner": runner, "prefix_cache": True}
    options |= {"drafter": drafter, "drafts": 3}
    steps = []
    for acceptance in (0.0, 0.5, 0.9):
        run = run_virtual(LOAD, acceptance=acceptance, **options)
        assert answers(run) == answers(plain)
        assert run.engine.scheduler.use_v2_model_runner == (runner == 2)
        steps.append(len(run.steps))
    assert steps[0] > 1.2 * steps[1] > 1.3 * steps[2]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "sliding-8b"])
def test_kv_from_elsewhere_changes_no_answer(plain, asynchronous, shape) -> None:
    """Loads and sendings beside the steps, some of them failing, some found late."""
    extra = {"found": 0.5, "lookups": 3, "failing": 0.3, "sent": 0.5, "seconds": 0.02}
    connector = REMOTE_CONNECTOR | {"kv_connector_extra_config": extra}
    connector |= {"kv_load_failure_policy": "recompute"}
    options = {"asynchronous": asynchronous, "connector": connector, "shape": shape}
    run = run_virtual(LOAD, max_model_len=1024, blocks=1000, **options)
    assert answers(run) == answers(plain)
    computed = sum(step.batch.prefill_tokens for step in run.steps)
    assert computed < sum(step.batch.prefill_tokens for step in plain.steps)
    assert run.engine.runner.loads_failed and run.engine.runner.timeline.copies_end > 1.0
    pool = run.engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_noise_changes_times_and_not_answers(plain) -> None:
    noisy = run_virtual(LOAD, scheduler="fcfs", noise=0.1)
    assert answers(noisy) == answers(plain)
    assert noisy.steps[5].busy != plain.steps[5].busy


def test_host_seconds_idle_a_synchronous_engine() -> None:
    for asynchronous, idle in ((True, 0.0), (False, 0.002)):
        run = run_virtual(LOAD[:1], scheduler="fcfs", asynchronous=asynchronous, host_seconds=0.002)
        assert [step.idle for step in run.steps[2:]] == pytest.approx([idle] * len(run.steps[2:]))


def test_client_that_leaves_frees_its_blocks() -> None:
    load = [replace(one, abort=one.arrival + 0.5) for one in LOAD]
    run = run_virtual(load, **SMALL)
    assert {one.reason for one in run.records} == {"left", "stop"}
    assert not run.engine.scheduler.jobs


def test_thirty_two_seats_cost_what_the_profile_says(plain) -> None:
    profile = plain.engine.runner.profile
    assert [step.end - step.begin for step in plain.steps] == pytest.approx(
        [profile.step(step.batch) for step in plain.steps]
    )
