"""Where a waiting job stands: its place in the queue, and when it is expected to get a seat."""

import itertools
from typing import NamedTuple

from vllm_semantic_sched.policy.core import SchedulingCore
from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.policy.snapshot import Snapshot


class Position(NamedTuple):
    """A job's place in the queue, as long as no other job comes and no level changes."""

    ahead: int  # waiting jobs that get seats before
    seconds: float | None  # expected until it gets one; None where no account of the load is kept


def position_of(core: SchedulingCore, snapshot: Snapshot, job: Job) -> Position | None:
    """The position of a waiting job in the present order; None for one that is not in the order:
    it runs, or the engine cannot admit it yet. Visits all jobs ahead of it and all running ones:
    not for a step."""
    queue, other = core.waiting, core.with_kv
    if job in core.with_kv:
        queue, other = core.with_kv, core.waiting
    if job not in queue or queue.is_aside(job):
        return None
    ahead = list(itertools.takewhile(lambda waiting: waiting is not job, queue.ordered()))
    if len(other):  # the two queues have no common order but that of the ranks
        rank = core.rank(job)
        ahead += [waiting for waiting in other if core.rank(waiting) < rank]
    if core.overload is None:
        return Position(len(ahead), seconds=None)
    tokens = sum(core.estimates.tokens(waiting) - waiting.generated for waiting in ahead)
    served = sum(snapshot.progress(running).computed for running in core.running)
    seconds = core.overload.load.seconds_to_start(tokens, len(ahead), served)
    return Position(len(ahead), seconds)
