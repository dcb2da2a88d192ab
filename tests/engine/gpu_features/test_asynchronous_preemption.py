"""A level 0 takes a seat at once under asynchronous scheduling; more in tests/lab/device."""

import pytest
import torch
from engine_steps import EngineSteps
from fake_device import swap_config
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from vllm_semantic_sched.lab.bench.standalone import BLOCK_SIZE
from vllm_semantic_sched.policy.preemption import Plans

pytestmark = pytest.mark.engine

AT_ONCE = 3


def test_level_0_takes_a_seat_of_a_hybrid_model(build) -> None:
    state = MambaSpec(block_size=BLOCK_SIZE, shapes=((1, 1),), dtypes=(torch.float32,))
    scheduler = build(
        kv_transfer_config=swap_config(),
        async_scheduling=True,
        host_blocks=100,
        num_blocks=200,
        max_num_seqs=2,
        max_num_batched_tokens=100,
        more_layers=[KVCacheGroupSpec(["state"], state)],
    )
    steps = EngineSteps(scheduler)
    steps.add("x", "y", urgency=4, output_tokens=60)
    steps.run(4)
    steps.add("urgent", urgency=0, output_tokens=3)
    assert steps.until_scheduled("urgent", 30) in range(AT_ONCE + 1)
    steps.finish()


def test_victim_costs_what_a_step_in_flight_computes_for_it(build) -> None:
    """It is lost as well: a request just admitted would seem to cost nothing."""
    scheduler = build(async_scheduling=True, max_num_batched_tokens=100)
    steps = EngineSteps(scheduler)
    steps.add("x", urgency=4, prompt_tokens=90, output_tokens=9)
    scheduler.schedule()
    assert steps.requests["x"].num_in_flight_tokens == 90
    core = scheduler.core
    plans = Plans(core.plan_preemption, core.profile, scheduler.snapshot())
    cost = plans.seconds(scheduler.jobs["x"])
    assert cost == pytest.approx(scheduler.core.profile.prefill(0, 90))
