"""Jobs for the tests of the policy core."""

import itertools

from vllm_semantic_sched.policy.config import Policy
from vllm_semantic_sched.policy.config.reference import PolicyRef
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.capacity import Need
from vllm_semantic_sched.policy.facts.job import Job, LevelSource, Seat
from vllm_semantic_sched.policy.order.queues import OrderingRules
from vllm_semantic_sched.policy.preemption import Plans
from vllm_semantic_sched.policy.profile.formula import load_profile
from vllm_semantic_sched.policy.snapshot import Progress

_sequence = itertools.count()


def make_job(level: int = 2, **fields) -> Job:
    """A job with the next sequence number."""
    sequence = next(_sequence)
    values = {
        "request_id": f"r{sequence}",
        "sequence": sequence,
        "arrival": 0.0,
        "prompt_tokens": 100,
        "max_output_tokens": 1000,
        "level": level,
        "level_source": LevelSource.HINT,
    }
    return Job(**(values | fields))


def take_next(queue) -> Job:
    """Take the job that is next out of a waiting queue."""
    job = queue.peek()
    queue.remove(job)
    return job


def policy_of(tiers=(), **keys) -> Policy:
    """A policy with these keys, with a level for each tier if there are any."""
    if tiers:
        keys |= {"tiers": tuple(tiers), "levels": len(tiers), "default_level": len(tiers) - 1}
    return Policy(**keys)


def policy_ref(tiers=(), **keys) -> PolicyRef:
    """Holds a policy as of `policy_of`."""
    return PolicyRef(policy_of(tiers, **keys))


def make_rules(**keys) -> OrderingRules:
    """The rules of a queue under a policy with these keys."""
    ref = policy_ref(**keys)
    return OrderingRules(ref, Estimator(ref, load_profile("default")))


def step(core, observe=lambda job: None, now: float = 0.0) -> list[Job]:
    """Advance the core by one step without an engine, and revise estimates."""
    core.tick()
    return core.revise(observe, now)


def seated(job: Job) -> Job:
    """The job, with a seat that holds nothing yet."""
    job.seat = Seat(blocks=0)
    return job


class FreeingSnapshot:
    """Running jobs of which each frees so many blocks, and has all that it will ever compute."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def progress(self, job: Job) -> Progress:
        return Progress(job.computed, job.generated, job.computed)

    def freeable_blocks(self, job: Job) -> int | None:
        return self._blocks

    def host_room(self, job: Job, with_kv: int) -> None:
        return None

    def can_end(self, job: Job) -> bool:
        return True


class FreePlans(Plans):
    """Preemptions that cost nothing."""

    def seconds(self, job: Job) -> float:
        return 0.0


def victims_for(core, job: Job, need: Need, freed: int) -> list[Job]:
    """Victims for a waiting job, if preemptions are free and each frees so many blocks."""
    snapshot = FreeingSnapshot(freed)
    return core.eviction.victims_for(
        job, need, snapshot, FreePlans(core.plan_preemption, core.profile, snapshot)
    )
