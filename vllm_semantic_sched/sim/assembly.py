"""Puts the engine together that a scenario describes."""

from __future__ import annotations

from collections.abc import Callable

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.capacity import EngineCapacity
from vllm_semantic_sched.policy.profile.formula import EngineProfile
from vllm_semantic_sched.sim.blocks import BlockPool
from vllm_semantic_sched.sim.cost import SlowestOfBatch, StepCost, SumOfTokens
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.prefixes import PrefixCache
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.sections import EngineModel


def make_engine(
    core: SchedulingCore,
    model: EngineModel,
    profile: EngineProfile,
    keep_seats: bool = False,
    ended: Callable[[Run], None] = lambda run: None,
    seed: int = 0,
) -> Engine:
    """The engine that a scenario describes. It tells `ended` of each request that the policy ends;
    `seed`: of what is random in the policy's limits."""
    cost: StepCost
    if model.kind == "paper":
        cost = SlowestOfBatch(profile)
    else:
        batch = model.batch or profile.batch_terms
        cost = SumOfTokens(profile.model_copy(update={"batch": batch}))
    capacity = EngineCapacity(model.seats, model.kv_blocks, model.block_size)
    core.set_capacity(capacity, keeps_accounts=False, seed=seed)
    pool = BlockPool(model.kv_blocks, model.block_size)
    return Engine(
        core,
        cost,
        pool,
        seats=model.seats,
        token_budget=None if model.kind == "paper" else model.token_budget,
        host=BlockPool(model.host_blocks, model.block_size) if model.swap else None,
        keep_seats=keep_seats,
        ended=ended,
        prefixes=PrefixCache(pool) if model.prefix_caching else None,
    )
