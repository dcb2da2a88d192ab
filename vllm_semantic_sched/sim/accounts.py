"""Seats, KV blocks and tokens of the simulated engine."""

import math
from collections import deque
from typing import NamedTuple

from vllm_semantic_sched.policy.facts.job import Job
from vllm_semantic_sched.sim.blocks import BlockPool, PrefixCache
from vllm_semantic_sched.sim.decoding import Decoding
from vllm_semantic_sched.sim.request import Run
from vllm_semantic_sched.sim.sections import EngineModel


class Outcome(NamedTuple):
    """What a step brings, which the engine knows once the step is over."""

    prefilled: list[Run]  # they get a token by their last chunk
    ended: list[Run]  # they get their last token


class Accounts:
    """What the engine has and who holds it."""

    def __init__(self, model: EngineModel) -> None:
        self._is_paper = model.kind == "paper"
        self.seats = model.seats
        self.pool = BlockPool(model.kv_blocks, model.block_size)
        self.host = BlockPool(model.host_blocks if model.swap else 0, model.block_size)
        self.prefixes = PrefixCache(self.pool, model.prefix_caching)
        # The paper's engine takes whole prompts, whatever their length.
        self.token_budget = math.inf if self._is_paper else model.token_budget
        self.decoding = Decoding(self.pool, find_longest=self._is_paper)
        self.runs: dict[Job, Run] = {}
        self.running: list[Job] = []  # jobs with a seat, most urgent first
        self.prefilling: dict[Job, None] = {}
        self.in_flight: deque[Outcome] = deque()  # of steps that have begun, if asynchronous
        self.ending: dict[Job, None] = {}  # their last token is in flight
        self.overrun: list[Run] = []  # those of them that the coming step decodes once more
        self.stale: set[Job] = set()  # preempted in this step, with output in flight

    def needed_blocks(self, job: Job) -> int:
        """KV blocks that a waiting job takes, less those that others hold of it."""
        return self.pool.needed(job.tokens) - self.prefixes.hits(self.runs[job])[1]

    def can_advance(self, job: Job) -> bool:
        """Whether a running job gets a token in the coming step."""
        # vLLM gives one to a request that has got its last, unless `max_tokens` says so.
        return job not in self.ending or self.runs[job] in self.overrun

    def decodes_now(self) -> int:
        """Requests that decode in the coming step."""
        return len(self.decoding) + len(self.overrun)
