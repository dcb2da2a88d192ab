"""Jobs for the tests of the policy core."""

import itertools

from vllm_semantic_sched.policy.config import parse_policy
from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.job import Job, LevelSource, Seat
from vllm_semantic_sched.policy.order.queues import QueueRules
from vllm_semantic_sched.policy.profile.formula import load_profile

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


def make_rules(**keys) -> QueueRules:
    """The rules of a queue under a policy with these keys."""
    policy = parse_policy(keys)
    return QueueRules(policy, Estimator(policy, load_profile("default")))


def step(core, observe=lambda job: None, now: float = 0.0) -> list[Job]:
    """Advance the core by one step without an engine, and revise estimates."""
    core.tick()
    return core.revise(observe, now)


def seated(job: Job) -> Job:
    """The job, with a seat that holds nothing yet."""
    job.seat = Seat(blocks=0)
    return job


class FreeingView:
    """Running jobs of which each frees so many blocks, for nothing."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks

    def is_ready(self, job: Job) -> bool:
        return True

    def needed_blocks(self, job: Job) -> int:
        return 0

    def freeable_blocks(self, job: Job) -> int | None:
        return self._blocks

    def observe(self, job: Job) -> None:
        pass

    def obstacles(self, job: Job) -> list:
        return []

    def preemption_seconds(self, job: Job) -> float:
        return 0.0
