"""Jobs for the tests of the policy core."""

import itertools

from vllm_semantic_sched.policy.facts.job import Job, LevelSource

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


def step(core, observe=lambda job: None, now: float = 0.0) -> list[Job]:
    """Advance the core by one step without an engine, and revise estimates."""
    core.tick()
    return core.revise(observe, now)
