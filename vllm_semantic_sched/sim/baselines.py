"""Orders of other systems: the earliest deadline first (`Baselines.edf`), the least attained
service first (`Baselines.las`), boosted arrival within a level (`Baselines.boost`), and by sessions
(`Baselines.sessions`)."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable

from vllm_semantic_sched.policy.estimates.estimator import Estimator
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.sim.engine import Engine
from vllm_semantic_sched.sim.request import Run

_FIRST_QUANTUM = 256  # output tokens before a request leaves the first queue
_GROWTH = 4  # each queue allows so many times the tokens of the one before


def due(job: Job) -> float:
    """When the first of the deadlines that a request states passes; inf without any."""
    stated = [seconds for seconds in job.deadlines if seconds is not None]
    return job.arrival + min(stated, default=math.inf)


def boosted(estimates: Estimator, gamma: float, lengths: bool) -> Callable[[Job], float]:
    """The order of gamma-Boost (Yu and Scully, Strongly Tail-Optimal Scheduling in the Light-Tailed
    M/G/1): the lowest

        arrival - ln(1 / (1 - exp(-gamma w))) / gamma

    runs first, so that a request counts as the older the less its work `w` is. `w` are seconds of
    the engine. Without lengths they are those that a request is known to need: of its prompt, and
    of the tokens that it has got, as in UniBoost (arXiv 2606.18431), which also preempts by this
    order. With `lengths` they are those of the whole request, by its predicted length."""

    def rank(job: Job) -> float:
        profile = estimates.profile
        tokens = estimates.output_tokens(job) if lengths else job.generated
        work = profile.prefill(0, job.prompt_tokens) + profile.decode(job.prompt_tokens, tokens)
        return job.arrival + math.log(-math.expm1(-gamma * work)) / gamma

    return rank


class SessionOrder:
    """What requests can be ordered by if their sessions count as a whole."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turns = defaultdict[str, dict[int, Run]](dict)  # by session, and index of the request

    def began(self, job: Job) -> float:
        """When the first request of the session arrived."""
        return min(run.job.arrival for run in self._turns_with(job))

    def attained(self, job: Job) -> float:
        """Engine seconds of the session's answers, as if each had run alone: what the prefix cache
        held is not counted."""
        profile, seconds = self._engine.core.profile, 0.0
        for run in self._turns_with(job):
            if run.finish is not None:
                request = run.request
                computed = min(run.found, request.prompt_tokens)
                seconds += profile.prefill(computed, request.prompt_tokens)
                seconds += profile.decode(request.prompt_tokens, request.output_tokens)
        return seconds

    def _turns_with(self, job: Job) -> list[Run]:
        """The requests so far of a job's session."""
        run = self._engine.runs[job]
        turns = self._turns[run.request.session or job.request_id]
        turns[run.request.index] = run
        return [*turns.values()]


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
