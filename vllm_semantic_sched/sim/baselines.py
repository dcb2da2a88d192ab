"""Orders of other systems: the earliest deadline first (`Baselines.edf`), and the least attained
service first (`Baselines.las`)."""

import itertools
import math

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.sim.engine import Engine

_FIRST_QUANTUM = 256  # output tokens before a request leaves the first queue
_GROWTH = 4  # each queue allows so many times the tokens of the one before


def due(job: Job) -> float:
    """When the first of the deadlines that a request states passes; inf without any."""
    stated = [seconds for seconds in job.deadlines if seconds is not None]
    return job.arrival + min(stated, default=math.inf)


class Feedback:
    """A queue with feedback: the levels of the policy stand for its queues. A running request falls
    by a level whenever its answer has outgrown the one it is in; new requests take its seat."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        levels = range(engine.core.policy.levels - 1)
        quanta = [_FIRST_QUANTUM * _GROWTH**level for level in levels]
        self._ends = list(itertools.accumulate(quanta))  # of each queue but the last, tokens

    def step(self) -> None:
        """Move the running requests that have outgrown their queue."""
        for job in [*self._engine.running]:
            if job.level < len(self._ends):
                generated = self._engine.observed(job).generated
                if generated >= self._ends[job.level]:
                    self._engine.demote(job)
